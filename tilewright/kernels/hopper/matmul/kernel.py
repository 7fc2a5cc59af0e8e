"""The matmul kernel: a persistent, warp-specialised pipeline of a producer and its consumer warpgroups."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.launch import run_kernel
from tilewright.kernels.hopper.limits import NARROW_REGISTERS, REGISTERS, RegisterSplit
from tilewright.kernels.hopper.matmul.epilogue import Columns, Epilogue, Place
from tilewright.kernels.hopper.matmul.mask import mask_step
from tilewright.kernels.hopper.matmul.operands import OperandLayout
from tilewright.kernels.hopper.matmul.plan import MatmulPlan
from tilewright.kernels.hopper.matmul.scaled import Scales, accumulate_scaled
from tilewright.kernels.hopper.matmul.schedule import RaggedReductionSchedule, Schedule, Work
from tilewright.kernels.hopper.matmul.store import store_tile
from tilewright.kernels.hopper.panels import PanelRef, mma
from tilewright.kernels.hopper.ring import CLUSTER_AXIS, Ring, RingPart, when
from tilewright.kernels.hopper.rows import RowsOfTile, sources_of_tile
from tilewright.kernels.hopper.schedule import Rounds
from tilewright.kernels.hopper.tiles import store_unoptimised
from tilewright.kernels.hopper.turns import TurnsPlan
from tilewright.kernels.pallas_types import Ref, Scalar


class Factors(NamedTuple):
    """An lhs, and the operands of rhs, each of which has an accumulator.

    An operand is an array or, where its layout says so, `IndexedRows`.
    """

    lhs: Any
    rhs: tuple[Any, ...]


class Operands(NamedTuple):
    """Arrays that a kernel reads: its products, which are summed, and those of its parts.

    Attributes:
      scales: of 8-bit operands.
    """

    products: tuple[Factors, ...]
    schedule: Any
    epilogue: Any
    scales: Scales | None


class Scratch(NamedTuple):
    """Shared memory of a CTA.

    Attributes:
      store: parts of the result, ``[consumers, buffers, 64, columns]``.
      masked: of each stage, when the first consumer has zeroed what is behind the range of K in it; None where that
        has no end of its own, or a single consumer reads the stage.
      turns: of each consumer, when it may issue MMAs, of an item or of a part of a scaled step; None where they do not
        take turns.
    """

    stages: Any
    store: Any
    masked: Any
    turns: Any


@dataclasses.dataclass(frozen=True, slots=True)
class MatmulContext:
    """A CTA's references, and where it is."""

    plan: MatmulPlan
    operands: Operands
    results: tuple[Ref, ...]
    scratch: Scratch
    warpgroup: Scalar
    program: Scalar
    rounds: Rounds
    split: RegisterSplit | None = None

    @property
    def programs(self) -> int:
        """The number of clusters that run at a time."""
        return self.rounds.programs

    @property
    def registers(self) -> RegisterSplit | None:
        """Registers of a thread by its role, or None: all have as many."""
        by_consumers = {2: NARROW_REGISTERS} if self.plan.gathers else REGISTERS
        return self.split or by_consumers.get(self.plan.params.consumers)

    @property
    def schedule(self) -> Schedule:
        """The kernel's schedule, over its references."""
        schedule: Schedule = self.operands.schedule
        return schedule

    @property
    def share(self) -> Scalar:
        """This consumer's number among those that share the rows of a tile."""
        return 0 if self.plan.params.turns else self.warpgroup

    @property
    def first_row(self) -> Scalar:
        """This consumer's first row in a tile."""
        return self.share * self.plan.params.consumer_rows

    @property
    def cta(self) -> Scalar:
        """The CTA's index in its cluster."""
        return lax.axis_index(CLUSTER_AXIS) if self.plan.params.cluster > 1 else 0


def matmul_kernel(
    products: Sequence[Factors],
    results: Sequence[jax.ShapeDtypeStruct],
    *,
    plan: MatmulPlan,
    schedule: Any,
    epilogue: Epilogue,
    num_sms: int,
    scales: Scales | None = None,
) -> list[jax.Array]:
    """Multiplies lhs with every operand of rhs, sums over the products, and stores what the epilogue makes of it.

    Args:
      products: of one shape; the steps of an item are shared out among them.
      results: ``[m, n]`` of ``plan.out_dtype`` or, where the items have matrices that are summed over ranges of K,
        ``[matrices, m, n]``; ``[tiles of columns, m]`` of any dtype, padded to whole tiles of rows, for vectors.
      schedule: of ``schedule.py``, with arrays as its leaves.
      scales: of operands of 8 bits.
    """
    params = plan.params
    consumers, cluster = params.consumers, params.cluster
    # Persistent, a cluster for as many SMs as it has CTAs: any two SMs of a GPC make one, so none is left over.
    items, rounds = schedule.items(), Rounds(num_sms // cluster)
    if masks := isinstance(schedule, RaggedReductionSchedule):
        rounds = Rounds.in_waves(schedule.items(), rounds.programs)
    elif isinstance(items, int):
        rounds = Rounds(min(rounds.programs, items))

    def body(operands: Operands, results: tuple[Ref, ...], scratch: Scratch) -> None:
        warpgroup = lax.axis_index("warpgroup")
        context = MatmulContext(plan, operands, results, scratch, warpgroup, lax.axis_index("program"), rounds)
        # Consumers come first, so that a consumer's index is its warpgroup's. Every role changes its registers by
        # setmaxnreg: the increase of a consumer blocks until the producer has given up its own.
        pl.when(warpgroup < consumers)(lambda: run_consumer(context))
        pl.when(warpgroup == consumers)(lambda: run_producer(context))

    scratch = Scratch(
        plan.stages,
        plan.store_tile.stack(consumers, plan.store_buffers),
        # One arrival: each phase is completed by the single warpgroup that has zeroed the rhs of a stage.
        plgpu.Barrier(num_arrivals=1, num_barriers=params.num_stages) if masks and params.sharers > 1 else None,
        TurnsPlan(consumers) if params.turns or scales is not None else None,
    )
    out: tuple[jax.Array, ...] = run_kernel(
        body,
        Operands(tuple(products), schedule, epilogue, scales),
        tuple(results),
        scratch,
        role="products",
        num_ctas=rounds.grid(items) if isinstance(items, int) else rounds.programs,
        warpgroups=consumers + 1,
        cluster=cluster,
    )
    return list(out)


def for_each_item(context: MatmulContext, role: Callable[[Work, Scalar, Scalar], None]) -> tuple[Scalar, Scalar]:
    """Calls ``role(work, first, owner)`` for each item of this CTA; returns the numbers of steps and of items.

    Step 0 of the item is step ``first`` of the ring. Owner is the consumer that has the item, where they take turns.
    The next item is decoded before the role of one begins, so that the latency of tables is hidden.
    """
    schedule, owners = context.schedule, jnp.int32(context.plan.params.owners)
    items = jnp.asarray(schedule.items(), jnp.int32)
    begin, count = context.rounds.of(context.program, items)

    def decode(index: Scalar) -> Work:
        # The one behind the last is decoded, too, and not used.
        item = jnp.minimum(begin + index * context.programs, items - 1)
        return schedule.work(item, context.cta)

    def one(index: Scalar, carry: tuple[Scalar, Work]) -> tuple[Scalar, Work]:
        first, work = carry
        following = decode(index + 1)
        role(work, first, lax.rem(index, owners) if context.plan.params.turns else 0)
        return first + work.steps, following

    # Steps are summed, not multiplied: with ranges of K of their own items have different numbers of them, and slot and
    # parity of every ring follow from this sum. All roles compute it alike, each for itself.
    steps, _ = lax.fori_loop(0, count, one, (jnp.int32(0), decode(0)))
    return steps, count


def run_producer(context: MatmulContext) -> None:
    """Loads the tiles of all items of this CTA, and gives the first turn to consumer 0."""
    params, stages, registers = context.plan.params, context.scratch.stages, context.registers
    if registers is not None:
        plgpu.set_max_registers(registers.producer, action="decrease")
    if context.scratch.turns is not None:
        context.scratch.turns.begin()
    steps, _ = for_each_item(context, functools.partial(produce_item, context))
    # Without a cluster all loads of a CTA have been waited for when its consumers are done.
    if params.cluster > 1:
        stages.drain(steps)


class Load(NamedTuple):
    """An operand as the producer loads it, from element ``start`` of the dimension that is not K."""

    layout: OperandLayout
    ref: Any
    start: Scalar
    part: RingPart

    def rows(self, work: Work, k: Scalar) -> jax.Array | None:
        """The sources of the rows of the tiles at ``k``; None without an index."""
        if not self.layout.indexed:
            return None
        first, end = (k, work.k_end) if self.layout.k_first else (self.start, work.row_end)
        assert end is not None  # the rows are in groups
        return sources_of_tile(self.ref.index, first, end, self.part.tile.shape[0])

    def sources(self, work: Work, k: Scalar, rows: jax.Array | None) -> Sequence[Any]:
        """The slices or rows that fill the tiles of the step at ``k``, in the order of the copies."""
        if rows is None:
            return self.layout.slices(self.ref, work.matrix, self.start, k, self.part)
        return [RowsOfTile(self.ref.array, rows, self.start if self.layout.k_first else k)]


def produce_item(
    context: MatmulContext, work: Work, first: Scalar, owner: Scalar, also: Callable[[Scalar], None] | None = None
) -> None:
    """Loads the tiles of an item, whose step 0 is step ``first`` of the ring.

    Args:
      also: what a producer does after the loads of each step, by its number in the ring.
    """
    plan, stages, products = context.plan, context.scratch.stages, context.operands.products
    # Each product has the same K, so an item's steps are a multiple of their number.
    steps = lax.div(work.steps, jnp.int32(len(products)))
    first_column = work.column if work.rhs_column is None else work.rhs_column
    first_row = work.row if work.lhs_row is None else work.lhs_row
    starts = (first_row, *[first_column] * len(plan.rhs))

    def load(operands: Sequence[Load], first: Scalar, step: Scalar, rows: Sequence[Any]) -> list[Any]:
        k = work.k + step * plan.lhs.block_k
        # Rows along K are others in each step. Those of the next one, so that the wait for the slot hides the latency
        # of their index.
        every = list(zip(operands, rows, strict=True))
        following = [each.rows(work, k + plan.lhs.block_k) if each.layout.k_first else own for each, own in every]
        sources = [source for each, own in every for source in each.sources(work, k, own)]
        # One wait for the slot, then all operands of the step: they are released together, too.
        stages.load_from_dram(first + step, *sources, owner=owner)
        if also is not None:
            also(first + step)
        return following

    # The consumers do not know of several products: for them an item has that many more steps.
    for number, (lhs, rhs) in enumerate(products):
        every = zip((plan.lhs, *plan.rhs), (lhs, *rhs), starts, plan.stages.parts, strict=True)
        operands = [Load(*each) for each in every]
        body = functools.partial(load, operands, first + number * steps)
        # Rows of a tile are found once for an item: they stay in registers over its steps.
        lax.fori_loop(0, steps, body, [each.rows(work, work.k) for each in operands])


def run_consumer(context: MatmulContext) -> None:
    """Computes this warpgroup's rows of all items of this CTA, or the items that it owns."""
    params, registers = context.plan.params, context.registers

    def role(work: Work, first: Scalar, owner: Scalar) -> None:
        mine = owner == context.warpgroup if params.turns else True
        # A consumer goes through all items, also those of others: their steps count for the slots of its own.
        when(mine, lambda: consume_item(context, work, first))

    if registers is not None:
        plgpu.set_max_registers(registers.consumer, action="increase")
    _, items = for_each_item(context, role)
    if context.scratch.turns is not None:
        # With items of their own the consumer that would have the next item has the turn; else all end a round.
        owner = lax.rem(jnp.asarray(items, jnp.int32), jnp.int32(params.consumers)) if params.turns else 0
        context.scratch.turns.take_last(context.warpgroup == owner, context.warpgroup)
    # TMA must have read the buffers before the CTA exits and its shared memory goes to the next one.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def consume_item(context: MatmulContext, work: Work, first: Scalar) -> None:
    """Computes and stores this warpgroup's rows of an item, whose step 0 is step ``first`` of the ring."""
    plan, first_row = context.plan, work.row + context.first_row
    rows = plan.params.consumer_rows
    # Also of a last tile of a group that has no rows for this consumer: leaving its MMAs out, which halves the time of
    # the tile, was 60 % slower at 64 groups, because the CTAs of a group drift apart, and what the first ones read has
    # left the L2 cache when the last ones want it (docs/notes/hopper_matmul.md).
    sums: list[Columns]
    if context.operands.scales is None:
        accumulator = plgpu.ACC((rows, plan.columns), jnp.float32)
        whole = pl.run_scoped(functools.partial(accumulate, context, work, first), *[accumulator] * len(plan.rhs))
        sums = [(each,) for each in whole]
    else:
        sums = [tuple(accumulate_scaled(context, work, first, context.operands.scales))]
    buffers = context.scratch.store.at[context.warpgroup]
    place = Place(first_row, work.column, lax.div(work.column, jnp.int32(plan.columns)))
    for tile, result in zip(context.operands.epilogue(sums, place), context.results, strict=True):
        if not isinstance(tile, tuple):
            # Threads store one value for each row. Such results are padded to whole tiles of rows, so nothing is
            # clipped.
            store_unoptimised(result.at[place.tile, pl.ds(first_row, rows)], tile)
            continue
        target = result if len(result.shape) == 2 else result.at[work.matrix]
        store_tile(tile, target, buffers, work, first_row)


def accumulate(context: MatmulContext, work: Work, first: Scalar, *accumulators: Ref) -> list[jax.Array]:
    """Sums the products of all K steps of an item; one step's MMAs are in flight while the next one's are issued.

    The turn is passed on before the last step, so that MMAs are in flight while that is masked and the turn changes.
    """
    plan, stages = context.plan, context.scratch.stages
    turns = context.scratch.turns if plan.params.turns else None
    owner = 0 if turns is None else context.warpgroup

    def one(index: Scalar, _: None) -> None:
        step = first + index
        if turns is not None:
            # Behind the last step instead it was within 1.5 % either way (docs/notes/hopper_matmul.md): 0.902 ms for
            # 0.915 at 64 groups, 1.255 for 1.241 at 8.
            pl.when(index == work.steps - 1)(lambda: turns.pass_on(context.warpgroup))
        stages.load_from_shared(step, owner)
        if plan.gathers:
            # wgmma reads through the async proxy what threads have copied, and which they complete without a fence.
            plgpu.commit_smem()
        if work.k_end is not None:
            mask_step(context, step, work.k_end - (work.k + index * plan.lhs.block_k))
        issue(context, stages, step, accumulators)
        # A group for each accumulator, and groups complete in order: all MMAs but those of this step are complete, so
        # the stage of the step before is free.
        plgpu.wgmma_wait(len(accumulators))
        pl.when(index > 0)(lambda: stages.release(step - 1))

    if turns is not None:
        turns.wait(context.warpgroup)
        # No last step would pass the turn on, and the other consumer would wait for ever.
        pl.when(work.steps == 0)(lambda: turns.pass_on(context.warpgroup))
    lax.fori_loop(0, work.steps, one, None)
    # The loads wait for the last MMAs. An item without steps has zeros and no stage.
    sums = [accumulator[...] for accumulator in accumulators]
    # The loop releases each stage one step late, and so leaves the last one.
    when(work.steps > 0, lambda: stages.release(first + work.steps - 1))
    return sums


def issue(context: MatmulContext, stages: Ring, step: Scalar, accumulators: Sequence[Ref]) -> None:
    """Issues the MMAs of a K step, one for each operand of rhs."""
    plan = context.plan
    lhs = plan.lhs.lhs_tile(stages, step, context.share, plan.params.consumer_rows)
    for number, (accumulator, layout) in enumerate(zip(accumulators, plan.rhs, strict=True)):
        rhs = layout.rhs_tile(stages, step, number + 1)
        # A single panel is a tile that is not panelled, too.
        left = lhs.operands[0] if isinstance(lhs, PanelRef) and not isinstance(rhs, PanelRef) else lhs
        mma(accumulator, left, rhs, transpose_a=plan.lhs.k_first)
