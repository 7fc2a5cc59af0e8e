"""Passes over chunks in Triton, which backends of linear attention on GPUs share."""
