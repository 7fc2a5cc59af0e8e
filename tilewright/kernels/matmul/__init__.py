"""Dense matmuls: one alone, and the pair of a gated linear unit."""
