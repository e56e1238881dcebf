"""Scores a model: perplexity, tasks, code, judges, and whether the numbers can be believed."""
