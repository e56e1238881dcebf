"""One table per family of models."""
