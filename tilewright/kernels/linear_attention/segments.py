"""Sequences that are split into segments of chunks, which run at once: the states at their borders, for GPUs."""

import dataclasses

import jax
import jax.numpy as jnp

from tilewright.kernels.linear_attention.chunks import SegmentTable
from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs
from tilewright.kernels.triton import launch
from tilewright.kernels.triton.limits import MIN_DOT, power_of_two

BLOCK_V = 32
"""Channels of values of a program of ``segment_states``."""


@dataclasses.dataclass(frozen=True)
class Segments:
    """The effect of the segments of a call on a state: M S + what they make of 0.

    Attributes:
      size: chunks of a segment at most.
      maps: see ``segment_states``.
      gamma: see ``forward_kernels``.
    """

    inputs: LinearAttentionInputs
    table: SegmentTable
    size: int
    maps: jax.Array
    gamma: jax.Array

    def states(self, external: jax.Array, initial: jax.Array | None, *, reverse: bool = False) -> jax.Array:
        """The states before all segments, or with ``reverse`` the gradients of those behind them.

        Args:
          external: what the segments make of 0, ``[segments, HV, K, V or more]``.
          initial: the states before the sequences, or the gradients of those behind them; 0 if None.
        """
        from tilewright.kernels.linear_attention import segment_kernels as kernels

        inputs = self.inputs
        _, value_heads, key_dim, value_dim = inputs.state_shape
        block_v = min(power_of_two(value_dim, MIN_DOT), BLOCK_V)
        (found,) = launch(
            kernels.segment_states,
            [
                external, self.maps, self.gamma, jnp.zeros((0,), jnp.float32) if initial is None else initial,
                self.table.segments, self.table.sequences,
            ],
            [jax.ShapeDtypeStruct((self.table.num_segments, value_heads, key_dim, value_dim), jnp.float32)],
            grid=[inputs.sequences * value_heads * -(-value_dim // block_v)],
            constants={
                "HV": value_heads,
                "K": key_dim,
                "V": value_dim,
                "BLOCK_K": power_of_two(key_dim, MIN_DOT),
                "BLOCK_V": block_v,
                "STRIDE": external.shape[-1],
                "MOST": power_of_two(self.size),
                "GATE": inputs.log_decay is not None,
                "DELTA": inputs.beta is not None,
                "INITIAL": initial is not None,
                "REVERSE": reverse,
            },
            num_warps=8,
            num_stages=1,
        )  # fmt: skip
        return found

    def outermost(self, of_segments: jax.Array, otherwise: jax.Array | None, *, first: bool = False) -> jax.Array:
        """The part of the last or the first segment of each sequence; ``otherwise``, or 0, if it has no segment."""
        begin, count = self.table.sequences[:, 0], self.table.sequences[:, 1]
        place = jnp.clip(begin if first else begin + count - 1, 0, self.table.num_segments - 1)
        found = of_segments[place]
        empty = jnp.zeros_like(found) if otherwise is None else otherwise
        return jnp.where((count > 0)[:, None, None, None], found, empty)


def composed(maps: jax.Array, value_dim: int) -> jax.Array:
    """The map that all segments of one sequence are, one after another, ``[1, HV, K, V + K]`` as each of them is."""
    unit = jnp.eye(maps.shape[2], maps.shape[3], k=value_dim, dtype=maps.dtype)
    while maps.shape[0] > 1:
        if maps.shape[0] % 2:
            maps = jnp.concatenate([maps, jnp.broadcast_to(unit, (1, *maps.shape[1:]))])
        first, second = maps[::2], maps[1::2]
        # Operands are not rounded, since errors go along all segments.
        both = jnp.matmul(second[..., value_dim:], first, precision=jax.lax.Precision.HIGHEST)
        maps = both.at[..., :value_dim].add(second[..., :value_dim])
    return maps
