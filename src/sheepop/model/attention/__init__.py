"""Attention: the rule of sight, one kernel a file, the function that chooses among them, and the layer."""
