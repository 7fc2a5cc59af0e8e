"""Flash attention in Pallas Mosaic GPU, for Hopper."""
