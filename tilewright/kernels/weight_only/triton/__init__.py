"""Matmuls with weights of few bits in Triton, on NVIDIA GPUs."""
