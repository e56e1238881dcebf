"""Looking inside: every number of a pass over a prompt, and what can be read off it."""
