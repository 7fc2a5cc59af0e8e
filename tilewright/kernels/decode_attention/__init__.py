"""Decoding over a dense or a paged cache."""
