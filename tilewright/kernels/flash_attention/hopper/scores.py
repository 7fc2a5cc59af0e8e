"""Bias, soft cap, mask and dropout of a tile of scores, between QKᵀ and PV of a Hopper kernel.

A tile is ``[queries, keys]`` (S) in the forward pass and for dQ, ``[keys, queries]`` (Sᵀ) for dK and dV: ``q_axis`` is
the axis of the queries. Everything is computed from positions, or loaded from global memory straight into registers in
the layout of the wgmma accumulator, and only where the options ask for it.

The dropout's generator needs positions alone, so a kernel draws a tile's bits while the MMA for S is in flight, and
keeps them in a register for each 64 columns of the tile; they are tested where P or dP is at hand. A call of the
generator serves four elements that one thread holds, of S and of Sᵀ (`tilewright.kernels.dropout`). An array in Pallas
has no such thing as a thread, so bits are drawn and tested in Mosaic GPU's own terms.
"""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float  # noqa: F401

from tilewright.kernels.dropout import keep_threshold
from tilewright.kernels.flash_attention.inputs import AttentionInputs, dropout_keys
from tilewright.kernels.flash_attention.masking import FAR, Band, split_mask
from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.mosaic_dropout import COLUMNS_PER_WORD, draw, select
from tilewright.kernels.hopper.softmax import LOG2E
from tilewright.kernels.hopper.tiles import ROWS, spread, tile_layout
from tilewright.kernels.hopper.types import Condition, Ref, Scalar
from tilewright.kernels.masks import (
    AndMask,
    BandMask,
    ExplicitMask,
    LengthMask,
    Mask,
    OrMask,
    SegmentMask,
)

WARPGROUP_THREADS = 128

LANE_COLUMNS = 6
"""Bits of a column's index that depend on the thread.

In the accumulator's layout a thread of a quad holds columns 2t and 2t + 1 of every 8, t its index in the quad.
"""


@dataclasses.dataclass(frozen=True)
class ScoreArrays:
    """The arrays that logits need besides query and key; a pytree, so that it can hold references in a kernel.

    Attributes:
      mask: the part of the mask that is no static band, with int32 vectors and int8 matrices.
      bias: ``[batch|1, heads|1, q_length|1, kv_length|1]``.
      dropout_keys: ``[batch, heads, 2]`` uint32, of the generator.

    Vectors and matrices are padded to whole tiles.
    """

    mask: Mask | None
    bias: jax.Array | Ref | None
    dropout_keys: jax.Array | Ref | None


jax.tree_util.register_dataclass(ScoreArrays, data_fields=["mask", "bias", "dropout_keys"], meta_fields=[])


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

    @property
    def plain(self) -> bool:
        """True if logits are ``scale · S`` and nothing else, so that the scale folds into the exponent.

        A masked logit is −∞, which times a scale that is not positive is no longer masked. Whatever else is done to
        logits must make it False.
        """
        return not self.has_bias and self.soft_cap is None and self.scale > 0

    @property
    def multiplier(self) -> float:
        """Factor of a logit in the exponent of 2: log2(e), times the scale where that has not been applied yet."""
        return self.scale * LOG2E if self.plain else LOG2E


def prepare_scores(inputs: AttentionInputs, q_padded: int, kv_padded: int) -> tuple[ScoreOptions, ScoreArrays]:
    """Splits a call's options into the static side and the arrays, these padded to whole tiles."""
    q_length, kv_length = inputs.query.shape[1], inputs.key.shape[1]
    band, rest = split_mask(inputs.mask)
    options = ScoreOptions(
        q_length,
        kv_length,
        band,
        inputs.options.softmax_scale,
        inputs.options.logits_soft_cap,
        inputs.bias is not None,
        inputs.options.dropout_prob,
        kv_padded != kv_length,
    )
    if rest is not None:
        rest = jax.tree.map(
            lambda leaf: leaf.astype(jnp.int8 if leaf.dtype == bool else jnp.int32), rest.pad(q_padded, kv_padded)
        )
    bias = inputs.bias
    if bias is not None:
        sizes = zip(bias.shape[2:], (q_padded, kv_padded), strict=True)
        widths = [(0, 0), (0, 0), *((0, 0 if size == 1 else padded - size) for size, padded in sizes)]
        bias = jnp.pad(bias, widths) if any(width != (0, 0) for width in widths) else bias
    return options, ScoreArrays(rest, bias, dropout_keys(inputs))


def transposed(arrays: ScoreArrays) -> ScoreArrays:
    """The arrays for tiles ``[keys, queries]``, with matrices transposed: loads across rows cannot be vectorised."""
    return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 2, 3) if leaf.ndim == 4 else leaf, arrays)


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

    def between(self, lowest: int, highest: int) -> jax.Array:
        """Mask of ``lowest <= key - query <= highest``; a bound of ``FAR`` or more is none."""
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


def biased_and_capped(
    logits: jax.Array, options: ScoreOptions, arrays: ScoreArrays, coord: TileCoord
) -> tuple[jax.Array, jax.Array | None]:
    """Scaled logits with bias and soft cap, and tanh of the cap (None without one), which its derivative needs.

    In natural units, not masked. The callers multiply dS by the derivative, in the backward pass: see "The path of a
    score" in docs/hopper.md. What is returned lives until then, and registers suffice for one tile.

    Args:
      logits: S, not scaled.
    """
    logits = logits * options.scale
    if options.has_bias:
        assert arrays.bias is not None
        logits = logits + coord.matrix(arrays.bias).astype(jnp.float32)
    if options.soft_cap is None:
        return logits, None
    tanh = jnp.tanh(logits * (1 / options.soft_cap))
    return tanh * options.soft_cap, tanh


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
    return lax.cond(masked, with_mask, lambda logits: logits, logits)


def _in_band(rows: jax.Array, columns: jax.Array, lowest: int | None, highest: int | None) -> jax.Array:
    """Mask of ``lowest <= column - row <= highest``; None is no bound."""
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


def draw_kept(options: ScoreOptions, arrays: ScoreArrays, coord: TileCoord) -> jax.Array | None:
    """The bits of a tile for `zero_dropped` and `negate_dropped`, opaque; None without dropout."""
    if not options.dropout_prob:
        return None
    keys = arrays.dropout_keys
    assert keys is not None
    key = keys[coord.batch, coord.head, 0], keys[coord.batch, coord.head, 1]
    return bits_of_tile(key, coord, keep_threshold(options.dropout_prob))


def zero_dropped(tile: jax.Array, bits: jax.Array, coord: TileCoord, first: int = 0) -> jax.Array:
    """A tile, in float32 or in 16 bits, with 0 where P is dropped.

    Args:
      bits: of `draw_kept`.
      coord: of the tile, or of a part of its columns.
      first: the part's first column, a multiple of 64.
    """
    return select_by_bits(tile, bits, coord, first, negates=False)


def negate_dropped(tile: jax.Array, bits: jax.Array, coord: TileCoord) -> jax.Array:
    """A tile in 16 bits with the other sign where P is dropped."""
    return select_by_bits(tile, bits, coord, 0, negates=True)


def bits_of_tile(key: tuple[jax.Array, jax.Array], coord: TileCoord, threshold: int) -> jax.Array:
    """`draw_kept` on the device."""
    rows, columns = coord.shape
    assert rows == ROWS
    words = -(-columns // COLUMNS_PER_WORD)
    starts = (coord.q_start, coord.kv_start) if coord.q_axis == 0 else (coord.kv_start, coord.q_start)
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(scalar,) * 4,
        return_type=plgpu.ShapeDtypeStruct((words * WARPGROUP_THREADS,), jnp.int32, layout=_bits_layout(words)),
    )
    def drawn(_: Any, first: Any, second: Any, row_start: Any, column_start: Any) -> Any:
        return draw((first, second), (row_start, column_start), columns, coord.q_axis == 1, threshold)

    return drawn(*key, *(jnp.asarray(start, jnp.int32) for start in starts))


def select_by_bits(tile: jax.Array, bits: jax.Array, coord: TileCoord, first: int, negates: bool) -> jax.Array:
    """`zero_dropped` and `negate_dropped` on the device."""
    layout, first_word = tile_layout(), first // COLUMNS_PER_WORD

    @plgpu.inline_mgpu(
        arg_types=(layout, _bits_layout(bits.size // WARPGROUP_THREADS)),
        return_type=plgpu.ShapeDtypeStruct(tile.shape, tile.dtype, layout=layout),
    )
    def selected(_: Any, tile: Any, bits: Any) -> Any:
        return select(bits, first_word, tile, coord.q_axis == 1, negates)

    return selected(tile, bits)


def _bits_layout(words: int) -> Any:
    """So many registers of every thread."""
    return plgpu.Layout.WG_STRIDED((words * WARPGROUP_THREADS,), vec_size=1)
