"""Tiles whose elements depend only on the difference of column and row, and sums along the diagonals of a tile."""

from typing import Any

import jax
import jax.numpy as jnp

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.mosaic_diagonals import add_diagonal_sums, toeplitz_tile
from tilewright.kernels.hopper.tiles import ROWS
from tilewright.kernels.pallas_types import Ref


def load_toeplitz_tile(values: Ref, columns: int, *, ascending: bool) -> jax.Array:
    """Loads a tile ``[64, columns]`` from its diagonals, each thread the few that it has elements of.

    Args:
      values: ``[64 + columns - 1]`` float32 in global memory. Element (r, c) is number c − r + 63, or r − c +
        columns − 1 if not ``ascending``.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((ROWS, columns), jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def load(_: Any, values: Any) -> Any:
        return toeplitz_tile(values, columns, ascending)

    return load(values)


def add_along_diagonals(tile: jax.Array, target: Ref, row_stride: int) -> None:
    """Adds the sums along the diagonals of a tile ``[64, 64]`` to float32 in global memory.

    Args:
      target: ``[rows, 127]``; element (r, c) of the tile is added to number r − c + 63. Of one row, where the order of
        additions is that in which warps run; or a row for each warp, which has 16 rows of the tile: then sums repeat
        bit for bit if no other warp adds to it.
      row_stride: elements from a row to the next.
    """
    # All warps add to one row, or each to its own.
    stride = row_stride if target.shape[0] > 1 else 0

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))
    def add(_: Any, tile: Any, target: Any) -> None:
        add_diagonal_sums(tile, target, stride)

    add(tile, target)
