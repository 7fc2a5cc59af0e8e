"""Tiles of panels where kernels are interpreted, or followed in their jaxprs: memory has no layout there.

Nothing is below Pallas there either: an MMA over panels is one for each, and a wait that leaves one group in flight
leaves the last of them. Diagonals are loaded and added up by index.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.kernels.flash_attention.hopper import bias_gradient, scores
from tilewright.kernels.hopper import panels, shared
from tilewright.kernels.hopper.panels import PanelRef
from tilewright.kernels.hopper.types import Ref


def patches() -> Iterator[tuple[Any, str, Any]]:
    """What the interpreter puts in the place of aliased memory and of wgmma with strides."""
    yield shared, "panel_scratch", _scratch
    yield shared, "panel_references", lambda refs: (tuple(refs), tuple(refs))
    yield panels, "mma_of_panels", _mma
    yield scores, "load_toeplitz_tile", _toeplitz_tile
    yield bias_gradient, "add_along_diagonals", _add_along_diagonals


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """Applies `patches`."""
    with contextlib.ExitStack() as stack:
        for target, name, value in patches():
            stack.enter_context(mock.patch.object(target, name, value))
        yield


def _scratch(shape: tuple[int, ...], dtype: Any, transforms: tuple[Any, ...], count: int) -> list[Any]:
    """One memory for both views of a panel, without the tiling that TMA must not see."""
    del transforms
    return [plgpu.SMEM(shape, dtype) for _ in range(count)]


def _mma(accumulator: Ref, a: Ref | jax.Array, b: PanelRef, transpose_a: bool) -> None:
    """An MMA for each panel."""
    for number, panel in enumerate(b.operands):
        columns = pl.ds(number * b.width, b.width)
        if b.transposed:
            part = a.operands[number] if isinstance(a, PanelRef) else a.at[:, columns]  # type: ignore[union-attr]
            plgpu.wgmma(accumulator, part, panel.T)
        else:
            plgpu.wgmma(accumulator.at[:, columns], a.T if transpose_a else a, panel)


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
