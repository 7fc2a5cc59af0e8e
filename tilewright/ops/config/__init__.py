"""Caches of configs, and the selection of one for a call."""
