"""Dropout of a tile of scores in a Hopper kernel: random bits are drawn early, and kept packed.

The generator needs only positions, so a kernel draws a tile's bits while the MMA for S is in flight, and keeps them in
a register for each 64 columns of the tile. They are tested where P or dP is at hand.

A call of the generator (`tilewright.kernels.numerics.dropout`) serves four elements that one thread holds, of S and of
Sᵀ. An array in Pallas has no such thing as a thread, so both functions are written in Mosaic GPU's own terms.
"""

from typing import Any

import jax
import jax.numpy as jnp

from tilewright.kernels.flash_attention.hopper.scores import ScoreArrays, ScoreOptions, TileCoord
from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.mosaic_dropout import COLUMNS_PER_WORD, draw, select
from tilewright.kernels.hopper.tiles import ROWS, tile_layout
from tilewright.kernels.numerics.dropout import keep_threshold

WARPGROUP_THREADS = 128


def draw_kept(options: ScoreOptions, arrays: ScoreArrays, coord: TileCoord) -> jax.Array | None:
    """The bits of a tile for `zero_dropped` and `negate_dropped`, opaque; None without dropout."""
    if not options.dropout_prob:
        return None
    keys = arrays.dropout_keys
    assert keys is not None
    key = keys[coord.batch, coord.head, 0], keys[coord.batch, coord.head, 1]
    return bits_of_tile(key, coord, keep_threshold(options.dropout_prob))


def zero_dropped(tile: jax.Array, bits: jax.Array, coord: TileCoord, first: int = 0) -> jax.Array:
    """A tile, in float32 or in 16 bits, with 0 where P is dropped.

    Args:
      bits: of `draw_kept`.
      coord: of the tile, or of a part of its columns.
      first: the part's first column, a multiple of 64.
    """
    return select_by_bits(tile, bits, coord, first, negates=False)


def negate_dropped(tile: jax.Array, bits: jax.Array, coord: TileCoord) -> jax.Array:
    """A tile in 16 bits with the other sign where P is dropped."""
    return select_by_bits(tile, bits, coord, 0, negates=True)


def bits_of_tile(key: tuple[jax.Array, jax.Array], coord: TileCoord, threshold: int) -> jax.Array:
    """`draw_kept` on the device."""
    rows, columns = coord.shape
    assert rows == ROWS
    # A word has one bit for each of a thread's elements in 64 columns: 2 rows × 16 columns.
    words = -(-columns // COLUMNS_PER_WORD)
    starts = (coord.q_start, coord.kv_start) if coord.q_axis == 0 else (coord.kv_start, coord.q_start)
    scalar = plgpu.Layout.WG_SPLAT(())

    # Not an array of the tile's shape: what passes between Pallas and this code is registers of threads.
    @plgpu.inline_mgpu(
        arg_types=(scalar,) * 4,
        return_type=plgpu.ShapeDtypeStruct((words * WARPGROUP_THREADS,), jnp.int32, layout=_bits_layout(words)),
    )
    def drawn(_: Any, first: Any, second: Any, row_start: Any, column_start: Any) -> Any:
        return draw((first, second), (row_start, column_start), columns, coord.q_axis == 1, threshold)

    # Positions are of the whole matrix of scores, so that every kernel and tile size draws the same bits.
    return drawn(*key, *(jnp.asarray(start, jnp.int32) for start in starts))


def select_by_bits(tile: jax.Array, bits: jax.Array, coord: TileCoord, first: int, negates: bool) -> jax.Array:
    """`zero_dropped` and `negate_dropped` on the device."""
    # Not `jnp.where`: LLVM moves a selection of Pallas behind the rounding to 16 bits, where it takes twice the
    # instructions (docs/hopper.md).
    layout, first_word = tile_layout(), first // COLUMNS_PER_WORD

    @plgpu.inline_mgpu(
        arg_types=(layout, _bits_layout(bits.size // WARPGROUP_THREADS)),
        return_type=plgpu.ShapeDtypeStruct(tile.shape, tile.dtype, layout=layout),
    )
    def selected(_: Any, tile: Any, bits: Any) -> Any:
        return select(bits, first_word, tile, coord.q_axis == 1, negates)

    return selected(tile, bits)


def _bits_layout(words: int) -> Any:
    """So many registers of every thread."""
    return plgpu.Layout.WG_STRIDED((words * WARPGROUP_THREADS,), vec_size=1)
