"""Measuring: candidates, their search, and where and how they are timed."""
