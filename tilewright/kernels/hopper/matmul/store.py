"""The store of tiles of the result, from accumulators through shared memory by TMA."""

from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.limits import WGMMA_M
from tilewright.kernels.hopper.matmul.epilogue import Columns
from tilewright.kernels.hopper.matmul.schedule import Work
from tilewright.kernels.hopper.panels import PanelRef
from tilewright.kernels.pallas_types import Ref, Scalar


def store_tile(tile: Columns, target: Ref, buffers: Ref, work: Work, first_row: Scalar) -> None:
    """Stores a consumer's tile of the result, and leaves out what lies beyond the result's end.

    Args:
      tile: in the accumulator's layout; its blocks of columns are multiples of what a buffer holds.
      target: ``[m, n]`` of the work's matrix.
      buffers: of this consumer, ``[buffers, 64, columns]``; part i of the tile takes number ``i % buffers``.
      first_row: of the tile in the result.
    """
    count, width = buffers.shape[0], buffers.shape[-1]
    columns = [(block, begin) for block in tile for begin in range(0, block.shape[1], width)]
    parts = tile[0].shape[0] // WGMMA_M * len(columns)
    # Stores are bulk groups, which complete in order: the number of those in flight tells which buffers are free. Where
    # rows end anywhere a unit is the parts of 64 rows, as rows behind the end are not stored and make no group.
    in_flight = stores_in_flight(parts, count, parts if work.row_end is None else len(columns))
    for row in range(0, tile[0].shape[0], WGMMA_M):
        own_rows = None if work.row_end is None else work.row_end - (first_row + row)

        def store(row: int = row, own_rows: Scalar | None = own_rows) -> None:
            for place, (block, begin) in enumerate(columns):
                number = row // WGMMA_M * len(columns) + place
                buffer = buffers.at[number % count]
                # All stores but so many have read their buffers; all threads wait for that.
                plgpu.wait_smem_to_gmem(in_flight[number], wait_read_only=True)
                buffer[...] = block[row : row + WGMMA_M, begin : begin + width].astype(buffers.dtype)
                # TMA reads through the async proxy. The fence also is a barrier of the warpgroup: one thread stores for
                # all of them.
                plgpu.commit_smem()
                store_rows(buffer, target, first_row + row, work.column + place * width, own_rows)

        if own_rows is None:
            store()
        else:
            pl.when(own_rows > 0)(store)


def stores_in_flight(parts: int, buffers: int, unit: int) -> list[int]:
    """Numbers of stores that may be in flight when each part of a tile is written: those behind its buffer's last one.

    Part i takes buffer ``i % buffers``, in every tile.

    Args:
      unit: parts of one range of rows. The tile before may have stored any number of units, the first ones of it.
    """

    def behind(part: int, before: int) -> int:
        """Stores since the last one of the buffer, where the tile before stored so many parts."""
        return part + ((before - 1 - part) % buffers if before > part else before)

    befores = range(unit, parts + 1, unit)
    first = [min(buffers - 1, *(behind(part, before) for before in befores)) for part in range(min(parts, buffers))]
    return first + [buffers - 1] * (parts - buffers)


def store_rows(buffer: Ref, target: Ref, row: Scalar, column: Scalar, own_rows: Scalar | None) -> None:
    """Starts the TMA stores of the first ``own_rows`` rows of a buffer; of all where it is None."""
    memory = buffer.memory[0] if isinstance(buffer, PanelRef) else buffer
    rows, width = memory.shape

    def store(first: Scalar, count: int) -> None:
        # Of the plain rows, which can be cut anywhere: the view for registers is cut into atoms of 8 rows.
        source = memory if count == rows else memory.at[pl.ds(first, count)]
        plgpu.copy_smem_to_gmem(source, target.at[pl.ds(row + first, count), pl.ds(column, width)])

    if own_rows is None:
        store(0, rows)
        return
    pl.when(own_rows >= rows)(lambda: store(0, rows))

    @pl.when(own_rows < rows)
    def _() -> None:
        # TMA has no count of rows that only the device knows: a copy for each bit of it.
        count = rows // 2
        while count:
            # The greater bits have stored the rows before. A part then makes several groups, so that the waits above
            # wait for more than they need, never for less.
            pl.when(own_rows & count != 0)(_part(store, own_rows & ~(2 * count - 1), count))
            count //= 2


def _part(store: Callable[[Any, int], None], first: Any, count: int) -> Callable[[], None]:
    return lambda: store(first, count)
