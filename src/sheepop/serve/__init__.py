"""Models over HTTP: the OpenAI-compatible API, its limits, its metrics."""
