"""Linear attention with a gate for each head, on Hopper in Pallas Mosaic GPU."""
