"""Matmuls on Hopper."""
