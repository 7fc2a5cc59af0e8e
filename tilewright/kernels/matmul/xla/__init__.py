"""The matmuls in plain XLA."""
