"""Shared by the dV and the dK warpgroup of the backward kernel for wide heads: statistics in, gradients out."""

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.flash_attention.hopper.d_query import ROW, STRIP, store_strips
from tilewright.kernels.flash_attention.hopper.params import BLOCK, CONSUMERS
from tilewright.kernels.flash_attention.hopper.wide.context import WideContext
from tilewright.kernels.flash_attention.hopper.wide.plans import WIDE_TILE
from tilewright.kernels.flash_attention.hopper.wide.scores import (
    QueryIteration,
)
from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.panels import store_tile
from tilewright.kernels.hopper.ring import Ring, when
from tilewright.kernels.hopper.tiles import column_layout, store_unoptimised
from tilewright.kernels.pallas_types import Ref, Scalar

DV_WARPGROUP, DK_WARPGROUP, PRODUCER = range(CONSUMERS + 1)
"""Indices of the warpgroups."""


def load_statistic(ring: Ring, step: Scalar) -> jax.Array:
    """Waits for −lse or −delta of a step's queries, and loads it as a tile.

    An async-proxy fence (``commit_smem``) must come before the release of the stage: TMA writes it next.
    """
    ring.load_from_shared(step)
    values = plgpu.load(ring.smem.at[ring.slot(step)], layout=column_layout())
    return lax.broadcast_in_dim(values, WIDE_TILE, [1])


def add_to_dq(
    ctx: WideContext, item: Scalar, iteration: QueryIteration, warpgroup: int, begin: int, dq: jax.Array
) -> None:
    """Adds columns of a step's dQ, from ``begin`` on, to the accumulator by TMA reductions."""
    params, staging, accumulator = ctx.plan.params, ctx.scratch.dq, ctx.operands.dq_accumulator
    assert staging is not None
    assert accumulator is not None
    b, _, _, iterations = ctx.decode(item)
    head, strips = iterations.head(iteration), params.d_query_columns // STRIP
    # In rows of the accumulator: a strip of 64 queries takes two.
    first = lax.div(iterations.q_start(iteration) * ctx.plan.head_dim, jnp.int32(ROW))
    count = strips * STRIP * BLOCK // ROW
    # In parts, each with the oldest of few buffers: shared memory has no room for all columns, and the first parts are
    # reduced while the next ones are stored.
    for column in range(begin, begin + dq.shape[1], params.d_query_columns):
        buffer = staging.at[warpgroup, column // params.d_query_columns % params.d_query_buffers]
        # The reduction that used this buffer has read it: only the later ones may still be in flight.
        plgpu.wait_smem_to_gmem(params.d_query_buffers - 1, wait_read_only=True)
        store_strips(buffer, dq[:, column - begin : column - begin + strips * STRIP])
        plgpu.commit_smem()
        target = accumulator.at[b, head, pl.ds(first + column * BLOCK // ROW, count)]
        plgpu.copy_smem_to_gmem(buffer.reshape(count, ROW), target, reduction_op="add")


def store_gradient(ring: Ring, step: Scalar, gradient: jax.Array, target: Ref) -> None:
    """Stores dK or dV: by TMA through the stage of the item's last step, parts of sums from registers."""
    if target.dtype == jnp.float32:
        store_unoptimised(target, gradient)
        return
    # The role has not released this stage, so the producer does not load into it.
    stage = ring.smem.at[ring.slot(step)]
    stage[...] = gradient.astype(stage.dtype)
    plgpu.commit_smem()
    store_tile(stage, target)


def release_last_stage(ring: Ring) -> None:
    """Releases the stage from which `store_gradient` of the item before stores, when TMA has read it."""

    def release() -> None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        ring.release(-1)

    when(ring.offset > 0, release)  # except for the first item
