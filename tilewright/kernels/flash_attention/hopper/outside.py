"""Zeros in tiles of queries and keys that hang over the ends of lengths, or of packed sequences.

What lies outside may be anything. Its probabilities are 0, but a matmul over the rows of a tile adds 0 times what they
hold, which is NaN if that is NaN or infinite. So each consumer that reads such a tile zeroes these rows in shared
memory first, as often as there are consumers: they write the same, so none has to wait for another.
"""

from typing import Any

import jax.experimental.pallas as pl
import jax.numpy as jnp

from tilewright.kernels.flash_attention.hopper.scores import ScoreArrays
from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.mosaic_zeros import zero_lines_outside
from tilewright.kernels.hopper.panels import PanelRef
from tilewright.kernels.hopper.ring import Ring, when
from tilewright.kernels.hopper.shared import SharedTile
from tilewright.kernels.hopper.types import Condition, Ref, Scalar

QUERIES, KEYS = 0, 2
"""The places of the first and the end of a side in ``ScoreArrays.inside``."""


def clear_outside(
    ring: Ring, step: Scalar, arrays: ScoreArrays, side: int, batch: Scalar, start: Scalar, masked: Condition = True
) -> None:
    """Zeroes the rows of a stage that are outside; its load must have been waited for, and no MMA may be in flight.

    ptxas would serialise MMAs that are in flight around the branch.

    Args:
      side: of the rows, ``QUERIES`` or ``KEYS``.
      start: the first of them.
      masked: whether the step needs the mask: without it nothing of the tile is outside.
    """
    inside: Any = arrays.inside
    if inside is None:
        return
    tile = ring.plan.tile

    def clear() -> None:
        element = batch if inside.shape[0] > 1 else 0
        low, high = inside[element, side] - start, inside[element, side + 1] - start

        @pl.when((low > 0) | (high < tile.shape[0]))
        def _() -> None:
            zero_outside(ring.get_mma_tile(step), tile, low, high)
            # wgmma reads through the async proxy, to which stores of threads are visible only after a fence.
            plgpu.commit_smem()

    when(masked, clear)


def zero_outside(stage: Ref, tile: SharedTile, low: Scalar, high: Scalar) -> None:
    """Zeroes the rows of a stage that are not from ``low`` to ``high``."""
    views: Any = [(stage, tile.transforms)]
    if isinstance(stage, PanelRef):
        views = zip(stage.operands, stage.transforms, strict=True)
    for view, transforms in views:

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), plgpu.Layout.WG_SPLAT(()), plgpu.Layout.WG_SPLAT(())))
        def zero(_: Any, view: Any, low: Any, high: Any) -> None:
            zero_lines_outside(view, low, high)

        zero(view, jnp.asarray(low, jnp.int32), jnp.asarray(high, jnp.int32))
