"""What there is to do for attention over pages of latents on Hopper: shared memory, and the tiles of each program."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.ring import RingPlan, ring_scratch
from tilewright.kernels.hopper.shared import SharedTile
from tilewright.kernels.hopper.tiles import ROWS
from tilewright.kernels.hopper.types import Ref, Scalar
from tilewright.kernels.paged_attention.inputs import FAR

KEYS = 64
"""Latents of a tile, and what a page has a whole number of."""

LATENT_DIM = 576

VALUE_DIM = 512

HALF = VALUE_DIM // 2
"""Columns of the output that a warpgroup adds up: 128 registers of each thread."""

SIZES = HALF, HALF, LATENT_DIM - VALUE_DIM
"""Columns of the parts in which a tile is loaded: both halves of the value, and the rest, as many as there are keys."""

STAGES = 2
"""Tiles in shared memory at once, beside the queries: a third does not fit."""


@dataclasses.dataclass(frozen=True, slots=True)
class LatentPlan:
    """The shared memory of the kernel: tiles of queries and latents in the halves of the value and the rest."""

    dtype: DTypeLike

    @property
    def queries(self) -> tuple[RingPlan, ...]:
        """The output takes the place of the first two."""
        return tuple(RingPlan(SharedTile((ROWS, size), self.dtype), 1, 1) for size in SIZES)

    @property
    def left(self) -> RingPlan:
        return self._part(HALF, 1)

    @property
    def right(self) -> RingPlan:
        return self._part(HALF, 2)

    @property
    def rest(self) -> RingPlan:
        """What only logits need of a latent, and then the probabilities of the tile, for both warpgroups."""
        return self._part(LATENT_DIM - VALUE_DIM, 2)

    def _part(self, columns: int, consumers: int) -> RingPlan:
        return RingPlan(SharedTile((KEYS, columns), self.dtype), STAGES, consumers)

    @property
    def rings(self) -> tuple[RingPlan, ...]:
        return *self.queries, self.left, self.right, self.rest

    def scratch(self) -> list[Any]:
        """Of the rings, of what scales sums so far by turns, and of the barrier behind the last of these."""
        return [
            *ring_scratch(self.rings),
            plgpu.SMEM((STAGES + 1, ROWS), jnp.float32),
            plgpu.Barrier(num_barriers=STAGES),
            plgpu.Barrier(),
        ]

    @property
    def shared_bytes(self) -> int:
        return sum(ring.shared_bytes for ring in self.rings) + 1024


@dataclasses.dataclass(frozen=True, slots=True)
class LatentCall:
    """The static half of a call.

    Attributes:
      q_length: query tokens of each sequence; a sequence's rows are its tokens' heads, token by token.
      right: keys visible after a query's position, None for all.
      splits: programs among which the tiles of some rows are shared out.
      prefetched: how many tiles ahead of its load a latent is brought to the L2 cache, 0 for not at all.
      parts: whether results come in float32, for each split, to be combined.
    """

    sequences: int
    q_length: int
    heads: int
    num_pages: int
    page_size: int
    columns: int
    softmax_scale: float
    right: int | None
    splits: int
    prefetched: int
    parts: bool

    @property
    def rows(self) -> int:
        return self.q_length * self.heads

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // ROWS)

    @property
    def capacity(self) -> int:
        return self.page_size * self.columns


@dataclasses.dataclass(frozen=True)
class LatentWork:
    """What one program has to do, as scalars on the device: ``total`` tiles from ``first`` on, at least one."""

    sequence: Scalar
    row_tile: Scalar
    split: Scalar
    position: Scalar  # of the sequence's first new token
    highest: Scalar  # one past the last key that some row sees, 0 where there is nothing to do
    lowest: Scalar  # keys before it are seen by every row
    first: Scalar
    total: Scalar


def work_of_program(call: LatentCall, program: Scalar, lengths_ref: Ref) -> LatentWork:
    row_tile = lax.rem(program, jnp.int32(call.row_tiles))
    rest = lax.div(program, jnp.int32(call.row_tiles))
    split, sequence = lax.rem(rest, jnp.int32(call.splits)), lax.div(rest, jnp.int32(call.splits))
    length = lax.max(lax.min(lengths_ref[sequence], jnp.int32(FAR)), jnp.int32(0))
    position = length - call.q_length
    length = lax.min(length, jnp.int32(min(call.capacity, FAR)))
    highest = lowest = length
    if call.right is not None:
        # Of the first row and the last one.
        token = lax.div(row_tile * ROWS, jnp.int32(call.heads))
        last = lax.min(lax.div(row_tile * ROWS + (ROWS - 1), jnp.int32(call.heads)), jnp.int32(call.q_length - 1))
        highest = lax.max(lax.min(length, position + last + (call.right + 1)), jnp.int32(0))
        lowest = lax.max(lax.min(length, position + token + (call.right + 1)), jnp.int32(0))
    tiles = lax.div(highest + (KEYS - 1), jnp.int32(KEYS))
    each = lax.div(tiles + (call.splits - 1), jnp.int32(call.splits))
    first = split * each
    total = lax.min(tiles - first, each)
    # A program without tiles looks at one of which it sees nothing.
    highest = jnp.where(total > 0, highest, 0)
    first = jnp.where(total > 0, first, 0)
    return LatentWork(sequence, row_tile, split, position, highest, lowest, first, lax.max(total, jnp.int32(1)))
