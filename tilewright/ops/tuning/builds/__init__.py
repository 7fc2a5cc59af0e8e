"""Builds that a tuning has made beside it, in a process of their own."""
