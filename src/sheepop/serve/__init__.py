"""Serving models over HTTP: the OpenAI-compatible API, its limits and metrics, and the page."""
