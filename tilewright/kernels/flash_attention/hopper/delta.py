"""delta = rowsum(dO ∘ O), and zeros for the dQ accumulator, before the backward kernels that add to it on Hopper.

Both take one pass: zeros are stored while O and dO are loaded.
"""

from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.flash_attention.hopper.d_query import COUNTER_SHAPE, ROW
from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.launch import run_kernel
from tilewright.kernels.hopper.panels import load_tile
from tilewright.kernels.hopper.shared import SharedTile
from tilewright.kernels.hopper.tiles import ROWS, row_layout, store_unoptimised, tile_layout
from tilewright.kernels.pallas_types import Ref, Scalar

MINUS_LSE, MINUS_DELTA = 0, 1
"""Rows of the statistics (``BackwardCall.statistics``). Before delta is known the second row holds the gradient of
lse, for both enter dS alike: dS = P ∘ (dP − delta + d_lse)."""

ZEROS_SHAPE = (8, ROW)
"""Shape of the tile of zeros in shared memory, which is stored again and again."""


def rowsum_of_products(out: Ref, d_out: Ref, tile: SharedTile) -> jax.Array:
    """``[64]`` row sums of O ∘ dO, two tiles in shared memory."""
    width = (tile.swizzle or 0) // tile.dtype.itemsize
    products: jax.Array | None = None
    for column in range(0, tile.shape[1], width):  # in parts, for the registers
        columns = pl.ds(column, width)
        parts = [plgpu.load(ref.at[:, columns], layout=tile_layout()).astype(jnp.float32) for ref in (out, d_out)]
        products = parts[0] * parts[1] if products is None else products + parts[0] * parts[1]
    assert products is not None
    return products.sum(axis=1)


def minus_delta_of(minus_lse: jax.Array, d_lse: jax.Array, rowsum: jax.Array) -> jax.Array:
    """The second statistic, d_lse − rowsum(dO ∘ O); 0 for a fully masked row, whose ``minus_lse`` is −∞."""
    return jnp.where(minus_lse == -jnp.inf, 0.0, d_lse - rowsum)


def load_row_statistic(statistics: Ref, batch: Scalar, head: Scalar, row: int, rows: pl.Slice) -> jax.Array:
    """Loads a statistic of 64 queries from global memory, one value for each row of a tile of scores."""
    return plgpu.load(statistics.at[batch, head, row, rows], layout=row_layout(), optimized=False)


class _Operands[Operand](NamedTuple):
    out: Operand
    d_out: Operand
    statistics: Operand


class _Results[Result](NamedTuple):
    dq_accumulator: Result
    counters: Result


class _Scratch[Memory](NamedTuple):
    out: Memory
    d_out: Memory
    zeros: Memory
    loaded: Memory


def delta_kernel(
    out: jax.Array,
    d_out: jax.Array,
    statistics: jax.Ref,
    accumulator_shape: tuple[int, int, int, int],
    tile: SharedTile,
) -> tuple[jax.Array, jax.Array]:
    """Completes the statistics; returns zeros for the dQ accumulator, and ``COUNTER_SHAPE`` zeros for each head.

    Args:
      out, d_out: ``[batch, q_length, heads, value_dim]``.
      statistics: a reference, as in ``BackwardCall``.
      accumulator_shape: ``dq_accumulator_shape``.
      tile: of 64 rows of O or dO.
    """
    # A kernel, not passes of XLA: with it the whole backward pass ran at 598 TFLOP/s instead of 523
    # (docs/notes/hopper_attention.md).
    batch, q_length, heads, _ = out.shape
    tiles = -(-q_length // ROWS)
    # Rounded up to whole tiles of zeros; TMA writes nothing beyond the end of a head's rows.
    zero_rows = -(-accumulator_shape[2] // tiles // ZEROS_SHAPE[0]) * ZEROS_SHAPE[0]  # of each CTA

    def body(refs: _Operands[Ref], results: _Results[Ref], scratch: _Scratch[Ref]) -> None:
        program = lax.axis_index("program")
        # Heads are the fastest: rows of O and dO have all heads side by side in memory.
        head, rest = lax.rem(program, jnp.int32(heads)), lax.div(program, jnp.int32(heads))
        b, q_tile = lax.div(rest, jnp.int32(tiles)), lax.rem(rest, jnp.int32(tiles))
        rows = pl.ds(q_tile * ROWS, ROWS)
        # Both loads arrive on one barrier; zeros are stored until they are complete.
        load_tile(refs.out.at[b, rows, head], scratch.out, scratch.loaded)
        load_tile(refs.d_out.at[b, rows, head], scratch.d_out, scratch.loaded)
        # Written once and stored many times: no store changes it, so none of them has to be waited for.
        scratch.zeros[...] = jnp.zeros(ZEROS_SHAPE, jnp.float32)
        plgpu.commit_smem()
        for row in range(0, zero_rows, ZEROS_SHAPE[0]):
            target = results.dq_accumulator.at[b, head, pl.ds(q_tile * zero_rows + row, ZEROS_SHAPE[0])]
            plgpu.copy_smem_to_gmem(scratch.zeros, target)

        @pl.when(q_tile == 0)
        def _() -> None:
            plgpu.copy_smem_to_gmem(scratch.zeros.at[pl.ds(0, COUNTER_SHAPE[0])], results.counters.at[b, head])

        plgpu.barrier_wait(scratch.loaded)
        rowsum = rowsum_of_products(scratch.out, scratch.d_out, tile)
        minus_lse = load_row_statistic(refs.statistics, b, head, MINUS_LSE, rows)
        d_lse = load_row_statistic(refs.statistics, b, head, MINUS_DELTA, rows)
        store_unoptimised(refs.statistics.at[b, head, MINUS_DELTA, rows], minus_delta_of(minus_lse, d_lse, rowsum))
        # The accumulator and its counters are zeros before the next kernel adds to them.
        plgpu.wait_smem_to_gmem(0)

    out_types = _Results(
        jax.ShapeDtypeStruct(accumulator_shape, jnp.float32),
        jax.ShapeDtypeStruct((batch, heads, *COUNTER_SHAPE), jnp.float32),
    )
    scratch = _Scratch(
        out=tile.stack(),
        d_out=tile.stack(),
        zeros=plgpu.SMEM(ZEROS_SHAPE, jnp.float32),
        loaded=plgpu.Barrier(num_arrivals=2 * tile.copies),
    )
    operands = _Operands[object](out, d_out, statistics)
    results = run_kernel(body, operands, out_types, scratch, role="delta", num_ctas=batch * heads * tiles)
    return results.dq_accumulator, results.counters
