"""The movement of rows in Triton."""
