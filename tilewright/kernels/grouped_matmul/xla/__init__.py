"""The grouped matmuls in plain XLA."""
