"""The dQ warpgroup of the kernel for dK and dV up to head_dim 128: dQ = dSᵀK, added in global memory.

Where an `OverlappedConversion` is planned, it also converts the accumulator of heads that are complete, a piece per
step: each item asks for the rows of another one, and skips them unless the counter of their head is full.
"""

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.flash_attention.hopper.backward_context import (
    KeyValueContext,
    QueryStep,
    over_query_steps,
)
from tilewright.kernels.flash_attention.hopper.d_query import (
    COUNTER_SHAPE,
    PIECE_COLUMNS,
    ROW,
    STRIP,
    TILES_PER_ITEM,
    load_dq_accumulator,
    store_strips,
)
from tilewright.kernels.flash_attention.hopper.plans import DqMmaTile
from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.panels import mma
from tilewright.kernels.hopper.tiles import ROWS, opaque_zero, store_unoptimised, tile_layout
from tilewright.kernels.pallas_types import Ref, Scalar


def accumulate_dq_of_item(ctx: KeyValueContext, item_index: Scalar, item: Scalar, first: Scalar) -> Scalar:
    """Role of the dQ warpgroup in one work item: adds its part of dQ, and converts rows of another item meanwhile.

    Returns:
      the index of the step behind those of the item, whose first one is ``first``.
    """
    b, kv_head, _ = ctx.decode(item)
    # Requested before the wait for K, so that the latency of one load hides that of the other.
    source = request_counter(ctx, item_index, item)
    ctx.scratch.k.load_from_shared(item_index)
    conversion = wait_counter(ctx, item_index, source)

    def one(step: QueryStep, _: None) -> None:
        accumulate_dq(ctx, item, b, step)
        # A piece per step, beside the reduction; those that are left come after the last step.
        if conversion is not None:
            pl.when(step.index - first < conversion.pieces)(lambda: conversion.convert(step.index - first))

    last = over_query_steps(ctx, item, first, one, None)
    # First of all: the producer loads the next item's K while this warpgroup converts the remaining rows of dQ.
    ctx.scratch.k.release(item_index)
    # Counted last: a full counter promises that all reductions of a head are in global memory.
    if conversion is not None:
        lax.fori_loop(last - first, conversion.pieces, lambda piece, _: conversion.convert(piece), None)
        count_item(ctx, b, kv_head)
    return last


def accumulate_dq(ctx: KeyValueContext, item: Scalar, batch: Scalar, step: QueryStep) -> None:
    """Computes a step's dQ = dSᵀK, which the consumers left to this warpgroup, and adds it by a TMA reduction."""
    ds_ring, staging, accumulator = ctx.scratch.ds, ctx.scratch.dq, ctx.operands.dq_accumulator
    assert ds_ring is not None
    assert staging is not None
    assert accumulator is not None
    zero = opaque_zero(step.index + item)

    def compute(tile: DqMmaTile, dq: Ref) -> jax.Array:
        k = ctx.scratch.k.smem.at[zero, :, pl.ds(tile.column, tile.columns)]
        # dS lies as [keys, queries]: wgmma transposes 16-bit operands in shared memory as it reads them.
        mma(dq, ds_ring.get_mma_tile(step.index).at[:, pl.ds(tile.row, ROWS)], k, transpose_a=True)
        return dq[...]

    # Both consumers have written their 64 keys of dS: the barrier counts one arrival of each.
    ds_ring.load_from_shared(step.index)
    tiles = ctx.plan.dq_mma_tiles
    for tile in tiles:
        dq = pl.run_scoped(functools.partial(compute, tile), plgpu.ACC((ROWS, tile.columns), jnp.float32))
        # Reading dQ has waited for its MMA, and this is the last one that reads dS.
        if tile == tiles[-1]:
            ds_ring.release(step.index)
        # Only now wait until the reduction of the step before has read the buffer, so that an MMA ran meanwhile.
        if tile == tiles[0]:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        strips = pl.ds(tile.column // STRIP, tile.columns // STRIP)
        store_strips(staging.at[strips, pl.ds(tile.row, ROWS)], dq)
    plgpu.commit_smem()
    rows = ctx.block_q * ctx.plan.head_dim // ROW
    # One reduction for the whole step; one for each part, tried to wait less for shared memory, was 2.6 % slower
    # (docs/notes/hopper_attention.md).
    plgpu.copy_smem_to_gmem(
        staging.reshape(rows, ROW),
        accumulator.at[batch, step.head, pl.ds(step.q_tile * rows, rows)],
        reduction_op="add",
    )


@dataclasses.dataclass(frozen=True, slots=True)
class ItemConversion:
    """The conversion that the dQ warpgroup carries out beside one work item.

    Attributes:
      source: the item whose rows of dQ are converted.
      pieces: their number of pieces; 0 unless all items of its head are complete.
    """

    ctx: KeyValueContext
    source: Scalar
    pieces: Scalar

    def convert(self, piece: Scalar) -> None:
        """Converts ``PIECE_COLUMNS`` columns of 64 rows of the accumulator to dQ."""
        ctx, head_dim = self.ctx, self.ctx.plan.head_dim
        accumulator, results = ctx.operands.dq_accumulator, ctx.results.conversion
        assert accumulator is not None
        assert results is not None
        b, kv_head, kv_tile = ctx.decode(self.source)
        pieces, tiles = jnp.int32(head_dim // PIECE_COLUMNS), jnp.int32(TILES_PER_ITEM)
        tile, column = lax.div(piece, pieces), lax.rem(piece, pieces)
        head = kv_head * ctx.parts.group + lax.div(tile, tiles)
        row_tile = kv_tile * TILES_PER_ITEM + lax.rem(tile, tiles)
        target = results.d_query.at[b, pl.ds(row_tile * ROWS, ROWS), head, pl.ds(column * PIECE_COLUMNS, PIECE_COLUMNS)]
        # Other CTAs' reductions are in global memory: each waits for its own before it counts, and the counter was
        # full.
        dq = load_dq_accumulator(accumulator, b, head, row_tile, ctx.block_q, head_dim, column)
        store_unoptimised(target, (dq * ctx.options.scale).astype(ctx.plan.dtype))


def request_counter(ctx: KeyValueContext, item_index: Scalar, item: Scalar) -> jax.Array | None:
    """Starts the load of the counter of the head whose dQ is to be converted; returns the item with the rows."""
    conversion, ring = ctx.operands.conversion, ctx.scratch.counter
    if conversion is None or ring is None:
        return None
    starts, _ = ctx.operands.item_lists
    planned = conversion.items[starts[lax.axis_index("program")] + item_index]
    # None is planned: ask for this item's own rows, whose head is not complete while the item is worked on.
    source = jnp.where(planned < 0, item, planned)
    b, kv_head, _ = ctx.decode(source)
    # Through shared memory: all threads must see one value, whatever other CTAs add meanwhile.
    ring.load_from_dram(item_index, conversion.counters.at[b, kv_head, 0, pl.ds(0, ROW // 2)])
    return source


def wait_counter(ctx: KeyValueContext, item_index: Scalar, source: jax.Array | None) -> ItemConversion | None:
    """Waits for the counter, and stores whether the rows of ``source`` are converted beside this item."""
    ring, results = ctx.scratch.counter, ctx.results.conversion
    if source is None or ring is None or results is None:
        return None
    ring.load_from_shared(item_index)
    # float32 counts exactly up to 2²⁴ items, more than a head has.
    complete = ring.smem[0, 0] == ctx.schedule.extent.row_tiles
    ring.release(item_index)
    results.done[source] = complete.astype(jnp.int32)
    pieces = ctx.parts.group * TILES_PER_ITEM * (ctx.plan.head_dim // PIECE_COLUMNS)
    return ItemConversion(ctx, source, jnp.where(complete, pieces, 0))


def count_item(ctx: KeyValueContext, batch: Scalar, kv_head: Scalar) -> None:
    """Adds one to the counter of a head, now that the CTA's part of an item's dQ is in global memory."""
    staging, conversion = ctx.scratch.dq, ctx.operands.conversion
    assert staging is not None
    assert conversion is not None
    plgpu.wait_smem_to_gmem(0)  # until the reductions are complete, not only until they have read shared memory
    # Through the buffer of dQ, which is free when its reductions are complete.
    ones = staging.at[0, pl.ds(0, ROWS)]
    ones[...] = plgpu.layout_cast(jnp.ones((ROWS, STRIP), jnp.float32), tile_layout())
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(ones.reshape(COUNTER_SHAPE), conversion.counters.at[batch, kv_head], reduction_op="add")
