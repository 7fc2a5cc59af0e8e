"""The head dims that the Hopper kernels compute with, and which calls have their tiles in panels."""

from tilewright.kernels.hopper.limits import SWIZZLE_ROWS

HEAD_DIMS = (64, 96, 128, 192, 256)
"""Head dims that kernels are built for; others are padded to the next."""

PANELLED_DIMS = (64, 80, 96, 128, 160, 192, 256)
"""Head dims of the forward kernel where tiles lie in panels: 80 and 160 columns take a last panel of 16 or 32."""


def padded_dim(dim: int) -> int:
    """The head dim that kernels compute with."""
    return next(size for size in HEAD_DIMS if size >= dim)


def forward_dims(head_dim: int, value_dim: int, panelled: bool) -> tuple[int, int]:
    """head_dim and value_dim that the forward kernel computes with: over panels there are more to choose from."""
    sizes = PANELLED_DIMS if panelled else HEAD_DIMS
    head_dim, value_dim = (next(size for size in sizes if size >= dim) for dim in (head_dim, value_dim))
    return head_dim, value_dim


def needs_panels(q_length: int, kv_length: int, head_dim: int, value_dim: int) -> bool:
    """True if TMA cannot cut the arrays of a call into the atoms of whole tiles, so that these lie in panels."""
    rows = q_length % SWIZZLE_ROWS or kv_length % SWIZZLE_ROWS
    return bool(rows) or any(padded_dim(dim) != dim for dim in (head_dim, value_dim))
