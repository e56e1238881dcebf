"""The foundation of all stages: configuration, errors, atomic files, random streams, the console."""
