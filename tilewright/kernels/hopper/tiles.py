"""Tiles in a warpgroup's registers: their layout, and what kernels do to whole tiles and to a value for each row."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.limits import WGMMA_M
from tilewright.kernels.hopper.types import Ref, Scalar

ROWS = WGMMA_M
"""Rows of a tile that a warpgroup works on: the M of its matrix instruction."""


def tile_layout() -> Any:
    """The layout of the accumulators of a warpgroup's matrix instructions."""
    return plgpu.Layout.WGMMA


def row_layout() -> Any:
    """The layout of one value for each row of an accumulator."""
    return tile_layout().reduce(1)


def column_layout() -> Any:
    """The layout of one value for each column of an accumulator."""
    return tile_layout().reduce(0)


def row_constants(value: float) -> jax.Array:
    """``[64]`` float32, one value for each row of an accumulator."""
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), row_layout())


def across(vector: jax.Array, columns: int) -> jax.Array:
    """``[64]`` values of rows as a tile with so many columns."""
    return lax.broadcast_in_dim(vector, (ROWS, columns), [0])


def spread(vector: jax.Array, shape: tuple[int, int], axis: int) -> jax.Array:
    """A vector along ``axis`` of a tile of an accumulator's layout.

    The layout is said where it would follow: layout inference looks for it from what a tile ends up in, operation by
    operation, with a pass over the whole kernel for each.
    """
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, shape, [axis]), tile_layout())


def store_unoptimised(target: Ref, value: jax.Array) -> None:
    """Stores registers as they lie, also where that fills no whole sectors or makes banks of shared memory conflict."""
    store: Any = getattr(plgpu, "store", None)
    if store is None:  # jax 0.11, which takes every store so
        target[...] = value
    else:
        store(target, value, optimized=False)


def opaque_zero(value: Scalar, bits: int = 30) -> jax.Array:
    """0, which the compiler cannot know: ``value`` is from memory or a loop, not negative, and below 2 to the ``bits``.

    An operand of wgmma that a loop does not change is indexed with it. Its descriptors, 64 bits for each of up to 32
    slices, were hoisted out of the loop otherwise, and registers spilled for them (280 bytes at head_dim 256).
    """
    return lax.shift_right_logical(value, jnp.int32(bits))
