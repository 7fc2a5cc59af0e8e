"""Where the backward kernels on Hopper add dQ up in global memory, in float32, and the way from there to the result.

A pass over the sums takes 3 to 12 % of the time of a backward pass. Programs that have the time therefore convert what
is complete while they work on the rest. No program waits for another: rows that were not complete when a program
looked at them are left to the pass afterwards.
"""

import collections
import dataclasses
import itertools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.launch import warpgroup_kernel
from tilewright.kernels.hopper.limits import MAX_TMA_BOX
from tilewright.kernels.hopper.schedule import ITEM_OVERHEAD, decode_tile_index
from tilewright.kernels.hopper.shared import SharedTile
from tilewright.kernels.hopper.tiles import ROWS, opaque_zero, tile_layout
from tilewright.kernels.hopper.types import Ref, Scalar

STRIP = 8
"""Columns of dQ that lie together while it is added up: a warp's store of an accumulator is then 256 contiguous bytes,
without bank conflicts and without the shuffles and registers that a swizzled tile takes."""

ROW = MAX_TMA_BOX
"""Elements of a row of the sums. With rows of a strip, 8 elements, its reductions are a fifth slower."""

EARLY_DIM = 64
"""Widest head dim at which dQ is converted beside the rest: causal attention over 4096 is 4 % faster, full as fast.
At 128 the kernel takes 43 (causal) to 80 µs (full) longer, wherever in a step it is done, and the pass afterwards 47 to
54 less: it competes for the L2 cache."""

PIECE = 32
"""Columns of 64 rows that are converted at a time beside other work: 16 registers."""

EARLY_TILES = 2
"""Steps of 64 queries that a work item stands for: it has 128 keys."""

COUNTER = (2, ROW)
"""The counter of a head. All its elements count the same, which is what a TMA reduction does."""


def store_strips(staging: Ref, part: jax.Array) -> None:
    """Stores columns of an accumulator into shared memory ``[strips, 64, STRIP]``, strip by strip."""
    # Row-major memory that TMA takes as rows of ROW has no tiling, which layout inference would find out by trying one
    # for each strip, again at each of its guesses. It tries none where strips begin at a place that it cannot tell: it
    # does not see that this is 0, as LLVM does.
    zero = opaque_zero(lax.axis_index("program") & 1, bits=1)
    for strip in range(part.shape[1] // STRIP):
        staging.at[strip, :, pl.ds(zero, STRIP)][...] = part[:, strip * STRIP : (strip + 1) * STRIP]


def d_query_shape(block_q: int, batch: int, heads: int, q_length: int, head_dim: int) -> tuple[int, int, int, int]:
    """Shape of the float32 sums of dQ: for each tile of queries its strips, as rows of ``ROW`` elements."""
    tiles = -(-q_length // block_q)
    return batch, heads, tiles * block_q * head_dim // ROW, ROW


def sums_of(
    sums_ref: Ref, batch: Scalar, head: Scalar, rows: Scalar, block_q: int, head_dim: int, piece: Scalar | None = None
) -> jax.Array:
    """``[64, head_dim]`` of the sums, or the ``PIECE`` columns of one piece; ``rows`` counts rows in steps of 64."""
    steps, of_strip = jnp.int32(block_q // ROWS), block_q * STRIP // ROW
    first = lax.div(rows, steps) * (block_q * head_dim // ROW) + lax.rem(rows, steps) * (ROWS * STRIP // ROW)
    if piece is not None:
        first = first + piece * (PIECE // STRIP * of_strip)
    strips = []
    for strip in range((head_dim if piece is None else PIECE) // STRIP):
        source = sums_ref.at[batch, head, pl.ds(first + strip * of_strip, ROWS * STRIP // ROW)].reshape(ROWS, STRIP)
        strips.append(plgpu.load(source, layout=tile_layout(), optimized=False))
    return jnp.concatenate(strips, axis=1)


@dataclasses.dataclass(frozen=True, slots=True)
class EarlyConversions:
    """Which rows of dQ the persistent programs of the backward pass convert, and when.

    A work item, a tile of keys of a key head, stands for the queries at the same place, of all heads of its group.

    Attributes:
      items: for each place in the programs' lists the item whose rows are converted meanwhile, −1 for none.
      tiles: items of each key head, of which all must have been counted before.
    """

    items: np.ndarray
    tiles: int

    @classmethod
    def plan(cls, lists: tuple[np.ndarray, np.ndarray], row_steps: np.ndarray, whole: int) -> "EarlyConversions | None":
        """From ``program_lists`` and the ``row_steps`` that they were made by; None if nothing is complete in time.

        Args:
          whole: how many of a head's items stand for rows that all exist.
        """
        starts, items = lists
        tiles = len(row_steps)
        costs = (row_steps + ITEM_OVERHEAD)[items % tiles]
        ends = np.concatenate([np.cumsum(costs[a:b]) for a, b in itertools.pairwise(starts)])
        complete = np.zeros(items.max() // tiles + 1)
        np.maximum.at(complete, items // tiles, ends)
        # Programs drift apart: an item later what a head needs is there, and still in the L2 cache.
        ready = complete[items // tiles] + costs.mean()
        found = np.full(len(items), -1, np.int32)
        for start, end in itertools.pairwise(starts):
            waiting = collections.deque(place for place in range(start, end) if items[place] % tiles < whole)
            for place in range(start, end):
                if waiting and ready[waiting[0]] <= ends[place] - costs[place]:
                    found[place] = items[waiting.popleft()]
        return cls(found, tiles) if np.any(found >= 0) else None


def convert_kernel(
    sums: jax.Array,
    shape: tuple[int, int, int, int],
    dtype: DTypeLike,
    early: tuple[EarlyConversions, Any, Any] | None,
    *,
    block_q: int,
    kv_heads: int,
    scale: float,
) -> jax.Array:
    """dQ of its sums.

    Args:
      sums: an array of ``d_query_shape``.
      shape: of dQ, ``[batch, q_length, heads, head_dim]``.
      early: what was to be converted before, dQ with what was, and whether it was, int32 for each work item.
    """
    batch, q_length, heads, head_dim = shape
    tiles = -(-q_length // ROWS)
    staged = SharedTile((ROWS, head_dim), dtype).scratch()
    # Backwards: the sums that were added to last are still in the L2 cache.
    parts = np.arange(batch * heads * tiles, dtype=np.int32)[::-1]
    operands: tuple[Any, ...] = (sums,)
    out_type: Any = jax.ShapeDtypeStruct(shape, dtype)
    result: jax.Ref | None = None
    if early is not None:
        conversions, converted, done = early
        matrix, tile = np.divmod(parts, tiles)
        items = matrix * kv_heads // heads * conversions.tiles + tile // EARLY_TILES
        items = np.where(np.isin(items, conversions.items), items, -1)
        order = np.argsort(items >= 0, kind="stable")  # first those that have work to do
        result = jax.new_ref(converted)
        operands, out_type = (sums, done, jnp.asarray(np.stack([parts, items], axis=1)[order]), result), ()

    def body(sums_ref: Ref, *refs: Ref) -> None:
        *others, result_ref, staging = refs
        program = lax.axis_index("program")
        part = others[1][program, 0] if others else len(parts) - 1 - program
        b, head, rows = decode_tile_index(part, tiles, heads)

        def convert() -> None:
            staging[...] = (sums_of(sums_ref, b, head, rows, block_q, head_dim) * scale).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staging, result_ref.at[b, pl.ds(rows * ROWS, ROWS), head])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        if others:
            item = others[1][program, 1]
            pl.when((item < 0) | (others[0][lax.max(item, jnp.int32(0))] == 0))(convert)
        else:
            convert()

    found = warpgroup_kernel(body, out_type, [staged], len(parts))(*operands)
    return found if result is None else jax.freeze(result)
