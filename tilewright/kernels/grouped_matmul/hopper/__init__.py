"""The grouped matmuls on Hopper, by ``kernels/hopper/matmul``."""
