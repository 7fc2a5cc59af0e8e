"""Folds everything that masks a key for a query into one mask, and extracts a mask's static bands."""

import dataclasses
import functools
import operator
from collections.abc import Iterable
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.kernels.flash_attention.arguments import score_array
from tilewright.kernels.masks import (
    AndMask,
    BandMask,
    CausalMask,
    ExplicitMask,
    LengthMask,
    Mask,
    SegmentMask,
    WindowMask,
    members,
)
from tilewright.kernels.op import arguments

FAR = 1 << 30
"""A bound beyond every difference of positions, meaning no bound."""

_LIMITS = np.iinfo(np.int32)

OUTSIDE_QUERIES = (int(_LIMITS.min), int(_LIMITS.max) - 1)
"""Segment ids of queries before the first of packed sequences and behind the last: no key has them."""

OUTSIDE_KEYS = (int(_LIMITS.min) + 1, int(_LIMITS.max))
"""Segment ids of keys before the first of packed sequences and behind the last: no query has them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Band:
    """The intersection of a mask's static bands: ``lowest <= key - query <= highest``, both inclusive."""

    lowest: int = -FAR
    highest: int = FAR

    @property
    def transposed(self) -> "Band":
        return Band(-self.highest, -self.lowest)


def split_mask(mask: Mask | None) -> tuple[Band, Mask | None]:
    """The intersection of a mask's static bands, and the rest of the mask, to be combined by AND."""
    parts = members(mask, AndMask)
    bands = [part for part in parts if isinstance(part, BandMask) and part.is_static]
    rest = [part for part in parts if not (isinstance(part, BandMask) and part.is_static)]
    return intersection(bands), None if not rest else rest[0] if len(rest) == 1 else AndMask(tuple(rest))


def intersection(bands: Iterable[BandMask]) -> Band:
    """The intersection of several bands, whatever positions they refer to."""
    bounds = [band.difference_bounds for band in bands]
    return Band(
        max([-FAR, *(min(low, FAR) for low, _ in bounds if low is not None)]),
        min([FAR, *(max(high, -FAR) for _, high in bounds if high is not None)]),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class ScoreShape:
    """The shape ``[batch, heads, q_length, kv_length]``; ``unbatched`` if the caller's arrays lack the batch."""

    batch: int
    heads: int
    q_length: int
    kv_length: int
    unbatched: bool

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.q_length, self.kv_length


@dataclasses.dataclass(frozen=True, slots=True)
class Positions:
    """The queries' positions among the keys: a static offset, or ``[batch, q_length]`` positions."""

    offset: int = 0
    q_positions: jax.Array | None = None


type Pair = tuple[object, object]
"""A call's arrays for queries and for keys, each an array or None."""


def call_mask(
    shape: ScoreShape,
    *,
    mask: object,
    causal: bool,
    sliding_window: object,
    bottom_right: bool,
    segment_ids: Pair,
    lengths: Pair,
    cum_seqlens: Pair,
    has_position_bias: bool = False,
) -> tuple[Mask | None, Positions]:
    """The conjunction of everything that a call masks, None if every key is visible; and the queries' positions.

    Args:
      has_position_bias: whether a bias counts positions, as a band does.
    """
    left, right = arguments.window(sliding_window, causal) if sliding_window is not None else (None, None)
    banded = causal or left is not None or right is not None
    parts: list[Mask] = []
    # Of the whole arrays; packed sequences and lengths replace it by alignments of their own.
    positions = _bottom_right(shape) if bottom_right else Positions()
    if is_given("cum_seqlens_q", "cum_seqlens_k", cum_seqlens):
        check_alone(segment_ids, lengths)
        packed, positions = _packed(shape, cum_seqlens, bottom_right)
        parts.append(packed)
    if is_given("q_segment_ids", "kv_segment_ids", segment_ids):
        parts.append(segments_mask(shape, segment_ids))
    if any(array is not None for array in lengths):
        length_mask = lengths_mask(shape, lengths)
        parts.append(length_mask)
        if (banded or has_position_bias) and bottom_right:
            positions = _aligned_ends(shape, length_mask)
    if sliding_window is not None and banded:
        parts.append(WindowMask(left, right, positions.offset, positions.q_positions))
    elif causal:
        parts.append(CausalMask(positions.offset, positions.q_positions))
    if mask is not None:
        parts.append(_explicit(shape, mask))
    return functools.reduce(operator.and_, parts) if parts else None, positions


def is_given(q_name: str, kv_name: str, pair: Pair) -> bool:
    """True if both of a pair are given; an error if only one is."""
    missing = [name for name, array in zip((q_name, kv_name), pair, strict=True) if array is None]
    if len(missing) == 1:
        raise ValueError(f"{q_name} and {kv_name} belong together, got {missing[0]}=None; repeat it for self-attention")
    return not missing


def check_alone(segment_ids: Pair, lengths: Pair) -> None:
    """Raises if packed sequences come with segment ids or lengths."""
    if any(array is not None for array in (*segment_ids, *lengths)):
        raise ValueError(
            "cum_seqlens_q and cum_seqlens_k already say where each sequence begins and ends: leave out "
            "q_segment_ids, kv_segment_ids, query_seq_lengths and key_value_seq_lengths"
        )


def _explicit(shape: ScoreShape, mask: object) -> Mask:
    if isinstance(mask, Mask):
        mask.check(*shape.sizes)
        return mask
    array = score_array("mask", mask, shape.sizes)
    if array.dtype != bool:
        raise TypeError(f"mask must be boolean, True where a query attends to a key, got {array.dtype=}; see bias")
    return ExplicitMask(array)


def segments_mask(shape: ScoreShape, segment_ids: Pair) -> SegmentMask:
    """The mask of segment ids, which are checked."""
    rows, columns = (shape.batch, shape.q_length), (shape.batch, shape.kv_length)
    return SegmentMask(
        arguments.identifiers("q_segment_ids", segment_ids[0], rows, shape.unbatched),
        arguments.identifiers("kv_segment_ids", segment_ids[1], columns, shape.unbatched),
    )


def lengths_mask(shape: ScoreShape, lengths: Pair) -> LengthMask:
    """The mask of lengths, which are checked."""
    names = ("query_seq_lengths", "key_value_seq_lengths")
    canonical = [
        None if array is None else arguments.integer_array(name, array, (shape.batch,), shape.unbatched)
        for name, array in zip(names, lengths, strict=True)
    ]
    return LengthMask(*canonical)


def _bottom_right(shape: ScoreShape) -> Positions:
    """Positions that align the last query with the last key."""
    offset = shape.kv_length - shape.q_length
    if isinstance(offset, int):
        return Positions(offset)
    # Symbolic dimensions, which no static mask can hold.
    return Positions(0, (jnp.arange(shape.q_length, dtype=jnp.int32) + jnp.asarray(offset, jnp.int32))[None])


def _aligned_ends(shape: ScoreShape, mask: LengthMask) -> Positions:
    """Positions that align each batch element's last query with its last key."""

    def compute(q_lengths, kv_lengths):
        q_ends = shape.q_length if q_lengths is None else q_lengths
        kv_ends = shape.kv_length if kv_lengths is None else kv_lengths
        return _positions_from_ends(q_ends, kv_ends, shape.q_length)

    return Positions(0, arguments.apply(compute, mask.q_lengths, mask.kv_lengths))


@functools.partial(jax.jit, static_argnames="q_length")
def _positions_from_ends(q_ends: int | jax.Array, kv_ends: int | jax.Array, q_length: int) -> jax.Array:
    return jnp.arange(q_length, dtype=jnp.int32)[None, :] + jnp.asarray(kv_ends - q_ends)[:, None]


def _packed(shape: ScoreShape, cum_seqlens: Pair, bottom_right: bool) -> tuple[SegmentMask, Positions]:
    """Segments and positions of sequences laid end to end; tokens outside of them are fully masked."""
    q_bounds, kv_bounds = packed_bounds(shape.batch, cum_seqlens)
    compute = functools.partial(
        _packed_arrays, q_length=shape.q_length, kv_length=shape.kv_length, bottom_right=bottom_right
    )
    q_ids, kv_ids, q_positions = arguments.apply(compute, q_bounds, kv_bounds)
    # In self-attention the positions are the indices: without an array, tiles can be classified while tracing.
    same = cum_seqlens[0] is cum_seqlens[1]
    return SegmentMask(q_ids, kv_ids), Positions(0, None if same else q_positions)


def packed_bounds(batch: int, cum_seqlens: Pair) -> tuple[jax.Array, jax.Array]:
    """The boundaries of packed sequences among queries and keys, which are checked."""
    if batch != 1:
        raise ValueError(f"cum_seqlens_q and cum_seqlens_k want all sequences in one row, got {batch=}")
    q_bounds, kv_bounds = (
        arguments.as_array(name, array)
        for name, array in zip(("cum_seqlens_q", "cum_seqlens_k"), cum_seqlens, strict=True)
    )
    if len(q_bounds.shape) != 1 or q_bounds.shape != kv_bounds.shape or q_bounds.shape[0] < 2:
        raise ValueError(
            "cum_seqlens_q and cum_seqlens_k must both have the shape [sequences + 1], "
            f"got cum_seqlens_q.shape={tuple(q_bounds.shape)}, cum_seqlens_k.shape={tuple(kv_bounds.shape)}"
        )
    q_bounds = arguments.integer_array("cum_seqlens_q", q_bounds, q_bounds.shape, False)
    kv_bounds = arguments.integer_array("cum_seqlens_k", kv_bounds, kv_bounds.shape, False)
    return q_bounds, kv_bounds


@functools.partial(jax.jit, static_argnames=("q_length", "kv_length", "bottom_right"))
def _packed_arrays(
    q_bounds: jax.Array, kv_bounds: jax.Array, q_length: int, kv_length: int, bottom_right: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    rows, columns = jnp.arange(q_length, dtype=jnp.int32), jnp.arange(kv_length, dtype=jnp.int32)
    return packed_rows(q_bounds, kv_bounds, rows, columns, bottom_right)


def packed_rows(
    q_bounds: jax.Array, kv_bounds: jax.Array, rows: jax.Array, columns: jax.Array, bottom_right: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Segment ids of some rows and columns of packed sequences, and the rows' positions among all the keys.

    Ids number the sequences. Outside of them queries get `OUTSIDE_QUERIES` and keys `OUTSIDE_KEYS`, so that ids stay
    sorted and do not match.
    """
    count = q_bounds.shape[0] - 1
    # Unrolled, so that XLA makes one kernel of the search; the default is a loop of small ones.
    q_ids = jnp.searchsorted(q_bounds, rows, side="right", method="scan_unrolled").astype(jnp.int32) - 1
    kv_ids = jnp.searchsorted(kv_bounds, columns, side="right", method="scan_unrolled").astype(jnp.int32) - 1
    edge = 1 if bottom_right else 0
    shifts = kv_bounds[edge : count + edge] - q_bounds[edge : count + edge]
    # Tokens of no sequence get any position: their ids match nothing.
    q_positions = rows + shifts[jnp.clip(q_ids, 0, count - 1)]
    q_ids, kv_ids = (
        jnp.where(ids < 0, low, jnp.where(ids == count, high, ids))
        for ids, (low, high) in ((q_ids, OUTSIDE_QUERIES), (kv_ids, OUTSIDE_KEYS))
    )
    return q_ids[None], kv_ids[None], q_positions[None]


def inside_rows(mask: Mask | None, q_length: int, kv_length: int) -> tuple[Any, Any]:
    """The queries and the keys that lie within the lengths and within packed sequences, bool ``[batch | 1, length]``.

    What lies outside attends to nothing, and nothing attends to it, so its values may be anything, NaN included. None
    for a side on which nothing can lie outside. Segments and masks that a caller gives say nothing about it.
    """
    sides: tuple[list[Any], list[Any]] = ([], [])
    for part in members(mask, AndMask):
        if isinstance(part, LengthMask):
            given = (part.q_lengths, part.kv_lengths)
            for side, lengths, length in zip(sides, given, (q_length, kv_length), strict=True):
                if lengths is not None:
                    side.append(jnp.arange(length, dtype=jnp.int32)[None, :] < lengths[:, None])
        elif _may_be_packed(part):
            ids = part.q_segment_ids, part.kv_segment_ids
            for side, own, other, outside in zip(
                sides, ids, reversed(ids), (OUTSIDE_QUERIES, OUTSIDE_KEYS), strict=True
            ):
                # A caller's own ids may be these numbers, but then both sides have them.
                side.append(~functools.reduce(operator.or_, ((own == id_) & ~jnp.any(other == id_) for id_ in outside)))
    q_inside, kv_inside = (functools.reduce(operator.and_, side) if side else None for side in sides)
    return q_inside, kv_inside


def inside_ranges(mask: Mask | None, q_length: int, kv_length: int) -> Any:
    """First and end of the queries inside, and of the keys inside (`inside_rows`): int32 ``[batch | 1, 4]``, or None.

    A range without an element is ``(0, 0)``; a side on which nothing can lie outside has its whole length.
    """
    if not may_lie_outside(mask):
        return None
    found = []
    for inside, length in zip(inside_rows(mask, q_length, kv_length), (q_length, kv_length), strict=True):
        if inside is None:
            found.append(jnp.asarray([[0, length]], jnp.int32))
            continue
        first, behind = jnp.argmax(inside, axis=1), length - jnp.argmax(inside[:, ::-1], axis=1)
        ends = jnp.stack([first, behind], axis=1).astype(jnp.int32)
        found.append(jnp.where(inside.any(axis=1, keepdims=True), ends, 0))
    batch = max(part.shape[0] for part in found)
    return jnp.concatenate([jnp.broadcast_to(part, (batch, 2)) for part in found], axis=1)


def may_lie_outside(mask: Mask | None) -> bool:
    """True if there are lengths or packed sequences, outside of which queries or keys may lie."""
    return any(
        _may_be_packed(part) or (isinstance(part, LengthMask) and bool(jax.tree.leaves(part)))
        for part in members(mask, AndMask)
    )


def _may_be_packed(part: Mask) -> TypeGuard[SegmentMask]:
    """True of the segments of packed sequences, which are one row of a call; and of a caller's for such a row."""
    return isinstance(part, SegmentMask) and part.q_segment_ids.shape[0] == part.kv_segment_ids.shape[0] == 1
