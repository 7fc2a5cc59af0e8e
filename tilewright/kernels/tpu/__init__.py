"""Parts that all kernels for TPUs share: the devices they are for, and their launch."""
