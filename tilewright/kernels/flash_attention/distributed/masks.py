"""The mask of some queries and keys of a call whose rows are split over devices."""

import functools
import operator

import jax
import jax.numpy as jnp

from tilewright.kernels.flash_attention.distributed.inputs import ContextInputs
from tilewright.kernels.flash_attention.masking import FAR, Band, packed_rows
from tilewright.kernels.masks import BandMask, CausalMask, LengthMask, Mask, SegmentMask, WindowMask


def mask_of(
    inputs: ContextInputs,
    rows: tuple[jax.Array, jax.Array | None],
    columns: tuple[jax.Array, jax.Array | None],
    band: Band | None,
) -> Mask | None:
    """The mask of some queries and keys of the whole call, None if it masks nothing.

    Args:
      rows, columns: the absolute positions ``[length]`` of the queries and of the keys, ascending; and their segment
        ids ``[batch, length]``.
      band: of key − query in indices of these rows and columns; None takes that of the call by arrays of positions.
    """
    (q_positions, q_ids), (kv_positions, kv_ids) = rows, columns
    # In the order of `call_mask`: the same terms then make the same key, and a tuned config is found.
    parts: list[Mask] = []
    aligned = q_positions[None]
    if inputs.q_bounds is not None and inputs.kv_bounds is not None:
        packed = packed_rows(inputs.q_bounds, inputs.kv_bounds, q_positions, kv_positions, inputs.bottom_right)
        parts.append(SegmentMask(packed[0], packed[1]))
        aligned = packed[2]
    if q_ids is not None and kv_ids is not None:
        parts.append(SegmentMask(q_ids, kv_ids))
    if inputs.q_lengths is not None or inputs.kv_lengths is not None:
        parts.append(LengthMask(_below(q_positions, inputs.q_lengths), _below(kv_positions, inputs.kv_lengths)))
        aligned = aligned + _end_shift(inputs) if inputs.moving_ends else aligned
    if (band is None or inputs.moving_ends) and inputs.band != Band():
        # Keys that are all there, in order, are at their indices, which costs a kernel nothing to read.
        whole = kv_positions.shape[0] == inputs.devices * inputs.rows.kv_length
        parts.append(_band_mask(inputs.band, aligned, None if whole else kv_positions[None]))
    elif band is not None and band != Band():
        parts.append(_band_mask(band, None, None))
    return functools.reduce(operator.and_, parts) if parts else None


def _end_shift(inputs: ContextInputs) -> jax.Array:
    """The shift that puts the last query of each batch element at its last key, int32 ``[batch, 1]``."""
    layout = inputs.rows
    q_ends = layout.shards * layout.q_length if inputs.q_lengths is None else inputs.q_lengths
    kv_ends = layout.shards * layout.kv_length if inputs.kv_lengths is None else inputs.kv_lengths
    return jnp.asarray(kv_ends - q_ends)[:, None]


def _band_mask(band: Band, q_positions: jax.Array | None, kv_positions: jax.Array | None) -> BandMask:
    """The mask of a band in the form that the same options of ``flash_attention`` have."""
    # A band around the diagonal has offset 0 as that of a whole call, with whose key it is then looked up.
    low, high = band.lowest, band.highest
    if low == -FAR:
        return CausalMask(high, q_positions, kv_positions)
    offset = 0 if low <= 0 and (high >= 0 or high == FAR) else low if high == FAR else high
    right = None if high == FAR else high - offset
    return WindowMask(offset - low, right, offset, q_positions, kv_positions)


def _below(positions: jax.Array, lengths: jax.Array | None) -> jax.Array | None:
    """The number of positions below each length, int32 ``[batch]``: a prefix, since positions ascend."""
    if lengths is None:
        return None
    return jnp.sum(positions[None] < lengths[:, None], axis=1, dtype=jnp.int32)
