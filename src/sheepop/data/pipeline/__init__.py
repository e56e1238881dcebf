"""The passes of a corpus build over parts of the input, run by an engine on one machine or many."""
