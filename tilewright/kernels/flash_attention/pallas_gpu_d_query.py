"""Where the backward kernels on Hopper add dQ up in global memory, in float32, and the way from there to the result."""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.kernels.flash_attention.pallas_gpu_scores import COMPILER_PARAMS, ROWS, TILE
from tilewright.kernels.flash_attention.pallas_gpu_walk import place_of
from tilewright.kernels.kv_buffer.ring import RingPlan

STRIP = 8
"""Columns of dQ that lie together while it is added up: a warp's store of an accumulator is then 256 contiguous bytes,
without bank conflicts and without the shuffles and registers that a swizzled tile takes."""

ROW = 256
"""Elements that TMA takes along one dimension. With rows of a strip, 8 elements, its reductions are a fifth slower."""


def d_query_shape(block_q: int, batch: int, heads: int, q_length: int, head_dim: int) -> tuple[int, int, int, int]:
    """Shape of the float32 sums of dQ: for each tile of queries its strips, as rows of ``ROW`` elements."""
    tiles = -(-q_length // block_q)
    return batch, heads, tiles * block_q * head_dim // ROW, ROW


def convert_kernel(sums: Any, shape: tuple[int, int, int, int], dtype: Any, *, block_q: int, scale: float) -> Any:
    """dQ, ``shape`` = ``[batch, q_length, heads, head_dim]``, of its sums, an array of ``d_query_shape``."""
    batch, q_length, heads, head_dim = shape
    tiles, steps = -(-q_length // ROWS), block_q // ROWS
    programs = batch * heads * tiles
    plan = RingPlan((ROWS, head_dim), dtype, 1, 1)
    rows_of_strip = ROWS * STRIP // ROW

    def body(sums_ref: Any, result_ref: Any, staging: Any) -> None:
        # Backwards: the sums that were added to last are still in the L2 cache.
        program = programs - 1 - lax.axis_index("program")
        b, head, tile = place_of(program, tiles, heads)
        first = lax.div(tile, jnp.int32(steps)) * (block_q * head_dim // ROW)
        first = first + lax.rem(tile, jnp.int32(steps)) * rows_of_strip
        strips = []
        for strip in range(head_dim // STRIP):
            rows = pl.ds(first + strip * (block_q * STRIP // ROW), rows_of_strip)
            source = sums_ref.at[b, head, rows].reshape(ROWS, STRIP)
            strips.append(plgpu.load(source, layout=TILE, optimized=False))
        staging[...] = (jnp.concatenate(strips, axis=1) * scale).astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staging, result_ref.at[b, pl.ds(tile * ROWS, ROWS), head])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, dtype),
        scratch_types=[plgpu.SMEM(plan.tile, dtype, transforms=plan.transforms)],
        grid=(programs,),
        grid_names=("program",),
        compiler_params=COMPILER_PARAMS,
    )(sums)
