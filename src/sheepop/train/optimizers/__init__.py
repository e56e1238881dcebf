"""Optimizers, and the learning rates and decays of their parameter groups."""
