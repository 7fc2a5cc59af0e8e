"""The matmuls on Hopper, by ``kernels/hopper/matmul``."""
