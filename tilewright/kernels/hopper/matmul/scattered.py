"""A matmul whose products are summed over the devices of a mesh axis while it runs: k is split, and so are the sums.

A device computes the tiles of the others' rows first, in float32, and keeps them in its memory, from which the producer
sends each one while the next is computed. Of its own rows, the last, it adds what it has received to each tile::

    device i, consumers    tile 0 of i+1 · keep     tile 1 of i+1 · keep     ...   tile 0 of i · wait · add · store ...
    device i, producer                              tile 0 -> i+1 · signal   ...   last tile -> i+1 · signal

The sums are in float32 and in the order of the devices before this one, so that they repeat bit for bit. All devices
have the tiles in the same order: what a CTA waits for was computed as many items ago as another device's rows have, and
sent while its CTA computed the next one. It is safe as ``gathered.py`` is, but that all CTAs send, and must have an SM
in the end.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.launch import run_kernel
from tilewright.kernels.hopper.limits import PUSH_REGISTERS, WGMMA_M
from tilewright.kernels.hopper.matmul.dense import dense_plan
from tilewright.kernels.hopper.matmul.epilogue import AsSummed, Columns
from tilewright.kernels.hopper.matmul.gathered import items_before, sending_pace, sending_params
from tilewright.kernels.hopper.matmul.heuristics import dense_candidates
from tilewright.kernels.hopper.matmul.kernel import (
    Factors,
    MatmulContext,
    Operands,
    Scratch,
    accumulate,
    produce_item,
)
from tilewright.kernels.hopper.matmul.params import BLOCK_BYTES, MatmulParams
from tilewright.kernels.hopper.matmul.plan import MatmulPlan
from tilewright.kernels.hopper.matmul.schedule import ScatteredSchedule, Work
from tilewright.kernels.hopper.matmul.sending import (
    DeviceRing,
    Outgoing,
    PieceBuffers,
    Pieces,
    buffers_bytes,
    fence_copies,
)
from tilewright.kernels.hopper.matmul.store import store_tile
from tilewright.kernels.hopper.schedule import Rounds
from tilewright.kernels.hopper.shared import SharedTile
from tilewright.kernels.pallas_types import Ref, Scalar

BUFFERS = 2
"""Pieces for which a CTA has shared memory."""

KEPT_BUFFERS = 2
"""Parts of a consumer's float32 tile that it writes while TMA stores others."""

FIRST_STEP = 4
"""The step of an item with which the tile before is sent: all consumers have stored it by then, and nothing waits."""

COLUMNS = 64
"""Columns to which received ones are added at a time."""


class Arrays(NamedTuple):
    """Arrays that the kernel writes.

    Attributes:
      out: ``[batches, rows, n]``, the sums of this device.
      kept, received: float32, ``[devices - 1, tiles, rows, columns]`` of whole tiles, each contiguous: what this device
        has computed for the others, and they for it, by the distance of the two.
    """

    out: Any
    kept: Any
    received: Any


class ScatteringScratch(NamedTuple):
    """Shared memory of a CTA: that of the matmul, parts of float32 tiles, and buffers of pieces to send.

    Attributes:
      stored: whether the consumers have stored the tile that is sent next.
    """

    matmul: Scratch
    kept: Any
    buffers: PieceBuffers
    stored: Any


@dataclasses.dataclass(frozen=True, slots=True)
class ScatterContext:
    """A CTA's references beside those of the matmul."""

    matmul: MatmulContext
    ring: DeviceRing
    arrays: Arrays
    scratch: ScatteringScratch
    arrived: Any

    @property
    def schedule(self) -> ScatteredSchedule:
        """The kernel's schedule, over its references."""
        return cast(ScatteredSchedule, self.matmul.schedule)

    def begin(self, part: int) -> Scalar:
        """The number of the first item of a part among those of this CTA."""
        return items_before(self.matmul, part * self.schedule.items_of_part)

    def work(self, index: Scalar) -> Work:
        """An item of this CTA."""
        return self.schedule.work(self.item(index), self.matmul.cta)

    def item(self, index: Scalar) -> Scalar:
        """The number of an item of this CTA among those of all."""
        return self.matmul.program + index * self.matmul.programs

    def tile(self, index: Scalar) -> Scalar:
        """The number of the tile of an item among those of its part, which is the same on all devices."""
        cluster, items = self.matmul.plan.params.cluster, jnp.int32(self.schedule.items_of_part)
        return lax.rem(jnp.asarray(self.item(index), jnp.int32), items) * cluster + self.matmul.cta

    def semaphore(self, slot: Scalar, index: Scalar) -> Ref:
        """The semaphore of the tile of an item."""
        semaphore: Ref = self.arrived.at[slot * tiles_of_part(self.schedule) + self.tile(index)]
        return semaphore


def scattered_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    ring: DeviceRing,
    *,
    transpose_rhs: bool = False,
    out_dtype: DTypeLike,
    params: MatmulParams,
    num_sms: int,
) -> jax.Array:
    """``psum_scatter(lhs · rhs)`` of 16-bit operands inside of ``shard_map``, with float32 sums.

    Args:
      lhs: ``[batches, devices · rows, k]``, this device's part of k.
      rhs: ``[k, n]``, or ``[n, k]`` with ``transpose_rhs``.

    Returns:
      ``[batches, rows, n]``.
    """
    batches, all_rows, k = lhs.shape
    n, rows, devices = rhs.shape[0 if transpose_rhs else 1], all_rows // ring.devices, ring.devices
    matrix = lhs.reshape(batches * all_rows, k)
    plan = scattered_plan(lhs.dtype, matrix.shape, rhs.shape, params, out_dtype, transpose_rhs)
    own = ring.index().astype(jnp.int32)[None]
    schedule = ScatteredSchedule(own, devices, batches, rows, n, -(-k // plan.lhs.block_k), plan.tile)
    tiles = tiles_of_part(schedule)
    # Tile by tile, not as a matrix: a piece is contiguous, and both devices number tiles alike.
    wide = jax.ShapeDtypeStruct((devices - 1, tiles, *tile_shape(plan)), jnp.float32)
    # Each CTA has an item of every part.
    programs = min(num_sms // params.cluster, schedule.items_of_part)

    def body(operands: Operands, arrays: Arrays, scratch: ScatteringScratch) -> None:
        arrived: Any = pl.get_global(plgpu.SemaphoreType.REGULAR(((devices - 1) * tiles,)))
        warpgroup = lax.axis_index("warpgroup")
        context = MatmulContext(
            plan, operands, (arrays.out,), scratch.matmul, warpgroup, lax.axis_index("program"), Rounds(programs),
            PUSH_REGISTERS,
        )  # fmt: skip
        scatter = ScatterContext(context, ring, arrays, scratch, arrived)
        pl.when(warpgroup < params.consumers)(lambda: run_scattering_consumer(scatter))
        pl.when(warpgroup == params.consumers)(lambda: run_scattering_producer(scatter))

    scratch = ScatteringScratch(
        Scratch(plan.stages, plan.store_tile.stack(params.consumers, plan.store_buffers), None, None),
        kept_tile().stack(params.consumers, KEPT_BUFFERS),
        PieceBuffers.scratch(BUFFERS, pieces_of_tile(plan), jnp.float32),
        plgpu.Barrier(num_arrivals=params.consumers, num_barriers=1),
    )
    arrays: Arrays = run_kernel(
        body,
        Operands((Factors(matrix, (rhs,)),), schedule, AsSummed(), None),
        Arrays(jax.ShapeDtypeStruct((batches, rows, n), out_dtype), wide, wide),
        scratch,
        role="send_products",
        num_ctas=programs,
        warpgroups=params.consumers + 1,
        cluster=params.cluster,
    )
    return arrays.out


def tiles_of_part(schedule: ScatteredSchedule) -> int:
    """The number of tiles of one device's rows."""
    return schedule.items_of_part * schedule.tile.cluster_m * schedule.tile.cluster_n


def tile_shape(plan: MatmulPlan) -> tuple[int, int]:
    """Rows and columns of the tile of a CTA."""
    return plan.tile.rows, plan.tile.columns


def pieces_of_tile(plan: MatmulPlan) -> Pieces:
    """The pieces in which a tile is sent."""
    return Pieces.of(tile_shape(plan), jnp.float32)


def kept_tile() -> SharedTile:
    """A part of a float32 tile: the rows of one wgmma, and a swizzle width of columns."""
    return SharedTile((WGMMA_M, BLOCK_BYTES // 4), jnp.float32, BLOCK_BYTES, True)


def scattered_plan(
    dtype: DTypeLike,
    lhs_shape: tuple[int, ...],
    rhs_shape: tuple[int, ...],
    params: MatmulParams,
    out_dtype: DTypeLike,
    transpose_rhs: bool,
) -> MatmulPlan:
    """The plan of `scattered_matmul`."""
    plan = dense_plan(dtype, lhs_shape, rhs_shape, 1, params, out_dtype, False, transpose_rhs)
    reserved = buffers_bytes(BUFFERS) + kept_tile().stack_bytes(params.consumers * KEPT_BUFFERS)
    return dataclasses.replace(plan, reserved=reserved)


def scattered_params(
    lhs: jax.Array | jax.ShapeDtypeStruct,
    rhs: jax.Array | jax.ShapeDtypeStruct,
    out_dtype: DTypeLike,
    transpose_rhs: bool,
    num_sms: int,
) -> MatmulParams:
    """The config of a call: the best one of a matmul, with as many stages as the rest leaves."""
    k, n = lhs.shape[-1], rhs.shape[0 if transpose_rhs else 1]
    rows = math.prod(lhs.shape[:-1])
    shapes = lhs.dtype, (rows, k), rhs.shape
    return sending_params(
        dense_candidates(rows, n, k, num_sms),
        lambda params: scattered_plan(*shapes, params, out_dtype, transpose_rhs),
    )


def run_scattering_consumer(scatter: ScatterContext) -> None:
    """Computes this warpgroup's rows of all items of this CTA: keeps those of others, and adds up the own ones."""
    context, devices = scatter.matmul, scatter.ring.devices
    first_own = scatter.begin(devices - 1)
    plgpu.set_max_registers(PUSH_REGISTERS.consumer, action="increase")

    def one(finish: Callable[[jax.Array, Work, Scalar], None], index: Scalar, _: None) -> None:
        work = scatter.work(index)
        accumulator = plgpu.ACC((context.plan.params.consumer_rows, context.plan.columns), jnp.float32)
        first = index * scatter.schedule.steps
        (tile,) = pl.run_scoped(functools.partial(accumulate, context, work, first), accumulator)
        finish(tile, work, index)

    lax.fori_loop(0, first_own, functools.partial(one, functools.partial(keep, scatter)), None)
    lax.fori_loop(first_own, scatter.begin(devices), functools.partial(one, functools.partial(add, scatter)), None)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def keep(scatter: ScatterContext, tile: jax.Array, work: Work, index: Scalar) -> None:
    """Stores a tile that belongs to another device, and tells the producer."""
    context = scatter.matmul
    # To this device's memory first. Stored to the other device here it would hold up the MMAs: all CTAs store at the
    # same time, and 128 KB at 2.7 GB/s for each SM take 48 µs, two thirds of a tile's MMAs at k = 7168
    # (docs/notes/collective_matmul.md).
    # The target is the tile itself, so its rows begin at this consumer's, and its columns at 0.
    target, in_tile = scatter.arrays.kept.at[work.part, scatter.tile(index)], work._replace(column=0)
    store_tile((tile,), target, scatter.scratch.kept.at[context.warpgroup], in_tile, context.first_row)
    # Not read-only: the bytes must be in global memory, from where the producer sends them.
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)
    plgpu.barrier_arrive(scatter.scratch.stored)


def add(scatter: ScatterContext, tile: jax.Array, work: Work, index: Scalar) -> None:
    """Adds what the others have computed of a tile, and stores the sum."""
    context, first_row = scatter.matmul, work.row + scatter.matmul.first_row
    others, number = scatter.ring.devices - 1, scatter.tile(index)
    # Not decremented: every consumer of this CTA waits for the same signals.
    lax.fori_loop(
        0, others, lambda slot, _: pl.semaphore_wait(scatter.semaphore(slot, index), 1, decrement=False), None
    )
    # What is loaded was written by TMA.
    fence_copies()
    # In blocks, so that few registers hold what is loaded.
    height, width = tile.shape
    blocks: list[jax.Array] = []
    for begin in range(0, width, COLUMNS):
        place = pl.ds(context.first_row, height), pl.ds(begin, COLUMNS)

        def plus(slot: Scalar, block: jax.Array, place: Any = place) -> jax.Array:
            return block + load_columns(scatter.arrays.received.at[slot, number, *place])

        # In the order of the slots, whichever device was done first: the sum repeats bit for bit.
        block = lax.fori_loop(0, others, plus, tile[:, begin : begin + COLUMNS])
        # Rounded only here, when all devices' float32 sums are in.
        blocks.append(block.astype(context.plan.out_dtype))
    # Received tiles are whole, also beyond the last row or column: only the store leaves that out.
    columns_of: Columns = tuple(blocks)
    target = scatter.arrays.out.at[work.matrix]
    store_tile(columns_of, target, context.scratch.store.at[context.warpgroup], work, first_row)


def load_columns(source: Ref) -> jax.Array:
    """Loads a tile from global memory in the accumulator's layout."""
    # Four lanes load 32 bytes of a row, a whole sector.
    values: jax.Array = plgpu.load(source, layout=plgpu.Layout.WGMMA, optimized=False)
    return values


def run_scattering_producer(scatter: ScatterContext) -> None:
    """Loads the tiles of all items of this CTA, and sends each tile of others while the next item is computed."""
    context, steps, devices = scatter.matmul, scatter.schedule.steps, scatter.ring.devices
    plgpu.set_max_registers(PUSH_REGISTERS.producer, action="decrease")

    def produce(index: Scalar, sends: bool) -> None:
        """Loads an item, and sends the one before it if another device wants it."""
        # All items have the same number of steps, so no carry is needed to find a ring's step.
        work, first = scatter.work(index), index * steps
        if not sends:
            produce_item(context, work, first, 0)
            return
        outgoing = tile_sender(scatter, index - 1)
        pace = sending_pace(pieces_of_tile(context.plan).count, steps - FIRST_STEP)

        def also(step: Scalar) -> None:
            since = step - first - FIRST_STEP
            pl.when(since == 0)(lambda: begin(scatter, outgoing))
            pl.when(since > 0)(lambda: outgoing.at_step(since - 1, pace))

        # The consumers store the next tile after the last step, so the producer has waited for this one before that.
        meanwhile = steps > FIRST_STEP + 1
        if not meanwhile:
            begin(scatter, outgoing)
        produce_item(context, work, first, 0, also if meanwhile else None)
        # What a short item has no steps for. All buffers must be free again when the next tile begins.
        outgoing.finish(steps - FIRST_STEP - 1 if meanwhile else 0, pace)

    # The item behind those of others is the first of this device's own.
    first_own, end = scatter.begin(devices - 1), scatter.begin(devices)
    produce(jnp.int32(0), sends=False)
    lax.fori_loop(1, first_own + 1, lambda index, _: produce(index, sends=True), None)
    lax.fori_loop(first_own + 1, end, lambda index, _: produce(index, sends=False), None)
    if context.plan.params.cluster > 1:
        context.scratch.stages.drain(end * steps)


def begin(scatter: ScatterContext, outgoing: Outgoing) -> None:
    """Loads the first piece of a tile when the consumers have stored it."""
    # The wait for their stores orders these for the consumers; for the producer's loads the barrier and the fence do.
    plgpu.barrier_wait(scatter.scratch.stored)
    fence_copies()
    outgoing.begin()


def tile_sender(scatter: ScatterContext, index: Scalar) -> Outgoing:
    """The pieces of an item's tile for the device whose rows it has."""
    tile, part = scatter.tile(index), scatter.schedule.part(scatter.item(index))
    device = scatter.ring.before(scatter.ring.devices - 1 - part)
    pieces = pieces_of_tile(scatter.matmul.plan)
    return Outgoing(
        scatter.scratch.buffers,
        jnp.int32(pieces.count),
        lambda index: scatter.arrays.kept.at[part, tile, *pieces.place(index)],
        lambda index: plgpu.remote_ref(scatter.arrays.received, device).at[part, tile, *pieces.place(index)],
        lambda: pl.semaphore_signal(scatter.semaphore(part, index), device_id=device),
    )
