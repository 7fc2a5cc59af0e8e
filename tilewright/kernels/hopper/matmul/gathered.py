"""A matmul whose lhs is gathered over the devices of a mesh axis while it runs: each sends its rows to all others.

The producer of ``kernel.py`` also sends: every few steps a piece of this device's rows, by TMA through shared memory to
the memory of another device. A device multiplies its own rows first and then those of the devices behind it, which have
arrived by then::

    device i     own rows, sent to i-1 · signal     wait · rows of i+1, own ones sent to i-2 · signal     wait ...
    device i-1   own rows, sent to i-2 · signal     wait · rows of i ...

=============  ======================================================================================================
what           why it is safe
=============  ======================================================================================================
the start      XLA starts the kernels of all devices behind a barrier on their streams: nobody reads any longer what
               was in the memory of the received rows, and the semaphores are zero.
the arrival    The copies of a sender are complete before it signals, and a producer waits for the signals of all.
the end        A device waits for all rows that are sent to it, so none is still written when its kernel ends. Its own
               rows are read by itself alone.
progress       A producer has sent what the others wait for first before it waits. Senders are the first CTAs, which
               have an SM first: where another kernel has some SMs and waits for one of another device, these suffice.
=============  ======================================================================================================
"""

import dataclasses
import importlib
import math
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
from tilewright.kernels.hopper.types import Ref, Scalar

PIECE = (16, 256)
"""Rows and columns of a copy to another device."""

BUFFERS = 3
"""Copies for which a sender has shared memory: one is loaded while another one is sent."""

SENDERS = 64
"""CTAs that send. The first ones have an SM as soon as anything runs; all would not, beside another kernel."""


MAX_DEVICES = 8
"""Devices of a mesh: each is a part of the producer's code, and all have links to each other."""

MAX_PACE = 8
"""The most steps of a matmul from one piece to the next."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ring:
    """The devices along a mesh axis.

    Attributes:
      axis: the mesh axis.
      axes: all axes of the mesh, in its order.
    """

    axis: str
    devices: int
    axes: tuple[str, ...]

    def index(self) -> jax.Array:
        """The number of this device."""
        return lax.axis_index(self.axis)

    def before(self, places: int) -> Any:
        """The device so many places before this one, as coordinates in the mesh.

        TMA descriptors of its memory are made on the host, which computes this again: by arithmetic alone.
        """
        other = lax.rem(self.index() + (self.devices - places), jnp.int32(self.devices))
        return tuple(other if name == self.axis else lax.axis_index(name) for name in self.axes)


class Received(NamedTuple):
    """Arrays that the kernel writes."""

    out: Any
    rows: Any


class Sending(NamedTuple):
    """Shared memory of a CTA: that of the matmul, and buffers of pieces to send."""

    matmul: Scratch
    pieces: Any
    loaded: Any


def gathered_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    ring: Ring,
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
    results = Received(
        jax.ShapeDtypeStruct((batches * ring.devices * rows, n), out_dtype),
        jax.ShapeDtypeStruct((ring.devices - 1, *own_rows.shape), lhs.dtype),
    )
    programs = min(num_sms // params.cluster, schedule.items())
    senders = min(SENDERS, programs * params.cluster)
    pace = sending_pace(own_rows.shape, senders, schedule.items_of_part // programs * schedule.steps)

    def body(operands: Operands, results: Received, scratch: Sending) -> None:
        arrived: Any = pl.get_global(plgpu.SemaphoreType.REGULAR((ring.devices - 1,)))
        warpgroup = lax.axis_index("warpgroup")
        context = MatmulContext(
            plan, operands, (results.out,), scratch.matmul, warpgroup, lax.axis_index("program"), programs,
            PUSH_REGISTERS,
        )  # fmt: skip
        number = context.program * params.cluster + context.cta
        ((own, _),) = operands.products
        sender = Sender(own, results.rows, arrived, scratch.pieces, scratch.loaded, number, senders, pace)
        pl.when(warpgroup < params.consumers)(lambda: run_consumer(context))
        pl.when(warpgroup == params.consumers)(
            lambda: run_gathering_producer(context, ring, results.rows, arrived, sender)
        )

    scratch = Sending(
        Scratch(plan.stages, plan.store_tile.stack(params.consumers, plan.store_buffers), None, None),
        plgpu.SMEM((BUFFERS, *PIECE), lhs.dtype),
        plgpu.Barrier(num_arrivals=1, num_barriers=BUFFERS),
    )
    received: Received = run_kernel(
        body,
        Operands((Factors(own_rows, (rhs,)),), schedule, AsSummed(), None),
        results,
        scratch,
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
    return dataclasses.replace(plan, reserved=sender_bytes(dtype))


def sender_bytes(dtype: DTypeLike) -> int:
    """Shared memory of a sender, with its barriers."""
    return BUFFERS * (PIECE[0] * PIECE[1] * jnp.dtype(dtype).itemsize + 1024)


def sending_pace(shape: tuple[int, ...], senders: int, steps: int) -> int:
    """Steps of the matmul from one piece to the next, so that all are sent in most of a part's steps of a CTA."""
    pieces = -(-shape[0] // PIECE[0]) * -(-shape[1] // PIECE[1])
    return max(1, min(MAX_PACE, 3 * steps // (4 * (-(-pieces // senders) + 1))))


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
    # Of the others some leave too few registers to a producer that sends, and some have consumers with own items.
    candidates = dense_candidates(devices * rows, n, k, num_sms)
    best = next(each for each in candidates if each.consumers == 2 and not each.turns)
    shapes = lhs.dtype, (rows, k), rhs.shape

    def fits(params: MatmulParams) -> bool:
        return not plan_reasons(lambda: gathered_plan(*shapes, params, out_dtype, transpose_rhs))

    return next(
        filter(fits, (dataclasses.replace(best, num_stages=number) for number in range(best.num_stages, 1, -1)))
    )


def run_gathering_producer(context: MatmulContext, ring: Ring, rows: Ref, arrived: Ref, sender: "Sender") -> None:
    """Loads the tiles of all items of this CTA, part by part, and sends this device's rows meanwhile."""
    params, stages, schedule = context.plan.params, context.scratch.stages, cast(GatheredSchedule, context.schedule)
    plgpu.set_max_registers(PUSH_REGISTERS.producer, action="decrease")
    stacked = dataclasses.replace(context.plan, lhs=dataclasses.replace(context.plan.lhs, stacked=True))
    ((_, rhs),) = context.operands.products
    of_others = dataclasses.replace(
        context, plan=stacked, operands=context.operands._replace(products=(Factors(rows, rhs),))
    )
    for part in range(ring.devices):
        begin, end = (items_before(context, number * schedule.items_of_part) for number in (part, part + 1))
        first_step = begin * schedule.steps
        group = None
        if part + 1 < ring.devices:
            group = sender.to(ring.before(part + 1), part)
            group.begin()
        if part > 0:
            pl.semaphore_wait(arrived.at[part - 1], sender.senders, decrement=False)
            fence_loads()

        def one(index: Scalar, _: None, part: int = part, group: Any = group, first_step: Scalar = first_step) -> None:
            work = schedule.work(context.program + index * context.programs, context.cta)
            where = of_others if part else context
            work = work._replace(matrix=part - 1) if part else work
            first = index * schedule.steps
            produce_item(where, work, first, 0, None if group is None else lambda step: group.pace(step - first_step))

        lax.fori_loop(begin, end, one, None)
        if group is not None:
            group.finish((end - begin) * schedule.steps)
    if params.cluster > 1:
        stages.drain(items_before(context, schedule.items()) * schedule.steps)


def items_before(context: MatmulContext, item: int) -> Scalar:
    """The number of items of this CTA before one of all."""
    return lax.div(jnp.int32(item + context.programs - 1) - context.program, jnp.int32(context.programs))


def fence_loads() -> None:
    """Orders the TMA loads that follow after what this thread has waited for in global memory."""

    @plgpu.inline_mgpu()
    def fence(_: Any) -> None:
        utils = importlib.import_module("jax.experimental.mosaic.gpu.utils")
        utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)

    fence()


@dataclasses.dataclass(frozen=True, slots=True)
class Sender:
    """The part of a CTA that sends to others every ``senders``-th piece of its device's rows.

    Attributes:
      own, rows: this device's rows, and those that are received.
      arrived: semaphores, one for each part.
      pieces, loaded: buffers in shared memory and their barriers.
      number: of the CTA; those from ``senders`` on send nothing.
      pace: steps of the matmul from one piece to the next.
    """

    own: Ref
    rows: Ref
    arrived: Ref
    pieces: Ref
    loaded: Ref
    number: Scalar
    senders: int
    pace: int

    def to(self, device: Any, slot: int) -> "SentGroup":
        """The pieces for one device, for which this one's rows are number ``slot``."""
        return SentGroup(self, device, slot)

    @property
    def across(self) -> int:
        """Pieces beside each other."""
        return -(-self.own.shape[1] // PIECE[1])

    @property
    def count(self) -> Scalar:
        """Pieces of this CTA."""
        pieces = -(-self.own.shape[0] // PIECE[0]) * self.across
        mine = lax.div(jnp.int32(pieces - 1 + self.senders) - self.number, jnp.int32(self.senders))
        return jnp.where(self.number < self.senders, mine, -1)

    def place(self, index: Scalar) -> tuple[Any, Any]:
        """Rows and columns of a piece of this CTA."""
        piece = jnp.asarray(self.number + index * self.senders, jnp.int32)
        row, column = lax.div(piece, jnp.int32(self.across)), lax.rem(piece, jnp.int32(self.across))
        return pl.ds(row * PIECE[0], PIECE[0]), pl.ds(column * PIECE[1], PIECE[1])

    def load(self, index: Scalar) -> None:
        """Starts the load of a piece into its buffer."""
        buffer = lax.rem(jnp.asarray(index, jnp.int32), jnp.int32(BUFFERS))
        plgpu.copy_gmem_to_smem(self.own.at[self.place(index)], self.pieces.at[buffer], self.loaded.at[buffer])


@dataclasses.dataclass(frozen=True, slots=True)
class SentGroup:
    """The pieces for one device, as events: number i sends piece i, and the one behind the last signals."""

    sender: Sender
    device: Any
    slot: int

    def begin(self) -> None:
        """Loads the first piece."""
        pl.when(self.sender.count > 0)(lambda: self.sender.load(0))

    def event(self, index: Scalar) -> None:
        """Sends a piece and loads the next one; or signals that all are there."""
        sender, count = self.sender, self.sender.count

        @pl.when(index < count)
        def _() -> None:
            buffer = lax.rem(index, jnp.int32(BUFFERS))
            plgpu.barrier_wait(sender.loaded.at[buffer])
            target = plgpu.remote_ref(sender.rows, self.device).at[self.slot, *sender.place(index)]
            plgpu.copy_smem_to_gmem(sender.pieces.at[buffer], target)

            @pl.when(index + 1 < count)
            def _() -> None:
                # The next piece's buffer has been read but for the latest stores from others.
                plgpu.wait_smem_to_gmem(BUFFERS - 1, wait_read_only=True)
                sender.load(index + 1)

        @pl.when(index == count)
        def _() -> None:
            # The copies are complete, not only what they read.
            plgpu.wait_smem_to_gmem(0, wait_read_only=False)
            pl.semaphore_signal(sender.arrived.at[self.slot], device_id=self.device)

    def pace(self, step: Scalar) -> None:
        """Runs the event of a step of the matmul."""
        pace = jnp.int32(self.sender.pace)
        pl.when(lax.rem(step, pace) == 0)(lambda: self.event(lax.div(step, pace)))

    def finish(self, steps: Scalar) -> None:
        """Runs the events that ``steps`` steps have left."""
        pace = jnp.int32(self.sender.pace)
        lax.fori_loop(lax.div(steps + pace - 1, pace), self.sender.count + 1, lambda index, _: self.event(index), None)
