"""Paged attention in CUDA C++."""
