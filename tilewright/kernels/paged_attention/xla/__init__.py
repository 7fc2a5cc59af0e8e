"""Paged attention in plain XLA."""
