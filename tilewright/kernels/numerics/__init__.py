"""Numerics that ops share."""
