"""A call of context-parallel attention after its checks: static facts, the arrays that mask, and a device's masks."""

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.kernels.flash_attention.distributed.layout import Layout
from tilewright.kernels.flash_attention.masking import FAR, Band, packed_rows
from tilewright.kernels.masks import BandMask, CausalMask, LengthMask, Mask, SegmentMask, WindowMask
from tilewright.kernels.op.sharding import AxisName


@dataclasses.dataclass(frozen=True)
class ContextCall:
    """The static facts of a call.

    Attributes:
      axis: the mesh axis, or several, over which the rows are split.
      band: of key − query in absolute positions; without bounds if the call has neither a causal mask nor a window.
      moving_ends: True if the band counts from the ends of each batch element or packed sequence, which only arrays of
        positions describe.
      longest: tokens of the longest packed sequence, if its boundaries are known on the host.
      options: keyword arguments of every call of the kernel, without the config.
      cfg: the config of every call of the kernel, if the caller gave one.
      return_lse: True if the caller gets the log-sum-exp, and may differentiate it.
    """

    axis: AxisName
    layout: Layout
    band: Band
    moving_ends: bool
    bottom_right: bool
    longest: int | None
    options: tuple[tuple[str, Any], ...]
    cfg: Any
    return_lse: bool

    @property
    def static_band(self) -> Band:
        """The band by which steps are planned: without bounds if positions are arrays."""
        if self.moving_ends:
            return Band()
        if self.longest is None:
            return self.band
        return Band(max(self.band.lowest, 1 - self.longest), min(self.band.highest, self.longest - 1))


@dataclasses.dataclass(frozen=True)
class MaskArrays:
    """The arrays that mask; each None if the call has none of them.

    Attributes:
      q_ids, kv_ids: int32 ``[batch, rows]`` of this device.
      q_lengths, kv_lengths: int32 ``[batch]``, of the whole sequences.
      q_bounds, kv_bounds: int32 ``[sequences + 1]``, of the whole packed sequences.
    """

    q_ids: jax.Array | None = None
    kv_ids: jax.Array | None = None
    q_lengths: jax.Array | None = None
    kv_lengths: jax.Array | None = None
    q_bounds: jax.Array | None = None
    kv_bounds: jax.Array | None = None


jax.tree_util.register_dataclass(
    MaskArrays, data_fields=[field.name for field in dataclasses.fields(MaskArrays)], meta_fields=[]
)


def order_matters(call: ContextCall, arrays: MaskArrays) -> bool:
    """True if a mask reads positions, so that rows must be in order or their positions be given."""
    positional = (arrays.q_lengths, arrays.kv_lengths, arrays.q_bounds)
    return call.band != Band() or any(array is not None for array in positional)


def mask_of(
    call: ContextCall,
    arrays: MaskArrays,
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
    if arrays.q_bounds is not None and arrays.kv_bounds is not None:
        packed = packed_rows(arrays.q_bounds, arrays.kv_bounds, q_positions, kv_positions, call.bottom_right)
        parts.append(SegmentMask(packed[0], packed[1]))
        aligned = packed[2]
    if q_ids is not None and kv_ids is not None:
        parts.append(SegmentMask(q_ids, kv_ids))
    if arrays.q_lengths is not None or arrays.kv_lengths is not None:
        parts.append(LengthMask(_below(q_positions, arrays.q_lengths), _below(kv_positions, arrays.kv_lengths)))
        aligned = aligned + _end_shift(call, arrays) if call.moving_ends else aligned
    if (band is None or call.moving_ends) and call.band != Band():
        # Keys that are all there, in order, are at their indices, which costs a kernel nothing to read.
        whole = kv_positions.shape[0] == call.layout.shards * call.layout.kv_length
        parts.append(_band_mask(call.band, aligned, None if whole else kv_positions[None]))
    elif band is not None and band != Band():
        parts.append(_band_mask(band, None, None))
    return functools.reduce(operator.and_, parts) if parts else None


def _end_shift(call: ContextCall, arrays: MaskArrays) -> jax.Array:
    """The shift that puts the last query of each batch element at its last key, int32 ``[batch, 1]``."""
    layout = call.layout
    q_ends = layout.shards * layout.q_length if arrays.q_lengths is None else arrays.q_lengths
    kv_ends = layout.shards * layout.kv_length if arrays.kv_lengths is None else arrays.kv_lengths
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
