"""A matmul whose lhs is gathered over the devices of a mesh axis while it runs: each sends its rows to all others.

The producer of ``kernel.py`` also sends: every few steps a piece of this device's rows, by TMA through shared memory to
the memory of another device. A device multiplies its own rows first and then those of the devices behind it, which have
arrived by then::

    device i     own rows, sent to i-1 · signal     wait · rows of i+1, own ones sent to i-2 · signal     wait ...
    device i-1   own rows, sent to i-2 · signal     wait · rows of i ...

=============  ======================================================================================================
what           why it is safe
=============  ======================================================================================================
the start      XLA starts the kernels of all devices behind a barrier on their streams: no kernel still reads what
               was in the memory of the received rows, and the semaphores are zero.
the arrival    The copies of a sender are complete before it signals, and a producer waits for the signals of all.
the end        A device waits for all rows that are sent to it, so none is still written when its kernel ends. Its own
               rows are read only by itself.
progress       A producer has sent what the others wait for first before it waits. Senders are the first CTAs, which
               have an SM first: where another kernel has some SMs and waits for one of another device, these suffice.
=============  ======================================================================================================
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.launch import run_kernel
from tilewright.kernels.hopper.limits import PUSH_REGISTERS
from tilewright.kernels.hopper.matmul.dense import dense_plan
from tilewright.kernels.hopper.matmul.epilogue import AsSummed
from tilewright.kernels.hopper.matmul.heuristics import dense_candidates
from tilewright.kernels.hopper.matmul.kernel import (
    Factors,
    MatmulContext,
    Operands,
    Scratch,
    produce_item,
    run_consumer,
)
from tilewright.kernels.hopper.matmul.params import MatmulParams
from tilewright.kernels.hopper.matmul.plan import MatmulPlan, plan_reasons
from tilewright.kernels.hopper.matmul.schedule import GatheredSchedule
from tilewright.kernels.hopper.matmul.sending import (
    DeviceRing,
    Outgoing,
    PieceBuffers,
    Pieces,
    buffers_bytes,
    fence_copies,
)
from tilewright.kernels.hopper.schedule import Rounds
from tilewright.kernels.pallas_types import Ref, Scalar

BUFFERS = 3
"""Pieces for which a CTA has shared memory: one is loaded while another one is sent."""

SENDERS = 64
"""CTAs that send. The first ones have an SM as soon as anything runs; all would not, beside another kernel."""

MAX_PACE = 8
"""The most steps of a matmul from one piece to the next."""


class Received(NamedTuple):
    """Arrays that the kernel writes."""

    out: Any
    rows: Any


class GatheringScratch(NamedTuple):
    """Shared memory of a CTA: that of the matmul, and buffers of pieces to send."""

    matmul: Scratch
    buffers: PieceBuffers


def gathered_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    ring: DeviceRing,
    *,
    transpose_rhs: bool = False,
    out_dtype: DTypeLike,
    params: MatmulParams,
    num_sms: int,
) -> jax.Array:
    """``all_gather(lhs) · rhs`` of 16-bit operands inside of ``shard_map``, with float32 sums.

    Args:
      lhs: ``[batches, rows, k]``, this device's rows.
      rhs: ``[k, n]``, or ``[n, k]`` with ``transpose_rhs``.

    Returns:
      ``[batches, devices, rows, n]``.
    """
    batches, rows, k = lhs.shape
    n = rhs.shape[0 if transpose_rhs else 1]
    own_rows = lhs.reshape(batches * rows, k)
    plan = gathered_plan(lhs.dtype, own_rows.shape, rhs.shape, params, out_dtype, transpose_rhs)
    schedule = GatheredSchedule(
        ring.index().astype(jnp.int32)[None],
        ring.devices,
        batches,
        rows,
        n,
        -(-k // plan.lhs.block_k),
        plan.tile,
    )
    # The received rows are a result only because XLA allocates results: the op throws them away.
    results = Received(
        jax.ShapeDtypeStruct((batches * ring.devices * rows, n), out_dtype),
        jax.ShapeDtypeStruct((ring.devices - 1, *own_rows.shape), lhs.dtype),
    )
    # Persistent; the first CTAs send.
    programs = min(num_sms // params.cluster, schedule.items())
    # 4096 × 4096 × 14336 took 0.331 ms with 64 senders, 0.363 with 132 and 0.390 with 16, in an earlier form
    # (docs/notes/collective_matmul.md).
    senders = min(SENDERS, programs * params.cluster)
    pieces = Pieces.of(own_rows.shape, lhs.dtype)
    # Over the steps of the own rows: behind them come those that others send in this time.
    pace = sending_pace(pieces.count // senders + 1, schedule.items_of_part // programs * schedule.steps)

    def body(operands: Operands, results: Received, scratch: GatheringScratch) -> None:
        arrived: Any = pl.get_global(plgpu.SemaphoreType.REGULAR((ring.devices - 1,)))
        warpgroup = lax.axis_index("warpgroup")
        context = MatmulContext(
            plan, operands, (results.out,), scratch.matmul, warpgroup, lax.axis_index("program"), Rounds(programs),
            PUSH_REGISTERS,
        )  # fmt: skip
        # Rows are pushed by their owner, so that each crosses NVLink once: the L2 cache of a reader keeps no memory of
        # another device, and it would read them again for each tile of columns (docs/notes/collective_matmul.md).
        sender = RowsSender(context, ring, results.rows, arrived, scratch.buffers, pieces, senders)
        pl.when(warpgroup < params.consumers)(lambda: run_consumer(context))
        pl.when(warpgroup == params.consumers)(lambda: run_gathering_producer(context, sender, pace))

    scratch = GatheringScratch(
        Scratch(plan.stages, plan.store_tile.stack(params.consumers, plan.store_buffers), None, None),
        PieceBuffers.scratch(BUFFERS, pieces, lhs.dtype),
    )
    received: Received = run_kernel(
        body,
        Operands((Factors(own_rows, (rhs,)),), schedule, AsSummed(), None),
        results,
        scratch,
        role="gather_and_multiply",
        num_ctas=programs,
        warpgroups=params.consumers + 1,
        cluster=params.cluster,
    )
    return received.out.reshape(batches, ring.devices, rows, n)


def gathered_plan(
    dtype: DTypeLike,
    lhs_shape: tuple[int, ...],
    rhs_shape: tuple[int, ...],
    params: MatmulParams,
    out_dtype: DTypeLike,
    transpose_rhs: bool,
) -> MatmulPlan:
    """The plan of `gathered_matmul`."""
    plan = dense_plan(dtype, lhs_shape, rhs_shape, 1, params, out_dtype, False, transpose_rhs)
    return dataclasses.replace(plan, reserved=buffers_bytes(BUFFERS))


def sending_pace(pieces: int, steps: int) -> int:
    """Steps of the matmul from one piece to the next, so that all are sent in most of so many."""
    return max(1, min(MAX_PACE, 3 * steps // (4 * (pieces + 1))))


def gathered_params(
    lhs: jax.Array | jax.ShapeDtypeStruct,
    rhs: jax.Array | jax.ShapeDtypeStruct,
    devices: int,
    out_dtype: DTypeLike,
    transpose_rhs: bool,
    num_sms: int,
) -> MatmulParams:
    """The config for the rows of all devices: the best one of a matmul, with as many stages as a sender leaves."""
    k, n = lhs.shape[-1], rhs.shape[0 if transpose_rhs else 1]
    rows = math.prod(lhs.shape[:-1])
    shapes = lhs.dtype, (rows, k), rhs.shape
    return sending_params(
        dense_candidates(devices * rows, n, k, num_sms),
        lambda params: gathered_plan(*shapes, params, out_dtype, transpose_rhs),
    )


def sending_params(candidates: Iterable[MatmulParams], plan: Callable[[MatmulParams], MatmulPlan]) -> MatmulParams:
    """The best config that a kernel which sends can have, with as many stages as its plan has shared memory for."""
    # Some of the others leave too few registers to a producer that sends, and some have consumers with own items.
    best = next(each for each in candidates if each.consumers == 2 and not each.turns)
    with_stages = (dataclasses.replace(best, num_stages=number) for number in range(best.num_stages, 1, -1))
    return next(params for params in with_stages if not plan_reasons(functools.partial(plan, params)))


def run_gathering_producer(context: MatmulContext, sender: "RowsSender", pace: int) -> None:
    """Loads the tiles of all items of this CTA, part by part, and sends this device's rows meanwhile."""
    schedule, arrived = cast(GatheredSchedule, context.schedule), sender.arrived
    # The producer sends, not a warpgroup of its own: four warpgroups begin with 128 registers a thread, for which ptxas
    # does not compile a wgmma of 64 × 256 (docs/notes/collective_matmul.md).
    plgpu.set_max_registers(PUSH_REGISTERS.producer, action="decrease")
    # Received rows are stacked by the device that they come from.
    stacked = dataclasses.replace(context.plan, lhs=dataclasses.replace(context.plan.lhs, stacked=True))
    ((_, rhs),) = context.operands.products
    of_others = dataclasses.replace(
        context, plan=stacked, operands=context.operands._replace(products=(Factors(sender.rows, rhs),))
    )

    def run_part(part: Scalar, *, received: bool, sends: bool) -> None:
        from_part = of_others if received else context
        # Parts end anywhere in the list of a CTA's items, as those are dealt out one by one over all CTAs.
        begin, end = (items_before(context, number * schedule.items_of_part) for number in (part, part + 1))
        outgoing = sender.to_device(part)
        if sends:
            outgoing.begin()
        if received:
            # All devices have sent their previous group before they wait here, so that none waits for one that waits.
            pl.semaphore_wait(arrived.at[part - 1], sender.senders, decrement=False)
            fence_copies()

        # Only now may TMA load these rows: behind the signals of all senders, and behind the fence, as the loads go
        # through another proxy than the semaphore.
        def one(index: Scalar, _: None) -> None:
            work = schedule.work(context.program + index * context.programs, context.cta)._replace(matrix=part - 1)
            # All items have the same number of steps, so the item's index gives the ring's step.
            first, begun = index * schedule.steps, begin * schedule.steps
            send = (lambda step: outgoing.at_step(step - begun, pace)) if sends else None
            produce_item(from_part, work, first, 0, send)

        lax.fori_loop(begin, end, one, None)
        if sends:
            # A CTA without an item of this part, or with few, sends the rest at once: others wait for it.
            outgoing.finish((end - begin) * schedule.steps, pace)

    run_part(jnp.int32(0), received=False, sends=schedule.devices > 1)
    others = functools.partial(run_part, received=True, sends=schedule.devices > 2)
    lax.fori_loop(1, schedule.devices, lambda part, _: others(part), None)
    if context.plan.params.cluster > 1:
        context.scratch.stages.drain(items_before(context, schedule.items()) * schedule.steps)


def items_before(context: MatmulContext, item: Scalar) -> Scalar:
    """The number of items of this CTA before one of all."""
    return lax.div(jnp.asarray(item, jnp.int32) + (context.programs - 1) - context.program, jnp.int32(context.programs))


@dataclasses.dataclass(frozen=True, slots=True)
class RowsSender:
    """The part of a CTA that sends to others every ``senders``-th piece of its device's rows.

    Attributes:
      rows: those that are received.
      arrived: semaphores, one for each part.
      senders: CTAs that send; the others do not.
    """

    context: MatmulContext
    ring: DeviceRing
    rows: Ref
    arrived: Ref
    buffers: PieceBuffers
    pieces: Pieces
    senders: int

    def to_device(self, slot: Scalar) -> Outgoing:
        """The pieces for the device for which this one's rows are number ``slot`` of the received ones; or none."""
        context, device = self.context, self.ring.before(slot + 1)
        ((own, _),) = context.operands.products
        # By CTA, not by cluster: each has a producer of its own.
        number = context.program * context.plan.params.cluster + context.cta

        def place(index: Scalar) -> tuple[Any, Any]:
            return self.pieces.place(number + index * self.senders)

        # Pieces number, number + senders, ... of all.
        mine = lax.div(jnp.int32(self.pieces.count - 1 + self.senders) - number, jnp.int32(self.senders))
        return Outgoing(
            self.buffers,
            jnp.where((number < self.senders) & (slot + 1 < self.ring.devices), mine, -1),
            lambda index: own.at[place(index)],
            lambda index: plgpu.remote_ref(self.rows, device).at[slot, *place(index)],
            lambda: pl.semaphore_signal(self.arrived.at[slot], device_id=device),
        )
