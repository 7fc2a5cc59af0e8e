"""Rows of an array that an index names, which the producer's threads copy into the stages of a ring.

TMA has no such copy on Hopper. The copies of a thread arrive on the stage's barrier when they are complete, as those of
TMA do, so a producer waits for none of them, and the ring has as many steps in flight as it has stages. They write
shared memory as threads do, not through the async proxy: consumers fence (``plgpu.commit_smem``) between their wait for
the stage and the wgmma that reads it.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.limits import WARPGROUP_THREADS
from tilewright.kernels.hopper.mosaic_rows import ROWS_AT_A_TIME, arrive_primitive, copy_sources, load_sources
from tilewright.kernels.hopper.panels import PanelRef
from tilewright.kernels.pallas_types import Ref, Scalar


class IndexedRows(NamedTuple):
    """The matrix whose row r is ``array[index[r]]``, or zeros where the index is negative.

    Attributes:
      array: ``[n, columns]``, with rows at multiples of 16 bytes.
      index: ``[rows]``, int32, less than n.
    """

    array: Any
    index: Any

    @property
    def shape(self) -> tuple[int, int]:
        return self.index.shape[0], self.array.shape[1]

    @property
    def dtype(self) -> np.dtype:
        found: np.dtype = self.array.dtype
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class RowsOfTile:
    """The rows of the tiles of a stage, as the producer's threads have found them, from a column on.

    Attributes:
      sources: registers of `sources_of_tile`.
      start: the first column of the first tile; those of a stack have their columns one behind another.
    """

    array: Ref
    sources: jax.Array
    start: Scalar

    def __call__(self, tiles: Ref, barrier: Ref) -> None:
        """Starts the copies into the tiles, which arrive on a barrier of an array when they are complete."""
        copy_rows(self, tiles, barrier)


def sources_of_tile(index: Ref, first: Scalar, end: Scalar, rows: int) -> jax.Array:
    """The source of each row of a tile, -1 from row ``end`` on, in registers of the threads that copy it.

    Args:
      index: ``[rows]`` of `IndexedRows`; the tile begins with element ``first`` and may reach beyond its end.
    """
    layout, scalar = _registers(rows), plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), scalar, scalar),
        return_type=plgpu.ShapeDtypeStruct((rows // ROWS_AT_A_TIME * WARPGROUP_THREADS,), jnp.int32, layout=layout),
    )
    def load(_: Any, *args: Any) -> Any:
        return load_sources(rows, *args)

    return load(index, *(jnp.asarray(x, jnp.int32) for x in (first, end)))


class Panel(NamedTuple):
    """A panel of the tiles that are copied, and its first column among all of them."""

    ref: Ref
    transforms: tuple[Any, ...]
    start: int


def panels_of(tiles: Ref) -> list[Panel]:
    """The panels of a tile, or of a stack of tiles."""
    assert isinstance(tiles, PanelRef)
    stack, columns = tiles.shape[:-2], tiles.shape[-1]
    each: list[Any] = [tiles.at[number] for number in range(stack[0])] if stack else [tiles]
    return [
        Panel(ref, transforms, number * columns + start)
        for number, tile in enumerate(each)
        for ref, transforms, start in zip(tile.operands, tile.transforms, tile.starts, strict=True)
    ]


def copy_rows(rows: RowsOfTile, tiles: Ref, barrier: Any) -> None:
    """`RowsOfTile.__call__` on the device."""
    panels = panels_of(tiles)

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(),
            _registers(tiles.shape[-2]),
            plgpu.Layout.WG_SPLAT(()),
            *(plgpu.RefType(panel.transforms) for panel in panels),
        )
    )
    def copy(_: Any, *args: Any) -> None:
        array, sources, start, *refs = args
        copy_sources(array, sources, start, refs, [panel.start for panel in panels])

    copy(rows.array, rows.sources, jnp.asarray(rows.start, jnp.int32), *(panel.ref for panel in panels))
    ((number,),) = (part.indices for part in barrier.transforms)
    arrive_primitive().bind(barrier.ref, jnp.asarray(number, jnp.int32))


def _registers(rows: int) -> Any:
    """A register of every thread for each row of a tile that it copies a part of."""
    return plgpu.Layout.WG_STRIDED((rows // ROWS_AT_A_TIME * WARPGROUP_THREADS,), vec_size=1)
