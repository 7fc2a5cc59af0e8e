"""What is below Pallas where kernels are interpreted, or followed in their jaxprs: tiles of panels, bits, diagonals.

Memory has no layout there: an MMA over panels is one for each, and a wait that leaves one group in flight leaves the
last of them. Nor is there a thread: the bits of a tile are its mask, which the definition gives element by element, and
diagonals are loaded and added up by index.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.kernels.flash_attention.hopper import bias_gradient, dropout, scores
from tilewright.kernels.flash_attention.hopper.scores import TileCoord
from tilewright.kernels.hopper import panels, shared
from tilewright.kernels.hopper import rows as indexed_rows
from tilewright.kernels.hopper.matmul import kernel, mask
from tilewright.kernels.hopper.panels import PanelRef
from tilewright.kernels.hopper.rows import RowsOfTile
from tilewright.kernels.numerics.dropout import LANES, keep_elements
from tilewright.kernels.pallas_types import Ref


def patches() -> Iterator[tuple[Any, str, Any]]:
    """The interpreter's replacements for aliased memory and for wgmma with strides."""
    yield shared, "panel_scratch", _scratch
    yield shared, "panel_references", lambda refs: (tuple(refs), tuple(refs))
    yield panels, "mma_of_panels", _mma
    yield dropout, "bits_of_tile", _bits
    yield dropout, "select_by_bits", _select
    yield scores, "load_toeplitz_tile", _toeplitz_tile
    yield bias_gradient, "add_along_diagonals", _add_along_diagonals
    yield mask, "zero_rows", _zero_rows
    yield kernel, "sources_of_tile", _sources_of_tile
    yield indexed_rows, "copy_rows", _copy_rows


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """Applies `patches`."""
    with contextlib.ExitStack() as stack:
        for target, name, value in patches():
            stack.enter_context(mock.patch.object(target, name, value))
        yield


def _scratch(shapes: Sequence[tuple[int, ...]], dtype: Any, transforms: Any) -> list[Any]:
    """One memory for both views of a panel, without the tiling that TMA must not see."""
    del transforms
    return [plgpu.SMEM(shape, dtype) for shape in shapes]


def _zero_rows(tile: Ref, first: Any) -> None:
    """By a selection of all elements."""
    for panel in tile.operands if isinstance(tile, PanelRef) else (tile,):
        row = plgpu.broadcasted_iota(jnp.int32, panel.shape, 0, layout=plgpu.Layout.WGMMA)
        values = plgpu.load(panel, layout=plgpu.Layout.WGMMA, optimized=False)
        panel[...] = jnp.where(row < first, values, jnp.zeros_like(values))


def _sources_of_tile(index: Ref, first: Any, end: Any, rows: int) -> jax.Array:
    row = first + jnp.arange(rows)
    found = jnp.take(index[...], jnp.minimum(row, index.shape[0] - 1))
    return jnp.where(row < end, found, -1)


def _copy_rows(rows: RowsOfTile, tiles: Ref, barrier: Any) -> None:
    """By stores of the threads, without a fence: the consumers have theirs."""
    array = rows.array[...]
    for panel in indexed_rows.panels_of(tiles):
        column = rows.start + panel.start + jnp.arange(panel.ref.shape[-1])
        is_inside = (rows.sources >= 0)[:, None] & (column < array.shape[1])
        found = array[jnp.maximum(rows.sources, 0)[:, None], jnp.minimum(column, array.shape[1] - 1)]
        panel.ref[...] = jnp.where(is_inside, found, jnp.zeros_like(found))
    plgpu.barrier_arrive(barrier)


def _bits(key: tuple[jax.Array, jax.Array], coord: TileCoord, threshold: int) -> jax.Array:
    """The dropout mask of a tile, by the definition."""
    return keep_elements(key, coord.rows(), coord.columns(), threshold / LANES)


def _select(tile: jax.Array, bits: jax.Array, coord: TileCoord, first: int, negates: bool) -> jax.Array:
    """By a part of that mask."""
    return jnp.where(bits[:, first : first + coord.shape[1]], tile, -tile if negates else jnp.zeros((), tile.dtype))


def _mma(accumulator: Ref, a: Ref | jax.Array, b: PanelRef, transpose_a: bool) -> None:
    """An MMA for each panel, of as many columns as the accumulator has."""
    for number, (start, panel) in enumerate(zip(b.starts, b.operands, strict=True)):
        width = panel.shape[-1] if b.transposed else min(panel.shape[-1], accumulator.shape[1] - start)
        columns = pl.ds(start, width)
        if transpose_a:
            # Columns of a, and so its panels, are rows of the accumulator.
            right = panel.T if b.transposed else panel if width == panel.shape[-1] else panel.at[:, pl.ds(0, width)]
            target = accumulator if b.transposed else accumulator.at[:, columns]
            lefts = (a.starts, a.operands) if isinstance(a, PanelRef) else ((0,), (a,))
            for first, left in zip(*lefts, strict=True):
                part = target if len(lefts[0]) == 1 else target.at[pl.ds(first, left.shape[-1])]
                plgpu.wgmma(part, left.T, right)
        elif b.transposed:
            if isinstance(a, PanelRef):
                part = a.operands[number]
            else:
                part = a[:, start : start + width] if isinstance(a, jax.Array) else a.at[:, columns]
            plgpu.wgmma(accumulator, part, panel.T)
        else:
            panel = panel if width == panel.shape[-1] else panel.at[:, pl.ds(0, width)]
            (left,) = a.operands if isinstance(a, PanelRef) else (a,)
            plgpu.wgmma(accumulator.at[:, columns], left, panel)


def _toeplitz_tile(values: Ref, columns: int, *, ascending: bool) -> jax.Array:
    row, column = jnp.arange(64)[:, None], jnp.arange(columns)[None, :]
    return values[...][column - row + 63 if ascending else row - column + columns - 1]


def _add_along_diagonals(tile: jax.Array, target: Ref, row_stride: int) -> None:
    """Not atomic: nothing else may add to the rows of a warpgroup."""
    del row_stride
    rows = target.shape[0]
    row, column = jnp.arange(64)[:, None], jnp.arange(64)[None, :]
    # By a sum over all elements for each diagonal: the interpreter's equations have no scatter.
    on = (row - column + 63)[None] == jnp.arange(127)[:, None, None]
    sums = jnp.sum(jnp.where(on, tile[None], 0.0).reshape(127, rows, -1), axis=2)
    target[...] = target[...] + sums.T
