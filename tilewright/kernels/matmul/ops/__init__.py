"""The functions over the core of matmuls, one file each."""
