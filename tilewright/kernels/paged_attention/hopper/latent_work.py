"""Shared memory of `latent`, and the work of its CTAs: equal ranges of the blocks of keys of all sequences."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.ring import CLUSTER_AXIS, RingPart, RingPlan
from tilewright.kernels.hopper.shared import SharedTile
from tilewright.kernels.hopper.tiles import ROWS
from tilewright.kernels.paged_attention.inputs import FAR
from tilewright.kernels.pallas_types import Ref, Scalar

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

ITEM_OVERHEAD = 2
"""Cost of a sequence besides its steps, in steps: its first scores and its last PV overlap with little; its output."""

MIN_RANGE = 8
"""Steps that a range has at least, overhead included: the parts of a sequence are written and read again."""

SHORT_BATCH = 2048
"""Sequences up to which all are compared with all for prefix sums, as one fused kernel of XLA's."""

NORMALISER = STAGES
"""The first row of ``LatentScratch.scales`` after those of alpha."""


class LatentScratch[R, M](NamedTuple):
    """Shared memory of the kernel: plans of rings and types or, in the kernel, what they bind.

    Attributes:
      q_left, q_right, q_rest: Q of an item, in rings of one stage.
      left, right: both halves of V; after the last step of an item, its output.
      rest: the columns that only S needs, then P of the step, which both consumers read.
      scales: ``[2 · STAGES, 64]`` float32, alpha of a step by its slot, and 1 / l by that of the last step.
      ready: a barrier for each stage: P and alpha of its step are in shared memory.
      finished: a barrier for each stage, that of the last step: 1 / l is in shared memory.
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
    """The shared memory of the kernel: Q and latents, each in both halves of V and the rest.

    Attributes:
      cluster: as in `LatentCall`.
    """

    dtype: DTypeLike
    cluster: int

    def scratch(self) -> LatentScratch[RingPlan, object]:
        """The rings, and scratch types of the buffer and of the barriers."""
        # Only the first consumer reads Q and the left half.
        q_left, q_right, q_rest = (RingPlan(SharedTile((ROWS, size), self.dtype), 1, 1) for size in SIZES)
        left, right, rest = (
            RingPlan(
                (RingPart(SharedTile((BLOCK_K, size), self.dtype), multicast=True),),
                STAGES,
                consumers,
                cluster=self.cluster,
            )
            for size, consumers in zip(SIZES, (1, CONSUMERS, CONSUMERS), strict=True)
        )
        return LatentScratch(
            q_left=q_left,
            q_right=q_right,
            q_rest=q_rest,
            left=left,
            right=right,
            rest=rest,
            scales=plgpu.SMEM((2 * STAGES, ROWS), jnp.float32),
            ready=plgpu.Barrier(num_barriers=STAGES),
            finished=plgpu.Barrier(num_barriers=STAGES),
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
      ranges: equal ranges to which the blocks of all sequences are cut.
      cluster: CTAs of a cluster, which have as many row tiles of one range and load each latent once for all.
      prefetched: steps ahead of its load that a latent is prefetched to the L2 cache, 0 for no prefetch.
    """

    sequences: int
    q_length: int
    heads: int
    num_pages: int
    page_size: int
    columns: int
    softmax_scale: float
    right: int | None
    ranges: int
    cluster: int
    prefetched: int

    @property
    def rows(self) -> int:
        return self.q_length * self.heads

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // ROWS)

    @property
    def clusters(self) -> int:
        """Clusters of a range."""
        return self.row_tiles // self.cluster

    @property
    def padded_rows(self) -> int:
        """Rows of a sequence in whole tiles."""
        return self.row_tiles * ROWS

    @property
    def blocks_per_page(self) -> int:
        return self.page_size // BLOCK_K

    @property
    def capacity(self) -> int:
        return self.page_size * self.columns

    def visible_length(self, length: Scalar) -> jax.Array:
        """Keys of a sequence that some row sees, from its length, which may be anything."""
        return jnp.clip(length, 0, min(self.capacity, FAR))


class LatentRanges[Operand](NamedTuple):
    """Equal ranges of the blocks of keys of all sequences, as int32 arrays that XLA computes from the lengths.

    The sequences stand one behind the other on a line, each with an overhead and then its blocks, and the line is cut.

    Attributes:
      ends: ``[sequences]``, where each sequence ends on the line.
      sequence: ``[ranges + 1]``, the sequence in which a range begins; their number for what is behind the last.
    """

    ends: Operand
    sequence: Operand


def latent_ranges(lengths: jax.Array, call: LatentCall) -> LatentRanges[jax.Array]:
    """Cuts the blocks of all sequences to ranges.

    As in Stream-K (Osama et al., 2023), the cuts depend on the lengths only, so results repeat bit for bit.
    """
    blocks = jnp.maximum(-(-call.visible_length(lengths) // BLOCK_K), 1)
    cost = (blocks + ITEM_OVERHEAD).astype(jnp.int32)
    index = jnp.arange(call.sequences, dtype=jnp.int32)
    if call.sequences <= SHORT_BATCH:
        ends = jnp.where(index[None] <= index[:, None], cost[None], 0).sum(axis=1, dtype=jnp.int32)
    else:
        ends = jnp.cumsum(cost, dtype=jnp.int32)
    # The sequence is found by comparing with all ends, where a search has many dependent loads. These sums are two
    # kernels of XLA's; whatever else follows from them would be more, and is left to the kernels that read them.
    begin = jnp.arange(call.ranges + 1, dtype=jnp.int32) * range_size(call, ends)
    return LatentRanges(ends, (ends[None] <= begin[:, None]).sum(axis=1, dtype=jnp.int32))


def range_size(call: LatentCall, ends: jax.Array | Ref) -> jax.Array:
    """The length of each range on the line."""
    return lax.max(lax.div(ends[call.sequences - 1] + (call.ranges - 1), jnp.int32(call.ranges)), jnp.int32(MIN_RANGE))


def begin_of_range(
    call: LatentCall, ranges: LatentRanges[jax.Array] | LatentRanges[Ref], number: Scalar
) -> tuple[jax.Array, jax.Array]:
    """The sequence and the block with which a range begins, and the one before it ends."""
    sequence = ranges.sequence[number]
    before = jnp.where(sequence > 0, ranges.ends[jnp.maximum(sequence - 1, 0)], 0)
    block = number * range_size(call, ranges.ends) - (before + ITEM_OVERHEAD)
    # One that begins in the overhead has all blocks.
    return sequence, jnp.where(sequence < call.sequences, jnp.maximum(block, 0), 0)


def last_of_sequence(
    call: LatentCall, ranges: LatentRanges[jax.Array] | LatentRanges[Ref], number: Scalar
) -> jax.Array:
    """The last range that has blocks of the sequence in which a range begins."""
    end = ranges.ends[jnp.minimum(ranges.sequence[number], call.sequences - 1)]
    return lax.div(end - 1, range_size(call, ranges.ends))


def number_of_range(call: LatentCall) -> jax.Array:
    """The range of this CTA."""
    return lax.div(lax.axis_index("program"), jnp.int32(call.clusters))


def sequences_of_range(call: LatentCall, ranges: LatentRanges[Ref]) -> tuple[jax.Array, jax.Array]:
    """The first sequence of this CTA's range, and of how many sequences it has blocks."""
    number = number_of_range(call)
    first, (last, cut) = ranges.sequence[number], begin_of_range(call, ranges, number + 1)
    return first, last - first + (cut > 0).astype(jnp.int32)


def blocks_of_item(
    call: LatentCall, ranges: LatentRanges[Ref], lengths_ref: Ref, sequence: Scalar
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The first block of a sequence that this CTA's range has, one past the last, and whether these are not all."""
    number = number_of_range(call)
    (first_sequence, block), (last_sequence, cut) = (
        begin_of_range(call, ranges, each) for each in (number, number + 1)
    )
    first = jnp.where(sequence == first_sequence, block, 0)
    blocks = lax.max(_blocks(call.visible_length(lengths_ref[sequence])), jnp.int32(1))
    is_cut = sequence == last_sequence
    return first, jnp.where(is_cut, cut, blocks), is_cut | (first > 0)


def part_of_item(call: LatentCall, ranges: LatentRanges[Ref], lengths_ref: Ref, sequence: Scalar) -> jax.Array:
    """Index of the partial results of this CTA's item in a sequence; −1 if it has all blocks."""
    first, _, cut = blocks_of_item(call, ranges, lengths_ref, sequence)
    return jnp.where(cut, part_of(number_of_range(call), first), -1)


def part_of(number: Scalar, first: Scalar) -> jax.Array:
    """Index of the partial results of a range's item: a range has two at most, one of which begins with block 0."""
    return jnp.asarray(2 * number + jnp.asarray(first == 0, jnp.int32))


def _blocks(keys: jax.Array) -> jax.Array:
    return lax.div(keys + (BLOCK_K - 1), jnp.int32(BLOCK_K))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatentWork:
    """The work of one CTA in an item, as scalars on the device.

    Attributes:
      position: position of the sequence's first new token.
      visible_end: one past the last key that some row of the cluster sees; 0 for an item without keys.
      full_end: every row sees the keys before it.
      first: block of keys of step 0.
      total: number of steps, at least one.
    """

    sequence: Scalar
    row_tile: Scalar
    position: Scalar
    visible_end: Scalar
    full_end: Scalar
    first: Scalar
    total: Scalar


def work_of_item(call: LatentCall, ranges: LatentRanges[Ref], lengths_ref: Ref, sequence: Scalar) -> LatentWork:
    """The work of this CTA in a sequence."""
    first_tile = row_tile = lax.rem(lax.axis_index("program"), jnp.int32(call.clusters)) * call.cluster
    if call.cluster > 1:
        row_tile = first_tile + lax.axis_index(CLUSTER_AXIS)
    first, end, _ = blocks_of_item(call, ranges, lengths_ref, sequence)
    length = lax.max(lax.min(lengths_ref[sequence], jnp.int32(FAR)), jnp.int32(0))
    position = length - call.q_length
    visible_end = full_end = length = call.visible_length(length)
    if call.right is not None:
        # Bounded by the tokens of the first row, and of the last one of the cluster, whose CTAs have the same steps.
        token = lax.div(row_tile * ROWS, jnp.int32(call.heads))
        last = lax.div(first_tile * ROWS + (call.cluster * ROWS - 1), jnp.int32(call.heads))
        last = lax.min(last, jnp.int32(call.q_length - 1))
        visible_end = lax.max(lax.min(length, position + last + (call.right + 1)), jnp.int32(0))
        full_end = lax.max(lax.min(length, position + token + (call.right + 1)), jnp.int32(0))
    total = lax.min(_blocks(visible_end), end) - first
    # Without keys there is one step, which is fully masked.
    visible_end = jnp.where(total > 0, visible_end, 0)
    first = jnp.where(total > 0, first, 0)
    return LatentWork(sequence, row_tile, position, visible_end, full_end, first, lax.max(total, jnp.int32(1)))
