"""Families of small runs, the laws that they follow, and what these say about a larger run."""
