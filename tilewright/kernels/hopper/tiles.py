"""Tiles in a warpgroup's registers: layouts of wgmma's accumulator, and operations on tiles and on row vectors."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.limits import WGMMA_M
from tilewright.kernels.pallas_types import Ref, Scalar

ROWS = WGMMA_M
"""Rows of a warpgroup's tile: the M of wgmma."""


def tile_layout() -> Any:
    """The layout of wgmma's accumulator."""
    return plgpu.Layout.WGMMA


def row_layout() -> Any:
    """The layout of one value for each row of an accumulator."""
    # Each of the four lanes that share a row of the accumulator has a copy, so broadcasting the values to a tile moves
    # nothing.
    return tile_layout().reduce(1)


def column_layout() -> Any:
    """The layout of one value for each column of an accumulator."""
    return tile_layout().reduce(0)


def row_constants(value: float) -> jax.Array:
    """``[64]`` float32, one value for each row of an accumulator."""
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), row_layout())


def across(vector: jax.Array, columns: int) -> jax.Array:
    """``[64]`` values of rows, broadcast to a tile of so many columns."""
    return lax.broadcast_in_dim(vector, (ROWS, columns), [0])


def spread(vector: jax.Array, shape: tuple[int, int], axis: int) -> jax.Array:
    """A vector along ``axis`` of a tile, broadcast to it in the accumulator's layout.

    The layout is given although it could be inferred: inference propagates it backwards from the uses of a tile, one
    operation at a time, with a pass over the whole kernel for each.
    """
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, shape, [axis]), tile_layout())


def store_unoptimised(target: Ref, value: jax.Array) -> None:
    """Stores registers without shuffles, also where that fills no whole sectors or causes bank conflicts."""
    store: Any = getattr(plgpu, "store", None)
    if store is None:  # jax 0.11, where every store is one
        target[...] = value
    else:
        store(target, value, optimized=False)


def opaque_zero(value: Scalar, bits: int = 30) -> jax.Array:
    """A 0 that the compiler cannot know: ``value`` is from memory or a loop, not negative, below 2 to the ``bits``.

    An operand of wgmma that a loop does not change is indexed with it. Otherwise its descriptors, 64 bits for each of
    up to 32 slices, are hoisted out of the loop, and registers spilled for them (280 bytes at head_dim 256).
    """
    return lax.shift_right_logical(value, jnp.int32(bits))
