"""Vocabulary losses in plain XLA, in blocks of tokens and of the vocabulary."""
