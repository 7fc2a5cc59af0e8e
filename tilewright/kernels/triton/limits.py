"""Limits of Triton's tiles."""

MIN_DOT = 16
"""Rows, columns and depth of the smallest matmul on tensor cores."""


def power_of_two(size: int, least: int = 1) -> int:
    """The least power of two that is not below ``size`` and ``least``: the extent of a tile."""
    return max(1 << (size - 1).bit_length() if size > 1 else 1, least)
