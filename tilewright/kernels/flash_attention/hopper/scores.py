"""What happens to a tile of logits in a Hopper kernel between the two matrix products: bias, soft cap, mask, dropout.

A tile is ``[queries, keys]`` in the forward pass and ``[keys, queries]`` where dK and dV are computed; ``q_axis`` says
which. Everything is computed from positions or read from global memory straight into the registers of the accumulator's
layout, and only where the options ask for it.
"""

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float  # noqa: F401

from tilewright.kernels.dropout import keep_threshold, threefry2x32
from tilewright.kernels.flash_attention.inputs import AttentionInputs, dropout_keys
from tilewright.kernels.flash_attention.masking import FAR, Band, split_mask
from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.softmax import LOG2E
from tilewright.kernels.hopper.tiles import spread, tile_layout
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

LANE_COLUMNS = 6
"""The bits of a column's number that tell a thread's columns of a tile from its neighbours'."""


@dataclasses.dataclass(frozen=True)
class ScoreArrays:
    """The arrays that a tile's logits need besides query and key; a pytree, so that it can hold refs in a kernel.

    ``mask`` is the part of the mask that is no static band, with int32 vectors and int8 matrices; ``bias`` has rank 4;
    ``dropout_keys`` is ``[batch, heads, 2]`` uint32. Vectors and matrices reach to the end of the last tile.
    """

    mask: Mask | None
    bias: jax.Array | Ref | None
    dropout_keys: jax.Array | Ref | None


jax.tree_util.register_dataclass(ScoreArrays, data_fields=["mask", "bias", "dropout_keys"], meta_fields=[])


@dataclasses.dataclass(frozen=True, slots=True)
class ScoreOptions:
    """The static side of it: what is done to a tile, whatever kernel it is in."""

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
        """Whether logits are the scaled products and nothing else, so that the scale folds into the exponent."""
        return not self.has_bias and self.soft_cap is None and self.scale > 0

    @property
    def multiplier(self) -> float:
        """What a modified logit is multiplied by in the exponent of two."""
        return self.scale * LOG2E if self.plain else LOG2E


def prepare_scores(inputs: AttentionInputs, q_padded: int, kv_padded: int) -> tuple[ScoreOptions, ScoreArrays]:
    """Splits a call's options into what is static and what is read, the latter padded to whole tiles."""
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
    """The arrays for tiles ``[keys, queries]``: a load across the rows of global memory has no vectors."""
    return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 2, 3) if leaf.ndim == 4 else leaf, arrays)


@dataclasses.dataclass(frozen=True, slots=True)
class TileCoord:
    """Where a tile lies in the call; ``shape`` is the tile's, with queries along ``q_axis``."""

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
        # Of the two-dimensional iota the compiler does not see that all rows of a thread are the same two.
        iota = plgpu.broadcasted_iota(jnp.int32, (self.shape[axis],), 0, layout=tile_layout().reduce(1 - axis))
        return spread(iota + start, self.shape, axis)

    def between(self, lowest: int, highest: int) -> jax.Array:
        """Where ``lowest <= key - query <= highest``; a bound of ``FAR`` or more is none."""
        # Along a row of the tile a thread's positions are its own offset and constants. On the side of the constants
        # nothing else may stand: the compiler would keep one register for each over a loop.
        along = self._positions(1, 0)
        offset, constants = along & LANE_COLUMNS, along & ~LANE_COLUMNS
        if self.q_axis == 0:
            start, low, high = self.rows() - (self.kv_start + offset), lowest, highest
        else:
            start, low, high = self.columns() - (self.q_start + offset), -highest, -lowest
        return _in_band(start, constants, low, high)

    def below(self, kv_length: int) -> jax.Array:
        """Where the key is one of the first ``kv_length``."""
        if self.q_axis == 1:
            return self.columns() < kv_length
        along = self._positions(1, 0)
        return (along & ~LANE_COLUMNS) < kv_length - (self.kv_start + (along & LANE_COLUMNS))

    def vector(self, ref: Ref | jax.Array, of_queries: bool) -> jax.Array:
        """Elements of ``[batch|1, length]`` for the tile's rows or columns, in the tile's shape."""
        axis = self.q_axis if of_queries else 1 - self.q_axis
        start = self.q_start if of_queries else self.kv_start
        batch = self.batch if ref.shape[0] > 1 else 0
        values = plgpu.load(
            ref.at[batch, pl.ds(start, self.shape[axis])], layout=tile_layout().reduce(1 - axis), optimized=False
        )
        return spread(values, self.shape, axis)

    def matrix(self, ref: Ref | jax.Array) -> jax.Array:
        """The tile of ``[batch|1, heads|1, ...]``, whose last two dimensions are the tile's own or 1; or a scalar."""
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
    logits: jax.Array, options: ScoreOptions, arrays: ScoreArrays, place: TileCoord
) -> tuple[jax.Array, jax.Array | None]:
    """Scaled logits with bias and soft cap, and tanh of the cap (None without one), which its derivative needs."""
    logits = logits * options.scale
    if options.has_bias:
        assert arrays.bias is not None
        logits = logits + place.matrix(arrays.bias).astype(jnp.float32)
    if options.soft_cap is None:
        return logits, None
    tanh = jnp.tanh(logits * (1 / options.soft_cap))
    return tanh * options.soft_cap, tanh


def visible(options: ScoreOptions, arrays: ScoreArrays, place: TileCoord) -> jax.Array:
    """Which elements of a tile the whole mask leaves."""
    parts = []
    if options.band.lowest > -FAR or options.band.highest < FAR:
        parts.append(place.between(options.band.lowest, options.band.highest))
    if options.bound_keys:
        parts.append(place.below(options.kv_length))
    if arrays.mask is not None:
        parts.append(_attends(arrays.mask, place))
    result = parts[0] if parts else place.columns() >= 0
    for part in parts[1:]:
        result = result & part
    return result


def masked_logits(
    logits: jax.Array, masked: Condition, options: ScoreOptions, arrays: ScoreArrays, place: TileCoord
) -> jax.Array:
    """Logits with −∞ where the mask hides; ``masked``, a bool or a scalar on the device, says if the tile needs it."""

    def hidden(logits: jax.Array) -> jax.Array:
        return jnp.where(visible(options, arrays, place), logits, -jnp.inf)

    if isinstance(masked, bool):
        return hidden(logits) if masked else logits
    return lax.cond(masked, hidden, lambda logits: logits, logits)


def _in_band(rows: jax.Array, columns: jax.Array, lowest: int | None, highest: int | None) -> jax.Array:
    # Bounds are added to the rows, which a loop over keys keeps in two registers; of the difference of rows and
    # columns the compiler keeps every element.
    parts = []
    if lowest is not None and lowest > -FAR:
        parts.append(columns >= rows + jnp.int32(min(lowest, FAR)))
    if highest is not None and highest < FAR:
        parts.append(columns <= rows + jnp.int32(max(highest, -FAR)))
    if not parts:
        return columns >= jnp.int32(-FAR)
    return parts[0] if len(parts) == 1 else parts[0] & parts[1]


def _attends(mask: Mask, place: TileCoord) -> jax.Array:
    """``Mask.tile`` in the terms that a kernel has."""
    if isinstance(mask, AndMask | OrMask):
        result = _attends(mask.masks[0], place)
        for each in mask.masks[1:]:
            other = _attends(each, place)
            result = result & other if isinstance(mask, AndMask) else result | other
        return result
    if isinstance(mask, BandMask):
        q = place.rows() if mask.q_positions is None else place.vector(mask.q_positions, True)
        kv = place.columns() if mask.kv_positions is None else place.vector(mask.kv_positions, False)
        return _in_band(q, kv, *mask.difference_bounds)
    if isinstance(mask, SegmentMask):
        return place.vector(mask.q_segment_ids, True) == place.vector(mask.kv_segment_ids, False)
    if isinstance(mask, LengthMask):
        inside: jax.Array | None = None
        for lengths, positions in ((mask.q_lengths, place.rows), (mask.kv_lengths, place.columns)):
            if lengths is not None:
                part = positions() < lengths[place.batch if lengths.shape[0] > 1 else 0]
                inside = part if inside is None else inside & part
        return place.columns() >= 0 if inside is None else inside
    if isinstance(mask, ExplicitMask):
        values = place.matrix(mask.array).astype(jnp.int32)
        return lax.broadcast(values, place.shape) != 0 if values.ndim == 0 else values != 0
    raise TypeError(f"no kernel form of a mask of type {type(mask).__name__}")


def kept(options: ScoreOptions, arrays: ScoreArrays, place: TileCoord) -> jax.Array:
    """Which probabilities of a tile the dropout keeps, by the generator of ``tilewright.kernels.dropout``."""
    keys = arrays.dropout_keys
    assert keys is not None
    key = keys[place.batch, place.head, 0], keys[place.batch, place.head, 1]
    rows, columns = place.rows().astype(jnp.uint32), place.columns().astype(jnp.uint32)
    left, right = threefry2x32(key, (rows, columns >> 1))
    word = jnp.where((columns & 1) == 0, left, right)
    return word >= jnp.uint32(keep_threshold(options.dropout_prob))
