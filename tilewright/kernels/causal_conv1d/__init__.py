"""Causal depthwise convolution over short windows: of whole sequences, and of the tokens that decoding adds."""
