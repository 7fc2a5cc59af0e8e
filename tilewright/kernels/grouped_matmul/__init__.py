"""Matmuls of rows in groups, each of which has a matrix of its own."""
