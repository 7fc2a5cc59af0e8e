"""Absorbed multi-head latent attention."""
