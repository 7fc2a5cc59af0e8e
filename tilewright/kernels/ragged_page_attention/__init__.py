"""Packed queries over pages."""
