"""The norms in Triton."""
