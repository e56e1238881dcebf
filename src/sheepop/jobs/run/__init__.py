"""The life of a run: requested, opened, trained, scored, reported, listed."""
