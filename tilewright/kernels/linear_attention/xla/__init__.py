"""Linear attention in plain XLA."""
