"""Equal and nearly equal documents: found among all documents, of this build and of earlier ones."""
