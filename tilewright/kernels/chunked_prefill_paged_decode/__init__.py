"""Writing a chunk and attending to it."""
