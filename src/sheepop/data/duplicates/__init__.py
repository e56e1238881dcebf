"""Finds equal and nearly equal documents among all documents of this build and of earlier ones."""
