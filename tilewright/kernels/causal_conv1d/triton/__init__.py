"""The causal convolution in Triton, for NVIDIA GPUs."""
