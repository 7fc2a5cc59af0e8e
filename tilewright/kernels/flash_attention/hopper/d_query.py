"""The dQ accumulator of the backward kernels on Hopper: float32 in global memory, and its conversion to dQ.

CTAs add their parts of dQ by TMA reductions. A conversion of the whole accumulator takes 3 to 12 % of the time of a
backward pass, so CTAs whose dQ warpgroup has time convert the rows of heads that are complete while they work on the
rest (`OverlappedConversion`). No CTA waits for another: rows that were not complete when a CTA looked at their counter
are left to `convert_kernel`.
"""

import collections
import dataclasses
import itertools
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.launch import run_kernel
from tilewright.kernels.hopper.limits import MAX_TMA_BOX
from tilewright.kernels.hopper.panels import store_tile
from tilewright.kernels.hopper.schedule import ITEM_OVERHEAD, decode_tile_index
from tilewright.kernels.hopper.shared import SharedTile
from tilewright.kernels.hopper.tiles import ROWS, opaque_zero, tile_layout
from tilewright.kernels.in_place import frozen
from tilewright.kernels.pallas_types import Ref, Scalar

STRIP = 8
"""Columns of dQ that are contiguous in the accumulator: a warp's store of a wgmma accumulator is then 256 contiguous
bytes, without bank conflicts and without the shuffles and registers that a swizzled tile takes."""

ROW = MAX_TMA_BOX
"""Elements of a row of the dQ accumulator. With rows of a strip, 8 elements, TMA reductions are a fifth slower."""

MAX_OVERLAPPED_DIM = 64
"""Widest head dim at which the conversion of dQ is overlapped: causal attention over 4096 is 4 % faster, full as fast.
At 128 the kernel takes 43 (causal) to 80 µs (full) longer, wherever in a step dQ is converted, and the pass afterwards
47 to 54 less: the conversion competes for the L2 cache."""

PIECE_COLUMNS = 32
"""Columns of 64 rows that the overlapped conversion converts per step: 16 registers of a thread."""

TILES_PER_ITEM = 2
"""Tiles of 64 queries that correspond to a work item, which has 128 keys."""

COUNTER_SHAPE = (2, ROW)
"""Shape of the counter of a head. All its elements hold the same count, because a TMA reduction adds whole rows."""


def store_strips(staging: Ref, dq: jax.Array) -> None:
    """Stores columns of a wgmma accumulator into shared memory ``[strips, 64, STRIP]``, strip by strip."""
    # Row-major memory that TMA takes as rows of ROW has no tiling. Layout inference would find that out by trying one
    # for each strip, again at each of its guesses; it tries none where it cannot tell the offset of a strip. Mosaic
    # does not see that this offset is 0; LLVM does.
    zero = opaque_zero(lax.axis_index("program") & 1, bits=1)
    for strip in range(dq.shape[1] // STRIP):
        staging.at[strip, :, pl.ds(zero, STRIP)][...] = dq[:, strip * STRIP : (strip + 1) * STRIP]


def dq_accumulator_shape(
    block_q: int, batch: int, heads: int, q_length: int, head_dim: int
) -> tuple[int, int, int, int]:
    """Shape of the float32 dQ accumulator: for each tile of queries its strips, as rows of ``ROW`` elements."""
    tiles = -(-q_length // block_q)
    return batch, heads, tiles * block_q * head_dim // ROW, ROW


def load_dq_accumulator(
    accumulator: Ref,
    batch: Scalar,
    head: Scalar,
    row_tile: Scalar,
    block_q: int,
    head_dim: int,
    piece: Scalar | None = None,
) -> jax.Array:
    """Loads tile ``row_tile`` of 64 rows of the dQ accumulator, or the ``PIECE_COLUMNS`` columns of one piece."""
    steps, strip_rows = jnp.int32(block_q // ROWS), block_q * STRIP // ROW
    # A step's part of the accumulator lies strip by strip, each of block_q rows: the 64 rows of a tile are a part of
    # every strip.
    first = lax.div(row_tile, steps) * (block_q * head_dim // ROW) + lax.rem(row_tile, steps) * (ROWS * STRIP // ROW)
    if piece is not None:
        first = first + piece * (PIECE_COLUMNS // STRIP * strip_rows)
    strips = []
    for strip in range((head_dim if piece is None else PIECE_COLUMNS) // STRIP):
        source = accumulator.at[batch, head, pl.ds(first + strip * strip_rows, ROWS * STRIP // ROW)]
        strips.append(plgpu.load(source.reshape(ROWS, STRIP), layout=tile_layout(), optimized=False))
    return jnp.concatenate(strips, axis=1)


@dataclasses.dataclass(frozen=True, slots=True)
class OverlappedConversion:
    """The static plan of which rows of dQ the persistent CTAs of the backward pass convert, and when.

    A work item, a tile of keys of a key head, corresponds to the queries at the same positions, of all heads of its
    group.

    Attributes:
      items: for each position in the CTAs' lists the item whose rows are converted meanwhile, −1 for none.
      tiles: items of each key head, all of which must have been counted before.
    """

    items: np.ndarray
    tiles: int

    @classmethod
    def plan(
        cls, lists: tuple[np.ndarray, np.ndarray], row_steps: np.ndarray, whole: int
    ) -> "OverlappedConversion | None":
        """Plans from ``program_lists`` and the ``row_steps`` behind them; None if no head is complete in time.

        Args:
          whole: number of a head's items whose rows all exist.
        """
        starts, items = lists
        tiles = len(row_steps)
        # Times are in steps, by the static plan: what a CTA has done when it comes to a position of its list.
        costs = (row_steps + ITEM_OVERHEAD)[items % tiles]
        ends = np.concatenate([np.cumsum(costs[a:b]) for a, b in itertools.pairwise(starts)])
        # A head is complete when the last of its items is, in whichever CTA.
        complete = np.zeros(items.max() // tiles + 1)
        np.maximum.at(complete, items // tiles, ends)
        # CTAs drift from the static plan, so allow one mean item of slack before a head counts as complete. Its rows
        # are still in the L2 cache then.
        ready = complete[items // tiles] + costs.mean()
        found = np.full(len(items), -1, np.int32)
        for start, end in itertools.pairwise(starts):
            # Each CTA converts the rows of its own items, in their order, at most those of one item beside another
            # item.
            waiting = collections.deque(position for position in range(start, end) if items[position] % tiles < whole)
            for position in range(start, end):
                if waiting and ready[waiting[0]] <= ends[position] - costs[position]:
                    found[position] = items[waiting.popleft()]
        return cls(found, tiles) if np.any(found >= 0) else None


class ConvertedRows(NamedTuple):
    """An overlapped conversion that has run; ``d_query`` and ``done`` as in ``call.ConversionResults``."""

    plan: OverlappedConversion
    d_query: jax.Array
    done: jax.Array


class _ConvertOperands[Operand](NamedTuple):
    """Operands of `convert_kernel`; all but the accumulator are None unless some rows are converted already.

    Attributes:
      done: as in `ConvertedRows`.
      tiles: ``[tiles, 2]`` int32, a tile of 64 rows of dQ for each CTA, and the work item that may have converted it.
      d_query: the result, with the rows that are converted.
    """

    accumulator: Operand
    done: Operand | None
    tiles: Operand | None
    d_query: Operand | None


def convert_kernel(
    accumulator: jax.Array,
    shape: tuple[int, int, int, int],
    dtype: DTypeLike,
    converted: ConvertedRows | None,
    *,
    block_q: int,
    kv_heads: int,
    scale: float,
    tile: SharedTile,
) -> jax.Array:
    """Converts the dQ accumulator to dQ, a tile of 64 rows per CTA.

    Args:
      accumulator: an array of ``dq_accumulator_shape``.
      shape: of dQ, ``[batch, q_length, heads, head_dim]``.
      converted: rows that are done already.
      tile: of 64 rows of dQ, with all columns that the accumulator has.
    """
    # A kernel, not a pass of XLA: 65 µs instead of 85 (docs/notes/hopper_attention.md).
    batch, q_length, heads, _ = shape
    row_tiles = -(-q_length // ROWS)
    # Backwards: the rows that were added to last are still in the L2 cache.
    tiles = np.arange(batch * heads * row_tiles, dtype=np.int32)[::-1]
    operands: _ConvertOperands[object] = _ConvertOperands(accumulator, None, None, None)
    result: jax.Ref | None = None
    if converted is not None:
        matrix, row_tile = np.divmod(tiles, row_tiles)
        # The inverse of `ItemConversion.convert`: the item whose conversion would have covered these 64 rows.
        items = matrix * kv_heads // heads * converted.plan.tiles + row_tile // TILES_PER_ITEM
        items = np.where(np.isin(items, converted.plan.items), items, -1)
        order = np.argsort(items >= 0, kind="stable")  # first the tiles that certainly need a conversion
        result = jax.new_ref(converted.d_query)
        tile_items = jnp.asarray(np.stack([tiles, items], axis=1)[order])
        operands = _ConvertOperands(accumulator, converted.done, tile_items, result)

    def body(refs: _ConvertOperands[Ref], out_ref: Ref | None, staging: Ref) -> None:
        program = lax.axis_index("program")
        index = len(tiles) - 1 - program if refs.tiles is None else refs.tiles[program, 0]
        b, head, row_tile = decode_tile_index(index, row_tiles, heads)
        target = refs.d_query if out_ref is None else out_ref
        assert target is not None

        def convert() -> None:
            dq = load_dq_accumulator(refs.accumulator, b, head, row_tile, block_q, tile.shape[1])
            # By TMA, which leaves out rows and columns beyond the end.
            staging[...] = (dq * scale).astype(dtype)
            plgpu.commit_smem()
            store_tile(staging, target.at[b, pl.ds(row_tile * ROWS, ROWS), head])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        if refs.tiles is None or refs.done is None:
            convert()
        else:
            item = refs.tiles[program, 1]
            # No rows are converted twice, and none is left out: ``done`` is 1 only where the overlapped conversion ran.
            pl.when((item < 0) | (refs.done[lax.max(item, jnp.int32(0))] == 0))(convert)

    out_type = jax.ShapeDtypeStruct(shape, dtype) if result is None else None
    d_query = run_kernel(body, operands, out_type, tile.stack(), role="round_d_query", num_ctas=len(tiles))
    return d_query if result is None else frozen(result)
