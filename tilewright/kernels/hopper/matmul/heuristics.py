"""Configs of matmuls on Hopper, best guess first, by a model of the time that the tiles of each take."""

import dataclasses
import math
from collections.abc import Callable, Iterable

from tilewright.kernels.hopper.matmul.params import MatmulParams
from tilewright.ops.utils.known_devices import measured_rates

_RATES = measured_rates("H100")
"""The model takes every Hopper GPU for an H100 with its number of SMs: on the others nothing was measured."""

NARROW_WRITES = 0.9
"""Share of the rate of writes with tiles whose rows are not a multiple of 256 bytes, 192 columns."""

STORE_BYTES = 100e9
"""Bytes/s of the store of a CTA's tile, which no MMA overlaps with if all consumers share the tile."""

ITEM_SECONDS = 0.4e-6
"""Seconds of a work item besides its steps and its store: the first and the last MMAs overlap with nothing."""

TURNS_SHARE = 0.6
"""Share of both that is left where consumers take turns, but for the first item."""

BLOCK_K = 64

type Seconds = Callable[[MatmulParams], float]

# No cluster of tiles of 128 × 256 shares lhs: 8192³ ran at 749 TFLOP/s so, at 775 without a cluster, and at 790 with
# one that shares rhs (docs/notes/hopper_matmul.md).
_LARGE = (
    MatmulParams(128, 256, 4, 2, 1),
    MatmulParams(128, 256, 4, 1, 1),
    MatmulParams(256, 128, 4, 1, 2),
    MatmulParams(128, 128, 6, 1, 1),
    MatmulParams(128, 192, 4, 2, 1, turns=True),
    MatmulParams(128, 192, 4, 1, 1, turns=True),
)
_TURNS = (MatmulParams(128, 128, 5, 1, 1, turns=True),)
_SHORT = (MatmulParams(128, 128, 6, 2, 1, turns=True), MatmulParams(128, 128, 6, 1, 1, turns=True))
"""Only for sums of few steps: with many, a cluster of such tiles is slower than two CTAs without one (8192³: 1.59 ms
instead of 1.43)."""

_SHARING_LHS = (
    MatmulParams(128, 256, 4, 1, 2),
    MatmulParams(128, 192, 4, 1, 2, turns=True),
    MatmulParams(128, 128, 6, 1, 2, turns=True),
)
"""Only beside rows of rhs that an index names, which no cluster shares."""

_SMALL = (MatmulParams(64, 128, 8, 1, 1), MatmulParams(64, 64, 8, 1, 1), MatmulParams(64, 256, 5, 1, 1))
_BANDS = (8, 4, 1)


def dense_candidates(m: int, n: int, k: int, num_sms: int, accumulators: int = 1) -> list[MatmulParams]:
    """Configs of one matmul."""

    def seconds(tile: MatmulParams) -> float:
        computing = _seconds(tile, math.ceil(m / (tile.block_m * tile.cluster_m)), n, k, num_sms, accumulators)
        return _both(computing, _memory(tile, m * k + k * n * accumulators, m * n))

    return _sorted((*_LARGE, *_TURNS, *_SMALL), seconds, _BANDS[0], accumulators)


def rows_candidates(rows: int, groups: int, n: int, k: int, num_sms: int, accumulators: int = 1) -> list[MatmulParams]:
    """Configs of the rows of groups, each of which has a matrix of ``[k, n]``; sizes of groups are not known."""
    # Of few rows most have a group with others: each of some experts is chosen by several tokens.
    used = max(min(groups, rows // 8), 1)

    def seconds(tile: MatmulParams) -> float:
        # A group's last tile of rows has any number of them.
        tiles = used * max(rows / used / (tile.block_m * tile.cluster_m) + 0.5, 1.0)
        memory = _memory(tile, used * k * n * accumulators + rows * k, rows * n)
        return _both(_seconds(tile, tiles, n, k, num_sms, accumulators), memory)

    # Few rows: what a matrix is read for is over after one tile, and neighbours read its next columns.
    # At 256 groups of 16384 rows band 1 took 2.68 ms forward instead of 2.76 (docs/notes/hopper_matmul.md).
    band = _BANDS[0] if rows / used > 128 else _BANDS[-1]
    return _sorted((*_LARGE, *_TURNS, *_SMALL), seconds, band, accumulators)


def reduction_candidates(
    rows: int, groups: int, m: int, n: int, num_sms: int, lhs_indexed: bool = False, rhs_indexed: bool = False
) -> list[MatmulParams]:
    """Configs of a sum of outer products over the rows of each group, of ``[m, n]``.

    Args:
      lhs_indexed, rhs_indexed: whether an index names the rows of an operand.
    """
    depth = rows / max(groups, 1)

    def seconds(tile: MatmulParams) -> float:
        of_group = math.ceil(m / (tile.block_m * tile.cluster_m))
        # A group's last step has any number of rows.
        memory = _memory(tile, rows * (m + n), groups * m * n)
        return _both(_seconds(tile, groups * of_group, n, depth + BLOCK_K / 2, num_sms, 1), memory)

    # The less there is to load, the more the order of the stores matters.
    every = (*_LARGE, *_SHORT, *_SHARING_LHS) if rhs_indexed else (*_LARGE, *_SHORT)
    tiles = [tile for tile in every if not shared_rows_reasons(tile, lhs_indexed, rhs_indexed)]
    return _sorted(tiles, seconds, _BANDS[0] if depth > 512 else _BANDS[1] if depth > 128 else _BANDS[2])


def shared_rows_reasons(params: MatmulParams, lhs_indexed: bool, rhs_indexed: bool) -> list[str]:
    """The reason why a sum over rows that an index names does not take a config."""
    if (params.cluster_n > 1 and lhs_indexed) or (params.cluster_m > 1 and rhs_indexed):
        return [f"a cluster shares what TMA loads, and no rows that an index names, got {params}"]
    return []


def _memory(tile: MatmulParams, read: float, written: float) -> float:
    """Time of global memory for so many elements."""
    narrow = NARROW_WRITES if tile.block_n % 128 else 1.0
    return 2 * (read / _RATES.read + written / (_RATES.write * narrow))


def _both(computing: float, memory: float) -> float:
    """Time of what overlaps but for a part of the shorter."""
    return max(computing, memory) + 0.3 * min(computing, memory)


def _seconds(tile: MatmulParams, row_tiles: float, n: int, k: float, num_sms: int, accumulators: int) -> float:
    """Time of all items, by the slower of tensor cores and L2 cache in each step."""
    columns = tile.block_n // accumulators
    programs = num_sms // (tile.cluster_m * tile.cluster_n)
    items = row_tiles * math.ceil(n / (columns * tile.cluster_n))
    loaded = 2 * BLOCK_K * (tile.block_m / tile.cluster_n + tile.block_n / tile.cluster_m)
    step = max(2 * tile.block_m * tile.block_n * BLOCK_K / _RATES.sm_flops, loaded / _RATES.sm_l2)
    rest = 2 * tile.block_m * columns / STORE_BYTES + ITEM_SECONDS
    # Of many rounds the last one, which is not whole, weighs little.
    rounds = items / programs if items > 8 * programs else math.ceil(items / programs)
    return rounds * k / BLOCK_K * step + rest * (1 + (rounds - 1) * (TURNS_SHARE if tile.turns else 1))


def _sorted(tiles: Iterable[MatmulParams], seconds: Seconds, band: int, accumulators: int = 1) -> list[MatmulParams]:
    """The tiles, fastest first, then the fastest in other bands."""
    # An accumulator has whole swizzle widths of columns.
    ordered = sorted((tile for tile in tiles if tile.block_n % (64 * accumulators) == 0), key=seconds)
    found = [dataclasses.replace(tile, band=band) for tile in ordered]
    others = [other for other in _BANDS if other != band]
    return found + [dataclasses.replace(tile, band=other) for tile in ordered[:2] for other in others]
