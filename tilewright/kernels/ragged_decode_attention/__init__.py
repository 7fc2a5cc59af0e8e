"""Decoding over ranges of a dense cache."""
