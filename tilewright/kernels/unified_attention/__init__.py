"""Packed queries over pages, in vLLM's layout."""
