"""Before the backward kernels on Hopper: row sums of ``out · d_out``, and zeros to add dQ up in.

Both take one pass: zeros are stored while ``out`` and ``d_out`` are read.
"""

import abc
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.kernels.flash_attention.pallas_gpu_d_query import ROW
from tilewright.kernels.flash_attention.pallas_gpu_scores import COMPILER_PARAMS, ROWS, TILE
from tilewright.kernels.kv_buffer.ring import RingPlan

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


def products_of_rows(out: Any, d_out: Any, value_dim: int, width: int) -> Any:
    """``[64]`` sums over ``out · d_out``, views of shared memory, in parts of ``width`` columns: fewer registers."""
    products: Any = None
    for column in range(0, value_dim, width):
        columns = pl.ds(column, width)
        parts = [plgpu.load(ref.at[:, columns], layout=TILE).astype(jnp.float32) for ref in (out, d_out)]
        products = parts[0] * parts[1] if products is None else products + parts[0] * parts[1]
    return products.sum(axis=1)


def row_sums_kernel(out: Any, d_out: Any, q_padded: int, zeros: tuple[int, int, int, int]) -> tuple[Any, Any]:
    """``(sums, zeros)``: float32 ``[batch, heads, q_padded]`` and an array of zeros of the given shape.

    Args:
      out, d_out: ``[batch, q_length, heads, value_dim]``; rows beyond the length sum to 0.
      q_padded: a multiple of 64.
      zeros: ``[batch, heads, rows, 256]``, the shape of the sums of dQ.
    """
    batch, _, heads, value_dim = out.shape
    tiles = q_padded // ROWS
    tile = RingPlan((ROWS, value_dim), out.dtype, 1, 1)
    width = (tile.swizzle or 0) // out.dtype.itemsize
    share = -(-zeros[2] // tiles // ZEROS[0]) * ZEROS[0]

    def body(
        out_ref: Any, d_out_ref: Any, sums_ref: Any, zeros_ref: Any,
        out_smem: Any, d_out_smem: Any, sums_smem: Any, zeros_smem: Any, loaded: Any,
    ) -> None:  # fmt: skip
        program = lax.axis_index("program")
        head, rest = lax.rem(program, jnp.int32(heads)), lax.div(program, jnp.int32(heads))
        b, number = lax.div(rest, jnp.int32(tiles)), lax.rem(rest, jnp.int32(tiles))
        rows = pl.ds(number * ROWS, ROWS)
        plgpu.copy_gmem_to_smem(out_ref.at[b, rows, head], out_smem, loaded)
        plgpu.copy_gmem_to_smem(d_out_ref.at[b, rows, head], d_out_smem, loaded)
        zeros_smem[...] = jnp.zeros(ZEROS, jnp.float32)
        plgpu.commit_smem()
        for row in range(0, share, ZEROS[0]):
            plgpu.copy_smem_to_gmem(zeros_smem, zeros_ref.at[b, head, pl.ds(number * share + row, ZEROS[0])])
        plgpu.barrier_wait(loaded)
        sums_smem[...] = products_of_rows(out_smem, d_out_smem, value_dim, width)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(sums_smem, sums_ref.at[b, head, rows])
        plgpu.wait_smem_to_gmem(0)

    sums, cleared = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((batch, heads, q_padded), jnp.float32),
            jax.ShapeDtypeStruct(zeros, jnp.float32),
        ),
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
    return sums, cleared
