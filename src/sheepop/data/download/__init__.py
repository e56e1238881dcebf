"""Public datasets from a hub to a plain folder: what was asked for, whole or a measured part, and where it is from."""
