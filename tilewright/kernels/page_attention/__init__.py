"""Page attention."""
