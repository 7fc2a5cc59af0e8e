"""Zeros in what a stage holds beyond the end of an item's range of K."""

from typing import Any

import jax.experimental.pallas as pl
import jax.numpy as jnp

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.mosaic_zeros import zero_lines
from tilewright.kernels.hopper.panels import PanelRef
from tilewright.kernels.hopper.ring import when
from tilewright.kernels.pallas_types import Ref, Scalar


def mask_step(context: Any, step: Scalar, rest: Scalar) -> None:
    """Zeroes the rows of a stage's tiles from ``rest`` on, where that is not behind their end.

    In both operands: what other groups have there may be NaN, and zero times NaN is NaN. Of consumers that share a step
    each masks its own tile of lhs, and the first one those of rhs, for which the others wait.
    """
    plan, stages, masked, share = context.plan, context.scratch.stages, context.scratch.masked, context.share

    @pl.when(rest < plan.lhs.block_k)
    def _() -> None:
        zero_rows(stages.get_mma_tile(step, number=share), rest)

        def mask_rhs() -> None:
            for part in range(1, len(stages.plan.parts)):
                zero_rows(stages.get_mma_tile(step, part=part), rest)

        when(share == 0, mask_rhs)
        # wgmma reads through the async proxy, to which stores of threads are visible only after a fence.
        plgpu.commit_smem()
        if masked is not None:
            # A barrier for each stage: the first consumer may be as many steps ahead as the ring has stages.
            slot = stages.slot(step)
            pl.when(share == 0)(lambda: plgpu.barrier_arrive(masked.at[slot]))
            # Waited for in masked steps only, and completed in them only: `rest` is the same for all who share the
            # step.
            pl.when(share > 0)(lambda: plgpu.barrier_wait(masked.at[slot]))


def zero_rows(tile: Ref, first: Scalar) -> None:
    """Zeroes the rows of a tile of panels from ``first`` on."""
    assert isinstance(tile, PanelRef)  # ranges of K begin anywhere
    for panel, transforms in zip(tile.operands, tile.transforms, strict=True):

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), plgpu.Layout.WG_SPLAT(())))
        def zero(_: Any, panel: Any, first: Any) -> None:
            zero_lines(panel, first)

        zero(panel, jnp.asarray(first, jnp.int32))
