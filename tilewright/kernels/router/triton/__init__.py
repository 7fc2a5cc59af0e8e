"""The router in Triton."""
