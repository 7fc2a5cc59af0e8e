"""Kernels, their invocations, and what both are described by."""
