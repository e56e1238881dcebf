"""Attention: the rule for which keys a query sees, one file for each kernel, the choice of kernel, and the layer."""
