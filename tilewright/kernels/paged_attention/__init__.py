"""Attention over a KV cache: the shared core of all serving ops."""
