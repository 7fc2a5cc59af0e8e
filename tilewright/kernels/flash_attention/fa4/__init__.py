"""Flash attention by FlashAttention-4's kernels."""
