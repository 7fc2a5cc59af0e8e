"""Shared parts of the Mosaic GPU kernels for Hopper: limits, tiles, the ring of stages, softmax, work lists, launch."""
