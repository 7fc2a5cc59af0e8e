"""The grouped matmul in Triton, on NVIDIA GPUs."""
