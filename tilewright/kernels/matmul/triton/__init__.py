"""The matmuls in Triton, on NVIDIA GPUs."""
