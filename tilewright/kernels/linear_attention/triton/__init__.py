"""Linear attention in Triton, on NVIDIA GPUs."""
