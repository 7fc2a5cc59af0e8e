"""Matmuls: dense or of rows in groups, each alone or the pair of a gated linear unit."""
