"""Rotary embedding: its formula, the frequencies of scaled contexts, and one backend."""
