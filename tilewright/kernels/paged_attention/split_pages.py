"""Pages dealt out to the devices of a mesh axis: the tables of one device, and the sum of partial results.

Logical page p of a sequence is on device p mod n, so that all devices have the same work however long a sequence gets.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tilewright.kernels.numerics.softmax import accumulation_dtype, merged_over_axes, merged_parts
from tilewright.kernels.op.sharding import AxisName, devices_along, gathered
from tilewright.kernels.paged_attention.inputs import ELSEWHERE
from tilewright.kernels.paged_attention.token_layout import bounded, packed_tokens

SECOND_COLLECTIVE_BYTES = 1 << 20
"""Bytes that a link carries in the time that a second collective takes beside its own, about 10 µs."""


@dataclasses.dataclass(frozen=True)
class SplitPages:
    """The devices of a mesh axis, over which pages are split, as one of them sees it inside ``shard_map``."""

    axis: AxisName
    devices: int
    index: jax.Array

    @classmethod
    def of(cls, axis_name: object) -> "SplitPages":
        """The split over an axis of the surrounding ``shard_map``.

        Raises:
          ValueError: there is no such axis.
        """
        axis: Any = tuple(axis_name) if isinstance(axis_name, list | tuple) else axis_name
        devices = devices_along(axis, "pages")
        return cls(axis, devices, jnp.asarray(lax.axis_index(axis), jnp.int32))

    def sparse_table(self, table: jax.Array) -> jax.Array:
        """The table with a page that does not exist in place of those of other devices."""
        column = jnp.arange(table.shape[1], dtype=jnp.int32)
        return jnp.where(column % self.devices == self.index, table, ELSEWHERE)

    def dense_table(self, table: jax.Array) -> jax.Array:
        """Only the columns of this device's pages."""
        missing = -table.shape[1] % self.devices
        padded = jnp.pad(table, ((0, 0), (0, missing)), constant_values=ELSEWHERE)
        columns = padded.reshape(table.shape[0], -1, self.devices)
        return lax.dynamic_index_in_dim(columns, self.index, axis=2, keepdims=False)

    def tokens_before(self, position: jax.Array, page_size: int) -> jax.Array:
        """The number of tokens below a position of a sequence that lie on this device: its position among those."""
        round_size = page_size * self.devices
        begun = position % round_size - page_size * self.index
        return position // round_size * page_size + jnp.clip(begun, 0, page_size)

    def merged(self, out: jax.Array, lse: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """The results over all devices' keys, by one gather of partial results, or by a maximum and a sum.

        Args:
          out, lse: this device's ``[..., heads, value_dim]`` and ``[..., heads]``, without sinks.
          sinks: ``[heads, n]``, the same on every device; they count once.
        """
        if self.sums(out):
            return merged_over_axes(out, lse, self.axis, sinks)
        # The bits of both as one array, so that it is one collective; no operation changes them.
        bits = np.dtype(f"uint{8 * out.dtype.itemsize}")
        parts = [lax.bitcast_convert_type(x, bits) for x in (out, lse)]
        parts[1] = parts[1].reshape(*lse.shape, -1)
        found = gathered(jnp.concatenate(parts, axis=-1), self.axis)
        outs, lses = found[..., : out.shape[-1]], found[..., out.shape[-1] :]
        lses = lses if lses.shape[-1] > 1 else lses[..., 0]
        return merged_parts(lax.bitcast_convert_type(outs, out.dtype), lax.bitcast_convert_type(lses, lse.dtype), sinks)

    def sums(self, out: jax.Array) -> bool:
        """True if partial results are summed over the devices; gathered, each device receives those of all others."""
        n, wide = self.devices, accumulation_dtype(out.dtype).itemsize
        summed, received = 2 * (n - 1) / n * out.size * wide, (n - 1) * out.size * out.dtype.itemsize
        return received > summed + SECOND_COLLECTIVE_BYTES


@dataclasses.dataclass(frozen=True)
class TokenRanges:
    """The keys that each query token sees: those of a sequence from ``starts`` up to ``ends``, which is excluded."""

    sequence: jax.Array
    starts: jax.Array
    ends: jax.Array


def token_ranges(
    kv_lengths: jax.Array,
    cum_q_lens: jax.Array | None,
    tokens: int,
    q_length: int | None,
    left: int | None,
    right: int | None,
) -> TokenRanges:
    """The ranges of packed query tokens; that of a token without a sequence is empty."""
    at = packed_tokens(cum_q_lens, tokens, kv_lengths.shape[0], q_length)
    length = bounded(kv_lengths)[at.sequence]
    position = length - at.new + at.offset
    ends = length if right is None else jnp.minimum(length, position + 1 + right)
    starts = jnp.zeros_like(ends) if left is None else jnp.maximum(position - left, 0)
    return TokenRanges(at.sequence, starts, jnp.where(at.owned, jnp.maximum(ends, 0), 0))
