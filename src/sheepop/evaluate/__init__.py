"""Evaluates models: perplexity, tasks, programs, judges, with intervals, tests and contamination checks."""
