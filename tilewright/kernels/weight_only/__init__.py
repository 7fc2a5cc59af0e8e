"""Matmuls of activations with weights that are stored in four or eight bits."""
