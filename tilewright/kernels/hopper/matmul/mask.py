"""Zeros in what a stage holds beyond the end of an item's range of K."""

from typing import Any

import jax.experimental.pallas as pl
import jax.numpy as jnp

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.panels import PanelRef
from tilewright.kernels.hopper.types import Ref, Scalar


def mask_step(context: Any, step: Scalar, rest: Scalar) -> None:
    """Zeroes the rows of a stage's tiles from ``rest`` on, where that is not behind their end.

    In both operands: what other groups have there may be NaN, and zero times NaN is NaN. The consumers share the
    panels out, and wait for each other.
    """
    plan, scratch = context.plan, context.scratch

    @pl.when(rest < plan.lhs.block_k)
    def _() -> None:
        for number, panel in enumerate(panels_of(context, step)):
            pl.when(context.warpgroup == number % plan.params.consumers)(lambda panel=panel: zero_rows(panel, rest))
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.masked)
        plgpu.barrier_wait(scratch.masked)


def panels_of(context: Any, step: Scalar) -> list[Ref]:
    """The panels of all tiles of a stage."""
    stages, panels = context.scratch.stages, []
    for part, planned in enumerate(stages.plan.parts):
        for number in range(planned.count):
            tile = stages.tile(step, part, number)
            panels += tile.operands if isinstance(tile, PanelRef) else [tile]
    return panels


def zero_rows(panel: Ref, first: Scalar) -> None:
    """Zeroes the rows of a panel from ``first`` on."""
    row = plgpu.broadcasted_iota(jnp.int32, panel.shape, 0, layout=plgpu.Layout.WGMMA)
    values = plgpu.load(panel, layout=plgpu.Layout.WGMMA, optimized=False)
    panel[...] = jnp.where(row < first, values, jnp.zeros_like(values))
