"""Tokens from logits in Triton, on NVIDIA GPUs."""
