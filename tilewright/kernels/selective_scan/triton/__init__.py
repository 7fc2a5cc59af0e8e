"""The selective scan in Triton."""
