"""What every Mosaic GPU kernel for Hopper uses: limits, tiles, the ring of stages, softmax, work lists, the launch."""
