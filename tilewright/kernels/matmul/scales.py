"""The scales of narrow operands: one number, or one for each block of 128 elements."""

from typing import Any

import jax
import jax.numpy as jnp

from tilewright.kernels.matmul.inputs import SCALE_BLOCK


def expanded(scale: jax.Array, shape: tuple[int, ...], axes: tuple[int, ...]) -> jax.Array:
    """The scale of each element of an array of ``shape``, whose ``axes`` are in blocks; the last one may be short."""
    for axis in axes:
        scale = jnp.repeat(scale, SCALE_BLOCK, axis=axis, total_repeat_length=SCALE_BLOCK * scale.shape[axis])
        scale = jax.lax.slice_in_dim(scale, 0, shape[axis], axis=axis)
    return scale


def factor(*scales: Any) -> Any:
    """The product of the scales that are numbers; ``None`` without any."""
    numbers = [scale for scale in scales if scale is not None and scale.ndim == 0]
    return None if not numbers else numbers[0] if len(numbers) == 1 else numbers[0] * numbers[1]


def by_blocks(scale: Any) -> Any:
    """The scale if it has one for each block, else ``None``."""
    return scale if scale is not None and scale.ndim else None
