"""Bias, soft cap and mask of a tile of scores, between QKᵀ and PV of a Hopper kernel; `dropout` is in its own module.

A tile is ``[queries, keys]`` (S) in the forward pass and for dQ, ``[keys, queries]`` (Sᵀ) for dK and dV: ``q_axis`` is
the axis of the queries. Everything is computed from positions, or loaded from global memory straight into registers in
the layout of the wgmma accumulator, and only where the options ask for it.

A dense bias passes through shared memory instead (`BiasTiles`), where TMA brings it a step ahead. In the layout of the
accumulator a warp's load of two elements a thread touches 8 rows of global memory, 32 times a step in each of 8 warps:
that takes as long as the matmuls of two steps, and nothing hides its latency. From a swizzled tile the same registers
come by ``ldmatrix``, also those of the transposed tile.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float  # noqa: F401

from tilewright.kernels.flash_attention.inputs import AttentionInputs, dropout_keys
from tilewright.kernels.flash_attention.masking import FAR, Band, split_mask
from tilewright.kernels.flash_attention.position_bias import Kind, PositionBias
from tilewright.kernels.flash_attention.results import HIDING_BIAS, hides
from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.diagonals import load_toeplitz_tile
from tilewright.kernels.hopper.limits import TMA_STRIDE_BYTES
from tilewright.kernels.hopper.panels import PanelRef
from tilewright.kernels.hopper.ring import Ring, RingPlan, when
from tilewright.kernels.hopper.shared import SharedTile
from tilewright.kernels.hopper.softmax import LOG2E
from tilewright.kernels.hopper.tiles import spread, tile_layout
from tilewright.kernels.masks import (
    AndMask,
    BandMask,
    ExplicitMask,
    LengthMask,
    Mask,
    OrMask,
    SegmentMask,
)
from tilewright.kernels.pallas_types import Condition, Ref, Scalar
from tilewright.ops.types import Direction

LANE_COLUMNS = 6
"""Bits of a column's index that depend on the thread.

In the accumulator's layout a thread of a quad holds columns 2t and 2t + 1 of every 8, t its index in the quad.
"""


@dataclasses.dataclass(frozen=True)
class ScoreArrays:
    """The arrays that logits need besides query and key; a pytree, so that it can hold references in a kernel.

    Attributes:
      mask: the part of the mask that is not a static band, with int32 vectors and int8 matrices.
      bias: ``[batch|1, heads|1, q_length|1, kv_length|1]``. Of one that passes through shared memory only the rows are
        lengthened, as TMA wants it.
      dropout_keys: ``[batch, heads, 2]`` uint32, of the generator.
      position_values: float32 values of a bias of positions over the softmax scale: ``[heads, 1]`` negated slopes, or
        ``[heads | 1, padded differences]``.

    Vectors and other matrices are padded to whole tiles.
    """

    mask: Mask | None
    bias: jax.Array | Ref | None
    dropout_keys: jax.Array | Ref | None
    position_values: jax.Array | Ref | None = None


jax.tree_util.register_dataclass(
    ScoreArrays, data_fields=["mask", "bias", "dropout_keys", "position_values"], meta_fields=[]
)


@dataclasses.dataclass(frozen=True, slots=True)
class PositionOptions:
    """The static side of a bias of positions.

    Attributes:
      offset: of a query's position to its index.
      side: 1 if all visible keys are at positions up to the query's, −1 if from there on, 0 if neither is known.
      last_query: the padded queries less 1, which is the entry of relative values for the difference 0.
    """

    kind: Kind
    offset: int
    side: int
    last_query: int

    @classmethod
    def of(cls, bias: PositionBias | None, band: Band, q_padded: int) -> "PositionOptions | None":
        """The options of a call's bias; None without one."""
        if bias is None:
            return None
        side = 1 if band.highest <= bias.offset else -1 if band.lowest >= bias.offset else 0
        return cls(bias.kind, bias.offset, side, q_padded - 1)


@dataclasses.dataclass(frozen=True, slots=True)
class ScoreOptions:
    """The static side of a call's scores, alike in all of its kernels.

    Attributes:
      band: the static band of the mask.
      bound_keys: whether the last tile of keys hangs over the end of ``kv_length``, and needs a bound.
    """

    q_length: int
    kv_length: int
    band: Band
    scale: float
    soft_cap: float | None
    has_bias: bool
    dropout_prob: float
    bound_keys: bool
    positions: PositionOptions | None = None

    @property
    def may_hold_minus_infinity(self) -> bool:
        """True if logits may be −∞ without a mask: a bias may hold it, but no product of slope and distance is."""
        return self.has_bias or (self.positions is not None and self.positions.kind == "relative")

    @property
    def plain(self) -> bool:
        """True if logits are ``scale · S`` and nothing else, so that the scale folds into the exponent.

        S may start from a bias of positions (`initial_scores`).

        A masked logit is −∞, which times a scale that is not positive is no longer masked. Whatever else is done to
        logits must make it False.
        """
        return not self.has_bias and self.soft_cap is None and self.scale > 0

    @property
    def natural_maximum(self) -> bool:
        """True if the softmax subtracts the maximum of a row before it goes to base 2 (`online_softmax`).

        A bias that hides keys may be the lowest number of its dtype, which times log2(e) is −∞.
        """
        return self.has_bias

    @property
    def multiplier(self) -> float:
        """Factor of a logit in the exponent of 2: log2(e), times the scale where that has not been applied yet."""
        return self.scale * LOG2E if self.plain else LOG2E


def prepare_scores(
    inputs: AttentionInputs, q_padded: int, kv_padded: int, stages_bias: bool = False
) -> tuple[ScoreOptions, ScoreArrays]:
    """Splits a call's options into the static side and the arrays, these padded to whole tiles.

    Args:
      stages_bias: whether the bias passes through shared memory, by TMA, which needs no whole tiles.
    """
    q_length, kv_length = inputs.query.shape[1], inputs.key.shape[1]
    band, rest = split_mask(inputs.mask)
    options = ScoreOptions(
        q_length,
        kv_length,
        band,
        inputs.softmax_scale,
        inputs.logits_soft_cap,
        inputs.bias is not None,
        inputs.drawn_dropout,
        kv_padded != kv_length,
        PositionOptions.of(inputs.position_bias, band, q_padded),
    )
    if rest is not None:
        rest = jax.tree.map(
            lambda leaf: leaf.astype(jnp.int8 if leaf.dtype == bool else jnp.int32), rest.pad(q_padded, kv_padded)
        )
    bias = inputs.bias
    if bias is not None:
        if stages_bias:
            rest_of_row = -bias.shape[3] % (TMA_STRIDE_BYTES // bias.dtype.itemsize)
            q_padded, kv_padded = bias.shape[2], bias.shape[3] + rest_of_row
        sizes = zip(bias.shape[2:], (q_padded, kv_padded), strict=True)
        # Dimensions of 1 are broadcast, not padded. Others are padded to whole tiles where threads load them,
        # unclipped.
        widths = [(0, 0), (0, 0), *((0, 0 if size == 1 else padded - size) for size, padded in sizes)]
        bias = jnp.pad(bias, widths) if any(width != (0, 0) for width in widths) else bias
    values: Any = None
    if inputs.position_bias is not None:
        # Over the scale, because S starts from them and is multiplied by it afterwards.
        values = inputs.position_bias.values.astype(jnp.float32)
        if inputs.position_bias.kind == "relative":
            # Before the scale, which may move a finite value over the limit.
            values = jnp.where(hides(values), -jnp.inf, values)
        values = values * (1 / options.scale)
        if inputs.position_bias.kind == "alibi":
            values = -values
        else:
            values = jnp.pad(values, [(0, 0), (q_padded - q_length, kv_padded - kv_length)])
    return options, ScoreArrays(rest, bias, dropout_keys(inputs), values)


def transposed(arrays: ScoreArrays, stages_bias: bool = False) -> ScoreArrays:
    """The arrays for tiles ``[keys, queries]``, with matrices transposed: loads across rows cannot be vectorised.

    Args:
      stages_bias: whether the bias passes through shared memory, from which it is read transposed.
    """
    found = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 2, 3) if leaf.ndim == 4 else leaf, arrays)
    return dataclasses.replace(found, bias=arrays.bias) if stages_bias else found


@dataclasses.dataclass(frozen=True, slots=True)
class TileCoord:
    """Coordinates of a tile of scores: its head, its first query and key; ``shape`` has queries along ``q_axis``."""

    batch: Scalar
    head: Scalar
    q_start: Scalar
    kv_start: Scalar
    shape: tuple[int, int]
    q_axis: int

    def rows(self) -> jax.Array:
        """Query positions, in the tile's shape."""
        return self._positions(self.q_axis, self.q_start)

    def columns(self) -> jax.Array:
        """Key positions, in the tile's shape."""
        return self._positions(1 - self.q_axis, self.kv_start)

    def _positions(self, axis: int, start: Scalar) -> jax.Array:
        # A one-dimensional iota, then broadcast: of a two-dimensional one the compiler does not see that a thread has
        # the same two rows in all of its elements.
        iota = plgpu.broadcasted_iota(jnp.int32, (self.shape[axis],), 0, layout=tile_layout().reduce(1 - axis))
        return spread(iota + start, self.shape, axis)

    def along(self, axis: int) -> jax.Array:
        """Indices along an axis of the tile, in its shape."""
        return self._positions(axis, 0)

    def between(self, lowest: int, highest: int) -> jax.Array:
        """Mask of ``lowest <= key - query <= highest``; a bound of ``FAR`` or more does not mask."""
        # A thread's columns are its own offset plus constants. Nothing but the constants may stand on the one side of
        # the comparison: the compiler would keep a register for each column through the loop.
        along = self._positions(1, 0)
        offset, constants = along & LANE_COLUMNS, along & ~LANE_COLUMNS
        if self.q_axis == 0:
            start, low, high = self.rows() - (self.kv_start + offset), lowest, highest
        else:
            start, low, high = self.columns() - (self.q_start + offset), -highest, -lowest
        return _in_band(start, constants, low, high)

    def below(self, kv_length: int) -> jax.Array:
        """Mask of the keys before ``kv_length``."""
        if self.q_axis == 1:
            return self.columns() < kv_length
        along = self._positions(1, 0)
        return (along & ~LANE_COLUMNS) < kv_length - (self.kv_start + (along & LANE_COLUMNS))

    def vector(self, ref: Ref | jax.Array, of_queries: bool) -> jax.Array:
        """Elements of ``[batch|1, length]`` at the tile's queries or keys, broadcast to the tile's shape."""
        axis = self.q_axis if of_queries else 1 - self.q_axis
        start = self.q_start if of_queries else self.kv_start
        batch = self.batch if ref.shape[0] > 1 else 0
        # Unoptimised: each thread loads its own few elements, and several threads the same ones.
        values = plgpu.load(
            ref.at[batch, pl.ds(start, self.shape[axis])], layout=tile_layout().reduce(1 - axis), optimized=False
        )
        return spread(values, self.shape, axis)

    def matrix(self, ref: Ref | jax.Array) -> jax.Array:
        """The tile of ``[batch|1, heads|1, ...]``, whose last two dimensions are along the tile's axes or 1.

        Where only one is 1 it is broadcast; where both are, the result is a scalar.
        """
        batch = self.batch if ref.shape[0] > 1 else 0
        head = self.head if ref.shape[1] > 1 else 0
        starts = (self.q_start, self.kv_start) if self.q_axis == 0 else (self.kv_start, self.q_start)
        slices = [pl.ds(start, size) for start, size in zip(starts, self.shape, strict=True)]
        full = [axis for axis in range(2) if ref.shape[2 + axis] > 1]
        if len(full) == 2:
            return plgpu.load(ref.at[batch, head, slices[0], slices[1]], layout=tile_layout(), optimized=False)
        if not full:
            return ref[batch, head, 0, 0]
        axis = full[0]
        part = ref.at[batch, head, slices[0], 0] if axis == 0 else ref.at[batch, head, 0, slices[1]]
        values = plgpu.load(part, layout=tile_layout().reduce(1 - axis), optimized=False)
        return spread(values, self.shape, axis)


STAGED_ITEMSIZES: dict[Direction, tuple[int, ...]] = {"forward": (2, 4), "backward": (2,)}
"""Bytes of an element of a bias that may pass through shared memory."""


def staged_dtype(bias: jax.Array | jax.ShapeDtypeStruct | None, direction: Direction) -> jnp.dtype | None:
    """The dtype of a bias that may pass through shared memory; None for others, and for none.

    These are matrices, for a vector is a few loads in each step. The backward pass reads tiles transposed, which
    ``ldmatrix`` does only with 16-bit elements.
    """
    if bias is None or 1 in bias.shape[2:] or jnp.dtype(bias.dtype).itemsize not in STAGED_ITEMSIZES[direction]:
        return None
    return jnp.dtype(bias.dtype)


def bias_ring(rows: int, columns: int, dtype: DTypeLike, stages: int, consumers: int) -> RingPlan:
    """The ring of tiles ``[queries, keys]``, with ``stages`` for each consumer."""
    # Panels, whatever the lengths: TMA clips them at the ends of the bias.
    return RingPlan(SharedTile((rows, columns), dtype, panelled=True), stages * consumers, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class BiasTiles:
    """The tiles of a bias in shared memory.

    Each consumer warpgroup has stages of its own, with its 64 queries or keys, so that it waits for no other's. The
    load for consumer c of step i is load ``i · consumers + c`` of the ring.

    Attributes:
      ring: of ``bias_ring``.
      consumers: that have stages in it.
    """

    ring: Ring
    consumers: int

    def load(self, step: Scalar, consumer: int, bias: jax.Array | Ref | None, coord: TileCoord) -> None:
        """Producer: starts the load of a consumer's tile of a step; the shape of ``coord`` has queries first."""
        assert bias is not None
        batch = coord.batch if bias.shape[0] > 1 else 0
        head = coord.head if bias.shape[1] > 1 else 0
        rows, columns = pl.ds(coord.q_start, coord.shape[0]), pl.ds(coord.kv_start, coord.shape[1])
        source: Any = bias.at[batch, head, rows, columns]
        self.ring.load_from_dram(step * self.consumers + consumer, source)

    def read(self, step: Scalar, consumer: Scalar, *, transposed: bool = False, present: Condition = True) -> jax.Array:
        """Consumer: waits for its tile of a step, and moves it into registers, in the layout of the accumulator.

        Args:
          transposed: whether the tile of scores is ``[keys, queries]``.
          present: whether the step exists; if not, what an earlier one left is read.
        """
        # One ring for all consumers: slots and parities of each follow from loads that alternate between them.
        index = step * self.consumers + consumer
        when(present, lambda: self.ring.load_from_shared(index))
        tile: Any = self.ring.get_mma_tile(index)
        assert isinstance(tile, PanelRef)
        views = [panel.T if transposed else panel for panel in tile.operands]
        # Panel by panel, as each has its own swizzle; registers of neighbouring columns join without a move.
        parts = [plgpu.load(view, layout=tile_layout(), optimized=False) for view in views]
        # An async-proxy fence: threads have read the stage, and TMA writes it next.
        plgpu.commit_smem()
        when(present, lambda: self.ring.release(index))
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def position_bias_reasons(bias: PositionBias | None, scale: float) -> list[str]:
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
    """Starts S of a tile from a bias of positions over the softmax scale, float32; None without such a bias.

    So all that follows S, such as the exponent that has the scale in it, is as without one. A thread loads those of
    relative values that its elements have, a half of a tile at most.

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
        return scaled_distances(coord, positions, values[coord.head, 0])
    q_size, kv_size = coord.shape[coord.q_axis], coord.shape[1 - coord.q_axis]
    # Of the tile's first key and last query.
    first = coord.kv_start - coord.q_start - (q_size - 1) + positions.last_query
    row = coord.head if values.shape[0] > 1 else 0
    diagonals: Any = values.at[row, pl.ds(first, q_size + kv_size - 1)]
    return load_toeplitz_tile(diagonals, coord.shape[1], ascending=coord.q_axis == 0)


def scaled_distances(coord: TileCoord, positions: PositionOptions, factor: jax.Array | None) -> jax.Array:
    """``factor`` · |i − j| of a tile, or the distances themselves: exact below 2²⁴.

    Where the mask leaves each query only keys on one side of it, they are differences, without an absolute value.
    """
    # As in `TileCoord.between` a thread's columns are an offset of its own plus constants. Only these differ between
    # its elements, and they become operands of instructions.
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


def biased_and_capped(
    logits: jax.Array, options: ScoreOptions, arrays: ScoreArrays, coord: TileCoord, bias: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Scaled logits with bias and soft cap, and tanh of the cap (None without one), which its derivative needs.

    In natural units, not masked. The callers multiply dS by the derivative, in the backward pass: see "The path of a
    score" in docs/hopper-scores.md. What is returned lives until then, and registers suffice for one tile.

    Args:
      logits: S, not scaled.
      bias: the tile of the bias where it passes through shared memory (`BiasTiles`); else it is loaded here.
    """
    logits = logits * options.scale
    if options.has_bias:
        assert arrays.bias is not None
        bias = (coord.matrix(arrays.bias) if bias is None else bias).astype(jnp.float32)
        logits = logits + bias
    if options.soft_cap is None:
        # A bias that masks leaves a sum that is as low: no probability beside any other key (`without_hidden_rows`).
        return logits, None
    # By the hardware's approximation, one instruction.
    tanh = jnp.tanh(logits * (1 / options.soft_cap))
    capped = tanh * options.soft_cap
    if options.may_hold_minus_infinity:
        # S starts from relative values, so that there is no bias but in the sum.
        hides = (logits if bias is None else bias) <= HIDING_BIAS
        # Mosaic spreads a scalar, such as one bias for all keys, in sums alone.
        capped = jnp.where(hides, -jnp.inf, capped) if hides.ndim else capped + jnp.where(hides, -jnp.inf, 0.0)
    return capped, tanh


def without_hidden_rows(options: ScoreOptions, m: jax.Array, row_sum: jax.Array) -> tuple[jax.Array, jax.Array]:
    """m and l of rows that attend to nothing where a bias masks all of their keys: at the end of a row, and not in it.

    With a soft cap m is −∞ there already.
    """
    if not options.has_bias or options.soft_cap is not None:
        return m, row_sum
    hidden = m <= HIDING_BIAS  # in natural units (``natural_maximum``)
    return jnp.where(hidden, -jnp.inf, m), jnp.where(hidden, 0.0, row_sum)


def visible(options: ScoreOptions, arrays: ScoreArrays, coord: TileCoord) -> jax.Array:
    """The whole mask of a tile, True where a key is visible: static band, end of the keys, arrays."""
    parts = []
    if options.band.lowest > -FAR or options.band.highest < FAR:
        parts.append(coord.between(options.band.lowest, options.band.highest))
    if options.bound_keys:
        parts.append(coord.below(options.kv_length))
    if arrays.mask is not None:
        parts.append(_attends(arrays.mask, coord))
    # Without a mask a tile of True: positions are never negative.
    result = parts[0] if parts else coord.columns() >= 0
    for part in parts[1:]:
        result = result & part
    return result


def masked_logits(
    logits: jax.Array, masked: Condition, options: ScoreOptions, arrays: ScoreArrays, coord: TileCoord
) -> jax.Array:
    """Logits with −∞ where they are masked; ``masked``, static or a scalar on the device, says if the tile needs it."""

    def with_mask(logits: jax.Array) -> jax.Array:
        return jnp.where(visible(options, arrays, coord), logits, -jnp.inf)

    if isinstance(masked, bool):
        return with_mask(logits) if masked else logits
    # A branch of the whole warpgroup: full tiles skip all arithmetic of the mask.
    return lax.cond(masked, with_mask, lambda logits: logits, logits)


def _in_band(rows: jax.Array, columns: jax.Array, lowest: int | None, highest: int | None) -> jax.Array:
    """Mask of ``lowest <= column - row <= highest``; None means no bound."""
    # Bounds are added to the rows, which take two registers in a loop over keys; of the difference of columns and rows
    # the compiler would keep every element.
    parts = []
    if lowest is not None and lowest > -FAR:
        # Bounds within ±FAR, so that the sum with a position stays in int32.
        parts.append(columns >= rows + jnp.int32(min(lowest, FAR)))
    if highest is not None and highest < FAR:
        parts.append(columns <= rows + jnp.int32(max(highest, -FAR)))
    if not parts:
        return columns >= jnp.int32(-FAR)
    return parts[0] if len(parts) == 1 else parts[0] & parts[1]


def _attends(mask: Mask, coord: TileCoord) -> jax.Array:
    """``Mask.tile`` of the mask's array part, on references and in registers."""
    if isinstance(mask, AndMask | OrMask):
        result = _attends(mask.masks[0], coord)
        for each in mask.masks[1:]:
            other = _attends(each, coord)
            result = result & other if isinstance(mask, AndMask) else result | other
        return result
    if isinstance(mask, BandMask):
        q = coord.rows() if mask.q_positions is None else coord.vector(mask.q_positions, True)
        kv = coord.columns() if mask.kv_positions is None else coord.vector(mask.kv_positions, False)
        return _in_band(q, kv, *mask.difference_bounds)
    if isinstance(mask, SegmentMask):
        return coord.vector(mask.q_segment_ids, True) == coord.vector(mask.kv_segment_ids, False)
    if isinstance(mask, LengthMask):
        inside: jax.Array | None = None
        for lengths, positions in ((mask.q_lengths, coord.rows), (mask.kv_lengths, coord.columns)):
            if lengths is not None:
                part = positions() < lengths[coord.batch if lengths.shape[0] > 1 else 0]
                inside = part if inside is None else inside & part
        return coord.columns() >= 0 if inside is None else inside
    if isinstance(mask, ExplicitMask):
        values = coord.matrix(mask.array).astype(jnp.int32)
        return lax.broadcast(values, coord.shape) != 0 if values.ndim == 0 else values != 0
    raise TypeError(f"no kernel form of a mask of type {type(mask).__name__}")
