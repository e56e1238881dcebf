"""One table for each model family."""
