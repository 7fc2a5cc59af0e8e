"""Limits of Triton's tiles."""

MIN_DOT = 16
"""Rows, columns and depth of the smallest matmul on tensor cores."""


def power_of_two(size: int, minimum: int = 1) -> int:
    """The smallest power of two that is at least ``size`` and ``minimum``: the extent of a tile."""
    return max(1 << (size - 1).bit_length() if size > 1 else 1, minimum)
