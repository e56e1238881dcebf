"""Turns files of every kind into documents: detects the type by content and reads within limits; a module a format."""
