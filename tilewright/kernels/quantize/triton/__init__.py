"""Quantising in Triton."""
