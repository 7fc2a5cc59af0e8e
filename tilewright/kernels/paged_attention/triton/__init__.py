"""Paged attention in Triton."""
