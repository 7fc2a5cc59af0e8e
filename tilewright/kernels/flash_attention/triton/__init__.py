"""Flash attention in Triton."""
