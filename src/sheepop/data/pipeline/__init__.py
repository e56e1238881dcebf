"""The build as passes over parts of the input, run by an engine on one machine or on many."""
