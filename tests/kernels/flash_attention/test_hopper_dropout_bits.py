"""The dropout's bits of a tile as the threads of a warpgroup draw and find them, computed by NumPy for all threads."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.kernels.hopper.mosaic_dropout import places_of_pair, words_of_bits
from tilewright.kernels.numerics.dropout import LANES, keep_elements

COLUMNS = [16, 32, 64, 80, 96, 112, 128]
THREADS = np.arange(128, dtype=np.uint32)


class Words:
    """The arithmetic of ``mosaic_dropout`` on uint32 arrays of all threads."""

    def constant(self, value: int) -> Any:
        return np.full_like(THREADS, value)

    def add(self, x: Any, y: Any) -> Any:
        return x + y

    def both(self, x: Any, y: Any) -> Any:
        return x & y

    def either(self, x: Any, y: Any) -> Any:
        return x | y

    def xor(self, x: Any, y: Any) -> Any:
        return x ^ y

    def right(self, x: Any, places: int) -> Any:
        return x >> np.uint32(places)

    def product(self, x: Any, factor: int) -> tuple[Any, Any]:
        wide = x.astype(np.uint64) * np.uint64(factor)
        return (wide >> np.uint64(32)).astype(np.uint32), wide.astype(np.uint32)


def mask_of_threads(words: list[np.ndarray], columns: int, transposed: bool) -> np.ndarray:
    """The tile's mask, each element from the thread that holds it in the layout of the wgmma accumulator."""
    # PTX ISA, "wgmma.mma_async: register fragments", D of m64nNk16.
    row = 16 * (THREADS // 32) + THREADS % 32 // 4
    column = 2 * (THREADS % 4)
    mask = np.full((64, columns), 2)
    for eight in range(columns // 8):
        for half in range(2):
            number, places = places_of_pair(columns, transposed, eight, half)
            for odd in range(2):
                mask[row + 8 * half, 8 * eight + column + odd] = words[number] >> np.uint32(places[odd]) & 1
    return mask


@pytest.mark.parametrize("transposed", [False, True], ids=["queries", "keys"])
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("threshold", [0, 1, 6554, 32768, 40000, 65535])
def test_bits_are_those_of_the_definition(columns: int, transposed: bool, threshold: int):
    key = np.uint32(0x9ABCDEF0), np.uint32(0x12345678)
    row_start, column_start = 64 * 7, 16 * 13
    start = np.full_like(THREADS, row_start), np.full_like(THREADS, column_start)
    of_threads = np.full_like(THREADS, key[0]), np.full_like(THREADS, key[1])
    words = words_of_bits(Words(), THREADS, of_threads, start, columns, transposed, threshold)
    assert len(words) == -(-columns // 64)
    rows, others = row_start + np.arange(64)[:, None], column_start + np.arange(columns)
    queries, keys_at = (others, rows) if transposed else (rows, others)
    want = keep_elements(tuple(map(jnp.asarray, key)), jnp.asarray(queries), jnp.asarray(keys_at), threshold / LANES)
    np.testing.assert_array_equal(mask_of_threads(words, columns, transposed), want)
