"""Attention over a cache of keys and values: the one core of all serving ops."""
