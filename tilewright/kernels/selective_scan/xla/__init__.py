"""The selective scan in plain XLA."""
