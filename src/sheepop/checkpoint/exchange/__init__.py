"""Reads and writes models in the format of Hugging Face's transformers, with one table for each model family."""
