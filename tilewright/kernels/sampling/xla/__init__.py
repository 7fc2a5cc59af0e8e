"""Tokens in plain XLA, from logits and from hidden states."""
