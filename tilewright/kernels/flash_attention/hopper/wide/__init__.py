"""Backward kernels on Hopper for head dims beyond 128, where a warpgroup holds either dK or dV."""
