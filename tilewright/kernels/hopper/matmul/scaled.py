"""Sums of products of 8 bits, with scales of blocks of K.

wgmma adds products of 8 bits with fewer bits than float32 has. So the MMAs of a step, over 128 elements of K, have an
accumulator of their own, a part, which is scaled and added to the sum of all steps in float32 registers: one FFMA for
each element.

A consumer's MMAs wait for its additions, as there are no registers for a second part. So the consumers take turns to
issue the MMAs of a part, and the additions of each run beside the MMAs of the others::

    consumer 0      MMA 0 | add 0       | MMA 1 | add 1       | ...
    consumer 1              MMA 0 | add 0       | MMA 1 | add 1

A single consumer waits for a turn, too: ptxas moves additions behind the MMAs of the next part where no branch is
between them, and spills registers for both.

Both operands have scales, if only ones: without those of rows or columns ptxas spilled registers, and the kernel took
twice the time.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.matmul.schedule import Work
from tilewright.kernels.hopper.panels import mma
from tilewright.kernels.hopper.tiles import row_layout, spread
from tilewright.kernels.pallas_types import Ref, Scalar

SCALE_BLOCK = 128
"""Elements of K, and of n, that share a scale; an accumulator has as many columns."""


class Scales(NamedTuple):
    """The scales of both operands, float32.

    Attributes:
      lhs: ``[k blocks, m]``, padded by a tile of rows.
      rhs: ``[matrices, n blocks, k blocks]``.
    """

    lhs: Any
    rhs: Any


def accumulate_scaled(context: Any, work: Work, first: Scalar, scales: Scales) -> list[jax.Array]:
    """Sums the scaled products of all K steps of an item, in as many accumulators as its columns have blocks."""
    plan, stages = context.plan, context.scratch.stages
    rows, blocks = plan.params.consumer_rows, plan.columns // SCALE_BLOCK
    first_row = work.row + context.first_row

    # A block behind the last column is not stored: any scale will do.
    last = scales.rhs.shape[1] - 1
    columns = [jnp.minimum(lax.div(work.column, jnp.int32(SCALE_BLOCK)) + i, last) for i in range(blocks)]

    def scales_of(index: Scalar) -> tuple[jax.Array, list[jax.Array]]:
        """The scales of a step, which are loaded one step ahead, for their latency."""
        # Clamped: the load behind the last step is never used, but must be in bounds, also for an item without steps.
        index = jnp.minimum(index, jnp.maximum(work.steps - 1, 0))
        # By threads, not by TMA into the stages: that was right in the interpreter and spilled nothing, but stopped on
        # an H100 with an illegal instruction, and the reason was not looked for (docs/notes/hopper_matmul.md).
        of_rows = plgpu.load(scales.lhs.at[index, pl.ds(first_row, rows)], layout=row_layout(), optimized=False)
        return of_rows, [scales.rhs[work.matrix, column, index] for column in columns]

    def one(index: Scalar, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        sums, (of_rows, of_columns) = carry
        step = first + index
        following = scales_of(index + 1)
        stages.load_from_shared(step, owner=0)
        added = []
        for number, total in enumerate(sums):
            # A turn for each part, not for each step: with the registers of one part a consumer cannot issue the next
            # MMA before its additions are done, and the tensor cores would be idle.
            context.scratch.turns.wait(context.warpgroup)
            part = pl.run_scoped(
                lambda accumulator, number=number: product(context, step, number, accumulator),
                plgpu.ACC((rows, SCALE_BLOCK), jnp.float32),
            )
            if number == blocks - 1:
                # All parts of a step read the same stage; reading the last accumulator has waited for the last of them.
                stages.release(step)
            added.append(total + part * spread(of_rows * of_columns[number], part.shape, 0))
        return added, following

    zeros = plgpu.layout_cast(jnp.zeros((rows, SCALE_BLOCK), jnp.float32), plgpu.Layout.WGMMA)
    sums: list[jax.Array]
    sums, _ = lax.fori_loop(0, work.steps, one, ([zeros] * blocks, scales_of(jnp.int32(0))))
    return sums


def product(context: Any, step: Scalar, number: int, accumulator: Ref) -> jax.Array:
    """The sum of a step for one block of columns; the turn is passed on when its MMAs are issued."""
    plan, stages = context.plan, context.scratch.stages
    lhs = plan.lhs.lhs_tile(stages, step, context.share, plan.params.consumer_rows)
    rhs = stages.get_mma_tile(step, part=1).at[pl.ds(number * SCALE_BLOCK, SCALE_BLOCK)].T
    # The accumulator starts from zeros in every step and part: what wgmma sums is K = 128, and never more.
    mma(accumulator, lhs, rhs)
    # Behind the issue, not behind the wait: a call took 1.54 ms so, and 1.74 where the turn was passed on when all MMAs
    # were complete (docs/notes/hopper_matmul.md).
    context.scratch.turns.pass_on(context.warpgroup)
    return accumulator[...]
