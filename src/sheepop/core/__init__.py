"""What every stage stands on: configuration, errors, atomic files, random streams, the console."""
