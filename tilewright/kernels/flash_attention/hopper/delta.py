"""Before dQ is added up by the backward kernels on Hopper: row sums of ``out · d_out``, and zeros to add to.

Both take one pass: zeros are stored while ``out`` and ``d_out`` are read.
"""

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.flash_attention.hopper.d_query import COUNTER, ROW
from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.launch import warpgroup_kernel
from tilewright.kernels.hopper.shared import SharedTile
from tilewright.kernels.hopper.tiles import ROWS, store_unoptimised, tile_layout
from tilewright.kernels.hopper.types import Ref, Scalar

ZEROS = (8, ROW)
"""A tile of zeros in shared memory, which is stored again and again."""


def sums_of_products(out: Ref, d_out: Ref, tile: SharedTile) -> jax.Array:
    """``[64]`` sums over ``out · d_out``, two tiles in shared memory."""
    width = (tile.swizzle or 0) // tile.dtype.itemsize
    products: jax.Array | None = None
    for column in range(0, tile.shape[1], width):  # in parts, for the registers
        columns = pl.ds(column, width)
        parts = [plgpu.load(ref.at[:, columns], layout=tile_layout()).astype(jnp.float32) for ref in (out, d_out)]
        products = parts[0] * parts[1] if products is None else products + parts[0] * parts[1]
    assert products is not None
    return products.sum(axis=1)


def completed(shift: jax.Array, d_lse: jax.Array, sums: jax.Array) -> jax.Array:
    """The second statistic: the gradient of lse less the row sums; 0 where a row sees nothing, with ``shift`` = −∞."""
    return jnp.where(shift == -jnp.inf, 0.0, d_lse - sums)


def row_sums_kernel(
    out: jax.Array, d_out: jax.Array, statistics: jax.Ref, zeros: tuple[int, int, int, int]
) -> tuple[jax.Array, jax.Array]:
    """Completes the statistics; returns float32 zeros of the given shape, and ``COUNTER`` zeros for each head.

    Args:
      out, d_out: ``[batch, q_length, heads, value_dim]``.
      statistics: a reference, as ``query_kernel`` wants it.
      zeros: ``[batch, heads, rows, 256]``, the shape of the sums of dQ.
    """
    batch, q_length, heads, value_dim = out.shape
    tiles = -(-q_length // ROWS)
    tile = SharedTile((ROWS, value_dim), out.dtype)
    share = -(-zeros[2] // tiles // ZEROS[0]) * ZEROS[0]

    def body(
        out_ref: Ref, d_out_ref: Ref, stat_ref: Ref, zeros_ref: Ref, counters_ref: Ref,
        out_smem: Ref, d_out_smem: Ref, zeros_smem: Ref, loaded: Ref,
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

        @pl.when(number == 0)
        def _() -> None:
            plgpu.copy_smem_to_gmem(zeros_smem.at[pl.ds(0, COUNTER[0])], counters_ref.at[b, head])

        plgpu.barrier_wait(loaded)
        sums = sums_of_products(out_smem, d_out_smem, tile)
        shift, d_lse = (statistic_of_rows(stat_ref, b, head, row, rows) for row in range(2))
        store_unoptimised(stat_ref.at[b, head, 1, rows], completed(shift, d_lse, sums))
        plgpu.wait_smem_to_gmem(0)

    return warpgroup_kernel(
        body,
        (
            jax.ShapeDtypeStruct(zeros, jnp.float32),
            jax.ShapeDtypeStruct((batch, heads, *COUNTER), jnp.float32),
        ),
        [
            tile.scratch(),
            tile.scratch(),
            plgpu.SMEM(ZEROS, jnp.float32),
            plgpu.Barrier(num_arrivals=2),
        ],
        batch * heads * tiles,
    )(out, d_out, statistics)


def statistic_of_rows(stat_ref: Ref, batch: Scalar, head: Scalar, row: int, rows: pl.Slice) -> jax.Array:
    """One of the two statistics of 64 rows, for the rows of a tile of scores."""
    return plgpu.load(stat_ref.at[batch, head, row, rows], layout=tile_layout().reduce(1), optimized=False)
