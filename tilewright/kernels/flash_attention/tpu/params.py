"""Configs of the kernels of attention on TPUs, and the blocks that they make of a call's lengths."""

import dataclasses

from tilewright.kernels.tpu.device import LANES
from tilewright.ops.utils.stable_ids import stable_id

MAX_BLOCK = 2048
"""Largest block: its steps are unrolled, and compiling larger ones takes minutes."""


@stable_id("tilewright/flash_attention.TpuTiles")
@dataclasses.dataclass(frozen=True, slots=True)
class TpuTiles:
    """Config of either direction.

    A step of the grid computes a block of queries against a block of keys, in units whose matmuls overlap with the
    softmax of the unit before.

    Attributes:
      block_q, block_k: at most so many queries and keys in a block; a call's blocks are about equal, of whole 128.
      unit_q, unit_k: queries and keys of a unit.
      sums_by_matmul: in the forward pass the sums of the probabilities are columns of their matmul with the values,
        which are free where the values do not fill the width of the systolic array.
    """

    block_q: int = 1024
    block_k: int = 1024
    unit_q: int = 256
    unit_k: int = 1024
    sums_by_matmul: bool = True

    def __post_init__(self) -> None:
        for name in ("block_q", "block_k", "unit_q", "unit_k"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value % LANES or not 0 < value <= MAX_BLOCK:
                raise ValueError(f"{name} must be a multiple of {LANES} up to {MAX_BLOCK}, got {self}")
        if not isinstance(self.sums_by_matmul, bool):
            raise ValueError(f"sums_by_matmul must be true or false, got {self}")


def balanced_block(length: int, largest: int) -> int:
    """The block that splits ``length`` into the fewest blocks of at most ``largest``, with the least padding."""
    blocks = -(-length // largest)
    return -(-length // (blocks * LANES)) * LANES


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """A part of a block: its first query and key in the block, and how many they are."""

    row: int
    rows: int
    column: int
    columns: int


def units(block_q: int, block_k: int, unit_q: int, unit_k: int) -> list[Unit]:
    """The units of a block, one behind the other in a column of them."""
    return [
        Unit(row, min(unit_q, block_q - row), column, min(unit_k, block_k - column))
        for column in range(0, block_k, unit_k)
        for row in range(0, block_q, unit_q)
    ]
