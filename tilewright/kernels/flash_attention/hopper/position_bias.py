"""A bias of positions on Hopper: the accumulator of S starts from it, and the gradient of its values is added up.

What S starts from is the bias over the softmax scale, so everything behind S, such as the exponent that has the scale
in it and the start from −lse in the backward pass, is as without a bias.

ALiBi is computed from positions. Where the mask leaves each query only keys on one side of it, as causal attention
does, the distance is a difference, and no absolute value is taken. Of relative values each thread loads those of its
diagonals from global memory, a quarter of a dense bias's at most.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.flash_attention.hopper.scores import (
    LANE_COLUMNS,
    PositionOptions,
    ScoreArrays,
    ScoreOptions,
    TileCoord,
)
from tilewright.kernels.flash_attention.position_bias import PositionBias
from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.diagonals import add_along_diagonals, load_toeplitz_tile
from tilewright.kernels.hopper.tiles import ROWS, row_layout, store_unoptimised
from tilewright.kernels.hopper.types import Ref

DIAGONALS = 2 * ROWS - 1
"""Diagonals of a tile of dS, which has 64 keys and queries."""

PADDED_TO = 128
"""Keys and queries to whose multiple the gradient of relative values is padded: those of the largest step."""


def reasons(bias: PositionBias | None, scale: float) -> list[str]:
    """Reasons why the kernels cannot add a bias; empty if they can."""
    if bias is None:
        return []
    found = []
    if bias.q_positions is not None:
        found.append("counts the positions of a bias by index, got positions that are an array")
    if not math.isfinite(1 / scale if scale else math.inf):
        found.append(f"starts from a bias over the scale, got {scale=}")
    return found


def initial_scores(options: ScoreOptions, arrays: ScoreArrays, tile_coord: Callable[[], TileCoord]) -> jax.Array | None:
    """What S of a tile starts from, float32; None without a bias of positions.

    Args:
      tile_coord: coordinates of the tile, which are computed only if they are needed.
    """
    positions, values = options.positions, arrays.position_values
    if positions is None:
        return None
    assert values is not None
    coord = tile_coord()
    if positions.kind == "alibi":
        # The slopes come negated.
        return _scaled_distances(coord, positions, values[coord.head, 0])
    q_size, kv_size = coord.shape[coord.q_axis], coord.shape[1 - coord.q_axis]
    # Of the tile's first key and last query.
    first = coord.kv_start - coord.q_start - (q_size - 1) + positions.last_query
    row = coord.head if values.shape[0] > 1 else 0
    diagonals: Any = values.at[row, pl.ds(first, q_size + kv_size - 1)]
    return load_toeplitz_tile(diagonals, coord.shape[1], ascending=coord.q_axis == 0)


def _scaled_distances(coord: TileCoord, positions: PositionOptions, factor: jax.Array | None) -> jax.Array:
    """``factor`` · |i − j| of a tile, or the distances themselves: exact below 2²⁴."""
    # As in `TileCoord.between` a thread's columns are an offset of its own plus constants, which alone differ between
    # its elements, and become operands of instructions.
    along = coord.along(1)
    offset, constants = along & LANE_COLUMNS, (along & ~LANE_COLUMNS).astype(jnp.float32)
    if coord.q_axis == 0:
        start = coord.rows() - (coord.kv_start - positions.offset + offset)
        constants = -constants
    else:
        start = (coord.q_start + positions.offset + offset) - coord.columns()
    own = start.astype(jnp.float32)
    if positions.side == 0:
        distances = jnp.abs(own + constants)
        return distances if factor is None else distances * factor
    if factor is None:
        distances = own + constants
        return distances if positions.side > 0 else -distances
    factor = factor * positions.side
    # Relative to the tile, so that rounding is that of a product of slope and distance.
    return own * factor + constants * factor


@dataclasses.dataclass(frozen=True, slots=True)
class PositionGradient:
    """The array in global memory to which the kernels for dK and dV add the gradient of the values of a bias.

    It takes the place of a `BiasGradient` in these kernels. ALiBi: for each batch element, head and key the sum of
    dS · |i − j| over the queries, which one warpgroup adds up in the order of its steps. Relative values: the sums of
    dS along diagonals, in ``rows`` rows for each batch element and head: one for each of a CTA's consumers, or if
    ``deterministic`` one for each 16 keys, to which one warp alone adds.

    Attributes:
      positions: of the kernels' scores; its ``last_query`` is not used.
      values_shape: ``[heads | 1, 1 or number of differences]``.
      values_dtype: of the gradient.
      scores: batch, heads, q_length and kv_length of the call.
    """

    positions: PositionOptions
    values_shape: tuple[int, int]
    values_dtype: DTypeLike
    scores: tuple[int, int, int, int]
    deterministic: bool

    added = False
    """No tile passes through shared memory."""

    @property
    def padded_lengths(self) -> tuple[int, int]:
        q_padded, kv_padded = (-(-length // PADDED_TO) * PADDED_TO for length in self.scores[2:])
        return q_padded, kv_padded

    @property
    def rows(self) -> int:
        """Rows of sums along diagonals."""
        return self.padded_lengths[1] // 16 if self.deterministic else 2

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        q_padded, kv_padded = self.padded_lengths
        if self.positions.kind == "alibi":
            return (*self.scores[:2], kv_padded)
        return (*self.scores[:2], self.rows, q_padded + kv_padded)

    @property
    def dtype(self) -> DTypeLike:
        return jnp.float32

    @property
    def bytes(self) -> int:
        """Size of the array."""
        return 4 * int(np.prod(self.shape))

    def staging(self, warpgroups: int) -> object:
        """Scratch type of a buffer for tiles in shared memory: there is none."""
        del warpgroups
        return None

    def staging_bytes(self, warpgroups: int) -> int:
        del warpgroups
        return 0

    def store(self, ref: Ref, staging: Ref | None, ds: jax.Array, coord: TileCoord) -> None:
        """Adds what a float32 tile of dS, ``[64 keys, 64 queries]``, contributes."""
        del staging
        if self.positions.kind == "alibi":
            coord = dataclasses.replace(coord, shape=(ROWS, ROWS))
            sums = (ds * _scaled_distances(coord, self.positions, None)).sum(axis=1)
            target = ref.at[coord.batch, coord.head, pl.ds(coord.kv_start, ROWS)]
            # No other warpgroup has these keys.
            store_unoptimised(target, plgpu.load(target, layout=row_layout(), optimized=False) + sums)
            return
        tile = lax.div(coord.kv_start, jnp.int32(ROWS))
        row, rows = (tile * (ROWS // 16), ROWS // 16) if self.deterministic else (lax.rem(tile, jnp.int32(2)), 1)
        first = coord.kv_start - coord.q_start - (ROWS - 1) + self.padded_lengths[0] - 1
        target = ref.at[coord.batch, coord.head, pl.ds(row, rows), pl.ds(first, DIAGONALS)]
        add_along_diagonals(ds, target, self.shape[-1])

    def result(self, array: jax.Array) -> jax.Array:
        """Reduces the array to the gradient, in the shape and dtype of the values."""
        if self.positions.kind == "alibi":
            return -array.sum(axis=(0, 2))[:, None].astype(self.values_dtype)
        sums = array.sum(axis=(0, 2))
        if self.values_shape[0] == 1:
            sums = sums.sum(axis=0, keepdims=True)
        begin = self.padded_lengths[0] - self.scores[2]
        return sums[:, begin : begin + self.values_shape[1]].astype(self.values_dtype)


def position_gradient_of(
    bias: PositionBias | None, positions: Any, scores: tuple[int, int, int, int], deterministic: bool
) -> PositionGradient | None:
    """The layout of the gradient of a bias's values; None without a bias."""
    if bias is None:
        return None
    heads, differences = bias.values.shape
    return PositionGradient(positions, (heads, differences), bias.values.dtype, scores, deterministic)
