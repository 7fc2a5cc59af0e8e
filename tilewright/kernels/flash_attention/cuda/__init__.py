"""Flash attention in CUDA C++."""
