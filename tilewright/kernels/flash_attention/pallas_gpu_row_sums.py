"""Before and after the backward kernels on Hopper: row sums of ``out · d_out``, and where dQ is added up.

Both take one pass: zeros are stored while ``out`` and ``d_out`` are read.
"""

import abc
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.kernels.flash_attention.pallas_gpu_scores import COMPILER_PARAMS, ROWS, TILE
from tilewright.kernels.kv_buffer.ring import RingPlan

STRIP = 8
"""Columns of dQ that lie together while it is added up: a warp's store of an accumulator is then 256 contiguous bytes,
without bank conflicts and without the shuffles and registers that a swizzled tile takes."""

ROW = 256
"""Elements that TMA takes along one dimension. With rows of a strip, 8 elements, its reductions are a fifth slower."""

ZEROS = (8, ROW)
"""A tile of zeros in shared memory, which is stored again and again."""


class BackwardParams(abc.ABC):
    """What the params of all backward kernels have."""

    __slots__ = ()

    deterministic: bool

    @property
    @abc.abstractmethod
    def block_q(self) -> int:
        """Queries per step of the kernel for dK and dV."""

    @property
    @abc.abstractmethod
    def block_k(self) -> int:
        """Keys per work item of the kernel for dK and dV."""


def d_query_shape(block_q: int, batch: int, heads: int, q_length: int, head_dim: int) -> tuple[int, int, int, int]:
    """Shape of the float32 sums of dQ: for each tile of queries its strips, as rows of ``ROW`` elements."""
    tiles = -(-q_length // block_q)
    return batch, heads, tiles * block_q * head_dim // ROW, ROW


def d_query_of(sums: Any, block_q: int, head_dim: int) -> Any:
    """``[batch, padded q_length, heads, head_dim]`` of sums in the layout of ``d_query_shape``."""
    batch, heads, rows, _ = sums.shape
    tiles = rows * ROW // (block_q * head_dim)
    strips = sums.reshape(batch, heads, tiles, head_dim // STRIP, block_q, STRIP)
    return strips.transpose(0, 2, 4, 1, 3, 5).reshape(batch, tiles * block_q, heads, head_dim)


def row_sums_kernel(out: Any, d_out: Any, q_padded: int, zeros: tuple[int, int, int, int] | None) -> tuple[Any, Any]:
    """``(sums, zeros)``: float32 ``[batch, heads, q_padded]`` and an array of zeros of the given shape, or None.

    Args:
      out, d_out: ``[batch, q_length, heads, value_dim]``; rows beyond the length sum to 0.
      q_padded: a multiple of 64.
      zeros: ``[batch, heads, rows, 256]``, float32.
    """
    batch, _, heads, value_dim = out.shape
    tiles = q_padded // ROWS
    tile = RingPlan((ROWS, value_dim), out.dtype, 1, 1)
    width = (tile.swizzle or 0) // out.dtype.itemsize
    share = 0 if zeros is None else -(-zeros[2] // tiles // ZEROS[0]) * ZEROS[0]

    def body(out_ref: Any, d_out_ref: Any, sums_ref: Any, *refs: Any) -> None:
        zeros_ref = refs[0] if share else None
        out_smem, d_out_smem, sums_smem, zeros_smem, loaded = refs[1 if share else 0 :]
        program = lax.axis_index("program")
        head, rest = lax.rem(program, jnp.int32(heads)), lax.div(program, jnp.int32(heads))
        b, number = lax.div(rest, jnp.int32(tiles)), lax.rem(rest, jnp.int32(tiles))
        rows = pl.ds(number * ROWS, ROWS)
        plgpu.copy_gmem_to_smem(out_ref.at[b, rows, head], out_smem, loaded)
        plgpu.copy_gmem_to_smem(d_out_ref.at[b, rows, head], d_out_smem, loaded)
        if zeros_ref is not None:
            zeros_smem[...] = jnp.zeros(ZEROS, jnp.float32)
            plgpu.commit_smem()
            for row in range(0, share, ZEROS[0]):
                plgpu.copy_smem_to_gmem(zeros_smem, zeros_ref.at[b, head, pl.ds(number * share + row, ZEROS[0])])
        plgpu.barrier_wait(loaded)
        products: Any = None
        for column in range(0, value_dim, width):  # in parts, for the registers that more programs at once need
            columns = pl.ds(column, width)
            parts = [plgpu.load(ref.at[:, columns], layout=TILE).astype(jnp.float32) for ref in (out_smem, d_out_smem)]
            products = parts[0] * parts[1] if products is None else products + parts[0] * parts[1]
        sums_smem[...] = products.sum(axis=1)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(sums_smem, sums_ref.at[b, head, rows])
        plgpu.wait_smem_to_gmem(0)

    out_type = [jax.ShapeDtypeStruct((batch, heads, q_padded), jnp.float32)]
    if zeros is not None:
        out_type.append(jax.ShapeDtypeStruct(zeros, jnp.float32))
    results = plgpu.kernel(
        body,
        out_type=tuple(out_type),
        scratch_types=[
            plgpu.SMEM(tile.tile, out.dtype, transforms=tile.transforms),
            plgpu.SMEM(tile.tile, out.dtype, transforms=tile.transforms),
            plgpu.SMEM((ROWS,), jnp.float32),
            plgpu.SMEM(ZEROS, jnp.float32),
            plgpu.Barrier(num_arrivals=2),
        ],
        grid=(batch * heads * tiles,),
        grid_names=("program",),
        compiler_params=COMPILER_PARAMS,
    )(out, d_out)
    return (*results, None)[:2]
