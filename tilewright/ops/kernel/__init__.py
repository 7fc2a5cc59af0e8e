"""Kernels, their invocations, and the data that describes both."""
