"""The cross-entropy of logits that are never in memory in Triton, on NVIDIA GPUs."""
