"""Paged attention on TPUs, in Pallas."""
