"""The devices that the kernels for TPUs are for, and the launch of these kernels."""
