"""Post-training: what turns a model that continues text into one that follows instructions and preferences."""
