"""Shared memory of `latent`, and the part of the work that each CTA has."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.ring import RingPlan
from tilewright.kernels.hopper.shared import SharedTile
from tilewright.kernels.hopper.tiles import ROWS
from tilewright.kernels.hopper.types import Ref, Scalar
from tilewright.kernels.paged_attention.inputs import FAR

BLOCK_K = 64
"""Latents of a step; a page has a multiple of them."""

CONSUMERS = 2

LATENT_DIM = 576

VALUE_DIM = 512

HALF = VALUE_DIM // 2
"""Columns of O of a consumer: 128 registers of each thread."""

SIZES = HALF, HALF, LATENT_DIM - VALUE_DIM
"""Columns of the parts in which latents are loaded: both halves of V, and the rest, as wide as P of a step."""

STAGES = 2
"""Stages of the rings of latents: a third stage does not fit beside Q."""

NORMALISER = STAGES
"""Row of ``LatentScratch.scales`` after those of alpha, which holds 1 / l after the last step."""


class LatentScratch[R, M](NamedTuple):
    """Shared memory of the kernel: plans of rings and types or, in the kernel, what they bind.

    Attributes:
      q_left, q_right, q_rest: Q, in rings of one stage; the output reuses the first two.
      left, right: both halves of V.
      rest: the columns that only S needs, then P of the step, which both consumers read.
      scales: ``[STAGES + 1, 64]`` float32, alpha of a step by its slot, and 1 / l.
      ready: a barrier for each stage: P and alpha of its step are in shared memory.
      finished: a barrier: 1 / l is in shared memory.
    """

    q_left: R
    q_right: R
    q_rest: R
    left: R
    right: R
    rest: R
    scales: M
    ready: M
    finished: M


@dataclasses.dataclass(frozen=True, slots=True)
class LatentPlan:
    """The shared memory of the kernel: Q and latents, each in both halves of V and the rest."""

    dtype: DTypeLike

    def scratch(self) -> LatentScratch[RingPlan, object]:
        """The rings, and scratch types of the buffer and of the barriers."""
        # Q is loaded once, so its stages are never released.
        q_left, q_right, q_rest = (RingPlan(SharedTile((ROWS, size), self.dtype), 1, 1) for size in SIZES)
        # Only the first consumer reads the left half.
        left, right, rest = (
            RingPlan(SharedTile((BLOCK_K, size), self.dtype), STAGES, consumers)
            for size, consumers in zip(SIZES, (1, CONSUMERS, CONSUMERS), strict=True)
        )
        return LatentScratch(
            q_left=q_left,
            q_right=q_right,
            q_rest=q_rest,
            left=left,
            right=right,
            rest=rest,
            scales=plgpu.SMEM((STAGES + 1, ROWS), jnp.float32),
            ready=plgpu.Barrier(num_barriers=STAGES),
            finished=plgpu.Barrier(),
        )

    @property
    def shared_bytes(self) -> int:
        return sum(part.shared_bytes for part in self.scratch() if isinstance(part, RingPlan)) + 1024


@dataclasses.dataclass(frozen=True, slots=True)
class LatentCall:
    """The static half of a call.

    Attributes:
      q_length: query tokens of each sequence; a sequence's rows are its tokens' heads, token by token.
      columns: columns of the page table.
      right: keys visible after a query's position, None for all.
      splits: CTAs that share the keys of 64 rows (Flash-Decoding).
      prefetched: steps ahead of its load that a latent is prefetched to the L2 cache, 0 for no prefetch.
      partial: whether results are partial ones in float32, for each split, to be combined.
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
    partial: bool

    @property
    def rows(self) -> int:
        return self.q_length * self.heads

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // ROWS)

    @property
    def blocks_per_page(self) -> int:
        return self.page_size // BLOCK_K

    @property
    def capacity(self) -> int:
        return self.page_size * self.columns


@dataclasses.dataclass(frozen=True)
class LatentWork:
    """The work of one CTA, as scalars on the device.

    Attributes:
      position: position of the sequence's first new token.
      visible_end: one past the last key that some row sees; 0 for a split without keys.
      full_end: every row sees the keys before it.
      first: block of keys of step 0.
      total: number of steps, at least one.
    """

    sequence: Scalar
    row_tile: Scalar
    split: Scalar
    position: Scalar
    visible_end: Scalar
    full_end: Scalar
    first: Scalar
    total: Scalar


def work_of_program(call: LatentCall, program: Scalar, lengths_ref: Ref) -> LatentWork:
    """The work of a CTA: tiles of a sequence's rows come first, then its splits, then the next sequence."""
    row_tile = lax.rem(program, jnp.int32(call.row_tiles))
    rest = lax.div(program, jnp.int32(call.row_tiles))
    split, sequence = lax.rem(rest, jnp.int32(call.splits)), lax.div(rest, jnp.int32(call.splits))
    length = lax.max(lax.min(lengths_ref[sequence], jnp.int32(FAR)), jnp.int32(0))
    position = length - call.q_length
    length = lax.min(length, jnp.int32(min(call.capacity, FAR)))
    visible_end = full_end = length
    if call.right is not None:
        # Bounded by the tokens of the first row and of the last one.
        token = lax.div(row_tile * ROWS, jnp.int32(call.heads))
        last = lax.min(lax.div(row_tile * ROWS + (ROWS - 1), jnp.int32(call.heads)), jnp.int32(call.q_length - 1))
        visible_end = lax.max(lax.min(length, position + last + (call.right + 1)), jnp.int32(0))
        full_end = lax.max(lax.min(length, position + token + (call.right + 1)), jnp.int32(0))
    blocks = lax.div(visible_end + (BLOCK_K - 1), jnp.int32(BLOCK_K))
    # Rounded up, so the last splits may have fewer blocks or none.
    per_split = lax.div(blocks + (call.splits - 1), jnp.int32(call.splits))
    first = split * per_split
    total = lax.min(blocks - first, per_split)
    # A split without keys has one step, which is fully masked.
    visible_end = jnp.where(total > 0, visible_end, 0)
    first = jnp.where(total > 0, first, 0)
    return LatentWork(sequence, row_tile, split, position, visible_end, full_end, first, lax.max(total, jnp.int32(1)))
