"""The store of tiles of the result, from accumulators through shared memory by TMA."""

from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.limits import WGMMA_M
from tilewright.kernels.hopper.matmul.epilogue import Columns
from tilewright.kernels.hopper.matmul.schedule import Work
from tilewright.kernels.hopper.panels import PanelRef
from tilewright.kernels.hopper.types import Ref, Scalar


def store_tile(tile: Columns, target: Ref, buffers: Ref, work: Work, first_row: Scalar) -> None:
    """Stores a consumer's tile of the result, of which what lies beyond the result's end is left out.

    Args:
      tile: in the accumulator's layout; its blocks of columns are multiples of what a buffer holds.
      target: ``[m, n]`` of the work's matrix.
      buffers: of this consumer, ``[store_buffers, 64, columns]``.
      first_row: of the tile in the result.
    """
    count, width = buffers.shape[0], buffers.shape[-1]
    columns = [(block, begin) for block in tile for begin in range(0, block.shape[1], width)]
    batches = batches_of(len(columns), count)
    used = min(count, 2 * len(batches[0][0]))
    for row in range(0, tile[0].shape[0], WGMMA_M):
        own_rows = None if work.row_end is None else work.row_end - (first_row + row)

        def store(row: int = row, own_rows: Scalar | None = own_rows) -> None:
            for numbers, in_flight in batches:
                # All stores but so many have read their buffers; all threads wait for that.
                plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)
                for number in numbers:
                    block, begin = columns[number]
                    part = block[row : row + WGMMA_M, begin : begin + width]
                    buffers.at[number % used][...] = part.astype(buffers.dtype)
                plgpu.commit_smem()
                for number in numbers:
                    store_rows(
                        buffers.at[number % used], target, first_row + row, work.column + number * width, own_rows
                    )

        if own_rows is None:
            store()
        else:
            # Without rows there is no store either, and the count of stores in flight stays that of buffers.
            pl.when(own_rows > 0)(store)


def batches_of(parts: int, buffers: int) -> list[tuple[range, int]]:
    """Numbers of the parts of a tile that are stored together, and stores that may be in flight when a batch begins.

    Half of the buffers are written while TMA reads the other half. Part i takes buffer ``i % buffers``, and every tile
    begins with the first: after an odd number of batches that is the one that was written last.
    """
    batch = max(min(buffers, parts) // 2, 1)
    numbers = [range(begin, min(begin + batch, parts)) for begin in range(0, parts, batch)]
    before = 0 if len(numbers) % 2 else len(numbers[-1])
    return [(each, len(numbers[i - 1]) if i else before) for i, each in enumerate(numbers)]


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
