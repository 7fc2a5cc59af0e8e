"""Flash attention in plain XLA."""
