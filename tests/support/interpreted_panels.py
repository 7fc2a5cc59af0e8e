"""What is below Pallas where kernels are interpreted, or followed in their jaxprs: tiles of panels, and dropout's bits.

Memory has no layout there: an MMA over panels is one for each, and a wait that leaves one group in flight leaves the
last of them. Nor is there a thread: the bits of a tile are its mask, which the definition gives element by element.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.kernels.dropout import LANES, keep_elements
from tilewright.kernels.flash_attention.hopper import scores
from tilewright.kernels.flash_attention.hopper.scores import TileCoord
from tilewright.kernels.hopper import panels, shared
from tilewright.kernels.hopper.panels import PanelRef
from tilewright.kernels.hopper.types import Ref


def patches() -> Iterator[tuple[Any, str, Any]]:
    """What the interpreter puts in the place of aliased memory and of wgmma with strides."""
    yield shared, "panel_scratch", _scratch
    yield shared, "panel_references", lambda refs: (tuple(refs), tuple(refs))
    yield panels, "mma_of_panels", _mma
    yield scores, "bits_of_tile", _bits
    yield scores, "select_by_bits", _select


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


def _bits(key: tuple[jax.Array, jax.Array], coord: TileCoord, threshold: int) -> jax.Array:
    """The dropout mask of a tile, by the definition."""
    return keep_elements(key, coord.rows(), coord.columns(), threshold / LANES)


def _select(tile: jax.Array, bits: jax.Array, coord: TileCoord, first: int, negates: bool) -> jax.Array:
    """By a part of that mask."""
    return jnp.where(bits[:, first : first + coord.shape[1]], tile, -tile if negates else jnp.zeros((), tile.dtype))


def _mma(accumulator: Ref, a: Ref | jax.Array, b: PanelRef, transpose_a: bool) -> None:
    """An MMA for each panel."""
    for number, panel in enumerate(b.operands):
        columns = pl.ds(number * b.width, b.width)
        if b.transposed:
            part = a.operands[number] if isinstance(a, PanelRef) else a.at[:, columns]  # type: ignore[union-attr]
            plgpu.wgmma(accumulator, part, panel.T)
        else:
            plgpu.wgmma(accumulator.at[:, columns], a.T if transpose_a else a, panel)
