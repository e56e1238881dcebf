"""Files of every kind to documents: found out by content, read within limits, one file of code for each format."""
