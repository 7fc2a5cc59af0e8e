"""Configs of matmuls on Hopper, best guess first, by a model of the time that the tiles of each take."""

import math
from collections.abc import Callable, Iterable

from tilewright.kernels.hopper.matmul.params import MatmulParams

SM_FLOPS = 6.1e12
"""FLOP/s of the tensor cores of an SM at the clock that they keep under load: 800e12 for 132 of them."""

SM_L2_BYTES = 70e9
"""Bytes/s that an SM gets from the L2 cache while all load tiles, many of them the same ones."""

DRAM_BYTES = 2.9e12

STORE_BYTES = 40e9
"""Bytes/s of the store of a CTA's tile, which no MMA overlaps with."""

ITEM_SECONDS = 0.7e-6
"""Seconds of a work item besides its steps and its store: the first and the last MMAs overlap with nothing."""

BLOCK_K = 64

type Tile = tuple[int, int, int, int, int]
"""block_m, block_n, num_stages, cluster_m, cluster_n"""

_LARGE: tuple[Tile, ...] = (
    (128, 256, 4, 2, 1),
    (128, 256, 4, 1, 1),
    (256, 128, 4, 1, 2),
    (128, 128, 6, 1, 1),
)
_SMALL: tuple[Tile, ...] = ((64, 128, 8, 1, 1), (64, 64, 8, 1, 1), (64, 256, 5, 1, 1))
_BANDS = (8, 4, 1)


def dense_candidates(m: int, n: int, k: int, num_sms: int, accumulators: int = 1) -> list[MatmulParams]:
    """Configs of one matmul."""
    return _sorted(
        (*_LARGE, *_SMALL),
        lambda tile: _seconds(tile, math.ceil(m / (tile[0] * tile[3])), n, k, num_sms, accumulators),
        _BANDS[0],
        accumulators,
    )


def rows_candidates(rows: int, groups: int, n: int, k: int, num_sms: int, accumulators: int = 1) -> list[MatmulParams]:
    """Configs of the rows of groups, each of which has a matrix of ``[k, n]``; sizes of groups are not known."""
    # Of few rows most have a group with others: each of some experts is chosen by several tokens.
    used = max(min(groups, rows // 8), 1)

    def seconds(tile: Tile) -> float:
        # A group's last tile of rows has any number of them.
        tiles = used * max(rows / used / (tile[0] * tile[3]) + 0.5, 1.0)
        memory = 2 * (used * k * n * accumulators + rows * (k + n)) / DRAM_BYTES
        return _both(_seconds(tile, tiles, n, k, num_sms, accumulators), memory)

    # Few rows: what a matrix is read for is over after one tile, and neighbours read its next columns.
    band = _BANDS[0] if rows / used > 128 else _BANDS[-1]
    return _sorted((*_LARGE, *_SMALL), seconds, band, accumulators)


def reduction_candidates(rows: int, groups: int, m: int, n: int, num_sms: int) -> list[MatmulParams]:
    """Configs of a sum of outer products over the rows of each group, of ``[m, n]``."""
    depth = rows / max(groups, 1)

    def seconds(tile: Tile) -> float:
        of_group = math.ceil(m / (tile[0] * tile[3]))
        # A group's last step has any number of rows.
        memory = 2 * (groups * m * n + rows * (m + n)) / DRAM_BYTES
        return _both(_seconds(tile, groups * of_group, n, depth + BLOCK_K / 2, num_sms, 1), memory)

    return _sorted(_LARGE, seconds, _BANDS[0] if depth > 512 else _BANDS[1])


def _both(computing: float, memory: float) -> float:
    """Time of what overlaps but for a part of the shorter."""
    return max(computing, memory) + 0.3 * min(computing, memory)


def _seconds(tile: Tile, row_tiles: float, n: int, k: float, num_sms: int, accumulators: int) -> float:
    """Time of all items, by the slower of tensor cores and L2 cache in each step."""
    block_m, block_n, _, cluster_m, cluster_n = tile
    columns = block_n // accumulators
    programs = num_sms // (cluster_m * cluster_n)
    items = row_tiles * math.ceil(n / (columns * cluster_n))
    loaded = 2 * BLOCK_K * (block_m / cluster_n + block_n / cluster_m)
    step = max(2 * block_m * block_n * BLOCK_K / SM_FLOPS, loaded / SM_L2_BYTES)
    item = k / BLOCK_K * step + 2 * block_m * columns / STORE_BYTES + ITEM_SECONDS
    return max(items / programs, 1.0, math.ceil(items / programs) if items < 4 * programs else 0) * item


def _sorted(
    tiles: Iterable[Tile], seconds: Callable[[Tile], float], band: int, accumulators: int = 1
) -> list[MatmulParams]:
    """The tiles as params, fastest first, then the fastest in other bands."""
    # An accumulator has whole swizzle widths of columns.
    ordered = sorted((tile for tile in tiles if tile[1] % (64 * accumulators) == 0), key=seconds)
    found = [MatmulParams(*tile, band=band) for tile in ordered]
    return found + [MatmulParams(*tile, band=other) for tile in ordered[:2] for other in _BANDS if other != band]
