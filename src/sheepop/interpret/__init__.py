"""Traces: every tensor of a forward pass over a prompt, and analyses of them."""
