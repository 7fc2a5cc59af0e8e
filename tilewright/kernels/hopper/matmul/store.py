"""The store of tiles of the result, from accumulators through shared memory by TMA."""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.limits import WGMMA_M
from tilewright.kernels.hopper.matmul.plan import STORE_BUFFERS
from tilewright.kernels.hopper.matmul.schedule import Work
from tilewright.kernels.hopper.panels import PanelRef
from tilewright.kernels.hopper.types import Ref, Scalar


def store_accumulator(tile: jax.Array, target: Ref, buffers: Ref, work: Work, first_row: Scalar) -> None:
    """Stores a consumer's tile of the result, of which what lies beyond the result's end is left out.

    Args:
      tile: float32, in the accumulator's layout.
      target: ``[m, n]`` of the work's matrix.
      buffers: of this consumer, ``[STORE_BUFFERS, 64, columns]``.
      first_row: of the tile in the result.
    """
    width = buffers.shape[-1]
    for row in range(0, tile.shape[0], WGMMA_M):
        own_rows = None if work.row_end is None else work.row_end - (first_row + row)

        def store(row: int = row, own_rows: Scalar | None = own_rows) -> None:
            for number, column in enumerate(range(0, tile.shape[1], width)):
                buffer = buffers.at[number % STORE_BUFFERS]
                # The store before the last one has read this buffer; all threads wait for that.
                plgpu.wait_smem_to_gmem(STORE_BUFFERS - 1, wait_read_only=True)
                buffer[...] = tile[row : row + WGMMA_M, column : column + width].astype(buffer.dtype)
                plgpu.commit_smem()
                store_rows(buffer, target, first_row + row, work.column + column, own_rows)

        if own_rows is None:
            store()
        else:
            # Without rows there is no store either, and the count of stores in flight stays that of buffers.
            pl.when(own_rows > 0)(store)


def store_rows(buffer: Ref, target: Ref, row: Scalar, column: Scalar, own_rows: Scalar | None) -> None:
    """Starts the TMA stores of the first ``own_rows`` rows of a buffer; of all where it is None."""
    memory = buffer.memory[0] if isinstance(buffer, PanelRef) else buffer
    rows, width = memory.shape

    def store(first: Scalar, count: int) -> None:
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
            # The greater bits have stored the rows before.
            pl.when(own_rows & count != 0)(_part(store, own_rows & ~(2 * count - 1), count))
            count //= 2


def _part(store: Callable[[Any, int], None], first: Any, count: int) -> Callable[[], None]:
    return lambda: store(first, count)
