"""Spreads a finished model over several processes, from outside: one rank each, started by torchrun."""
