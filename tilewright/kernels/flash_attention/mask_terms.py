"""Decomposes masks for backends without mask objects: a band, rows of segments and positions, a matrix."""

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.kernels.flash_attention.inputs import AttentionInputs, dropout_keys
from tilewright.kernels.flash_attention.masking import Band, intersection, split_mask
from tilewright.kernels.masks import AndMask, BandMask, LengthMask, Mask, SegmentMask, TileClass, TileGrid, members

RANGE_TILE = 64
"""Number of queries, or keys, per entry of the ranges; ``kRangeQueries`` in ``cuda/attention.cuh``."""

_LIMITS = np.iinfo(np.int32)


@dataclasses.dataclass(frozen=True, slots=True)
class MaskParts:
    """A decomposed mask; its leaves may be arrays, tracers or ``ShapeDtypeStruct``.

    A key is visible iff the difference of its and the query's position is in ``band``, their segments are equal, both
    are within their lengths, and ``matrix`` is True. Without ``positions`` a position is an index.
    """

    band: Band
    segments: SegmentMask | None
    positions: BandMask | None
    lengths: tuple[LengthMask, ...]
    matrix: Mask | None

    @classmethod
    def of(cls, mask: Mask | None) -> "MaskParts":
        """Decomposes a mask: one segment, position and length term each as rows, all other terms as a matrix."""
        band, rest = split_mask(mask)
        parts = members(rest, AndMask)
        segments = [part for part in parts if isinstance(part, SegmentMask)][:1]
        lengths = [part for part in parts if isinstance(part, LengthMask)]
        positions = [part for part in parts if isinstance(part, BandMask)][:1]
        others = [part for part in parts if not any(part is used for used in (*segments, *lengths, *positions))]
        if positions:
            if band != Band():  # a band of indices, beside one of positions
                others.append(_static_band(mask))
            band = intersection(positions)
        return cls(
            band,
            segments[0] if segments else None,
            positions[0] if positions else None,
            tuple(lengths),
            functools.reduce(operator.and_, others) if others else None,
        )

    @property
    def has_rows(self) -> bool:
        """True if there are terms for single queries and keys."""
        return self.segments is not None or self.positions is not None or bool(self.lengths)

    def unsupported_terms(self) -> list[str]:
        """Reasons why a backend with only bands of indices and lengths cannot apply the mask; empty if it can."""
        reasons = []
        if self.segments is not None:
            reasons.append("has no segments, of which packed sequences are made as well")
        if self.positions is not None:
            reasons.append("takes a query's index for its position, got positions of their own")
        if self.matrix is not None:
            reasons.append("masks by causality, windows and lengths, got a mask that is none of them")
        return reasons

    def rows(self, q_length: int, kv_length: int) -> tuple[Any, Any]:
        """The rows of queries and of keys, ``[batch|1, 2, length]`` int32: segments, then positions."""
        q_segments = kv_segments = jnp.zeros((1, 1), jnp.int32)
        if self.segments is not None:
            q_segments, kv_segments = self.segments.q_segment_ids, self.segments.kv_segment_ids
        q_positions = None if self.positions is None else self.positions.q_positions
        kv_positions = None if self.positions is None else self.positions.kv_positions
        # A query outside its length gets a position after all keys and such a key one before all queries, outside of
        # any band.
        queries = _rows(q_segments, q_positions, [part.q_lengths for part in self.lengths], q_length, _LIMITS.max)
        keys = _rows(kv_segments, kv_positions, [part.kv_lengths for part in self.lengths], kv_length, _LIMITS.min)
        return queries, keys


def _static_band(mask: Mask | None) -> Mask:
    bands = [part for part in members(mask, AndMask) if isinstance(part, BandMask) and part.is_static]
    return functools.reduce(operator.and_, bands)


def _rows(segments: jax.Array, positions: jax.Array | None, lengths: list[Any], length: int, outside: int) -> Any:
    indices = jnp.arange(length, dtype=jnp.int32)[None, :]
    positions = indices if positions is None else positions.astype(jnp.int32)
    for each in lengths:
        if each is not None:
            positions = jnp.where(indices < each[:, None], positions, jnp.int32(outside))
    batch = max(segments.shape[0], positions.shape[0])
    shape = (batch, length)
    return jnp.stack([jnp.broadcast_to(part.astype(jnp.int32), shape) for part in (segments, positions)], axis=1)


def visible_ranges(mask: Mask, q_length: int, kv_length: int, *, transposed: bool = False) -> Any:
    """``[batch|1, heads|1, tiles, 2]`` int32: the first and the end of the keys that a tile of queries may see.

    Transposed: of the queries that may see a tile of keys. An empty range is ``(length, 0)``, so that a union of ranges
    is the minimum and maximum of their ends.
    """
    classes = mask.classify(TileGrid(q_length, kv_length, RANGE_TILE, RANGE_TILE))
    visible = jnp.asarray(classes) != TileClass.EMPTY
    visible, length = (visible.swapaxes(2, 3), q_length) if transposed else (visible, kv_length)
    count = visible.shape[3]
    # argmax finds the first True; it is 0 without one, too, hence ``any_visible``.
    first = jnp.argmax(visible, axis=3) * RANGE_TILE
    end = jnp.minimum((count - jnp.argmax(visible[..., ::-1], axis=3)) * RANGE_TILE, length)
    any_visible = visible.any(axis=3)
    ranges = jnp.stack([jnp.where(any_visible, first, length), jnp.where(any_visible, end, 0)], axis=-1)
    return ranges.astype(jnp.int32)


def score_arrays(inputs: AttentionInputs, backward: bool) -> dict[str, Any]:
    """The arrays that determine the logits, except the sinks; None for those that a call does not have."""
    q_length, kv_length = inputs.query.shape[1], inputs.key.shape[1]
    parts = MaskParts.of(inputs.mask)
    q_rows, kv_rows = parts.rows(q_length, kv_length) if parts.has_rows else (None, None)
    matrix = None if parts.matrix is None else parts.matrix.materialise(q_length, kv_length).astype(jnp.uint8)
    key_ranges = query_ranges = None
    # Kernels compute the ranges of a pure band themselves.
    if inputs.mask is not None and (parts.has_rows or matrix is not None):
        key_ranges = visible_ranges(inputs.mask, q_length, kv_length)
        query_ranges = visible_ranges(inputs.mask, q_length, kv_length, transposed=True) if backward else None
    return {
        "bias": inputs.bias,
        "q_rows": q_rows,
        "kv_rows": kv_rows,
        "mask": matrix,
        "key_ranges": key_ranges,
        "query_ranges": query_ranges,
        "dropout_keys": dropout_keys(inputs),
    }
