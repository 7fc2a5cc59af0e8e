"""Tokens in Triton, on NVIDIA GPUs, from logits and from hidden states."""
