"""Configs of the Triton kernels of attention: tiles and launches, as they are chosen and tuned."""

import dataclasses

from tilewright.kernels.triton.limits import MIN_DOT
from tilewright.ops.utils.stable_ids import stable_id


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@stable_id("tilewright/flash_attention.Tiles", formerly=("tilewright.kernels.flash_attention.triton:Tiles",))
@dataclasses.dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles and launch of one kernel.

    Attributes:
      block_q, block_k: queries and keys per tile.
      num_warps: warps per program.
      num_stages: stages of its pipelined loops.
      tma: loads tiles by TMA where that pays: on compute capabilities 9 to 11, if rows have a multiple of 16 bytes.
    """

    block_q: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 2
    tma: bool = False

    def __post_init__(self) -> None:
        for name, minimum, maximum in (
            ("block_q", MIN_DOT, 256), ("block_k", MIN_DOT, 256), ("num_warps", 1, 16),
        ):  # fmt: skip
            value = getattr(self, name)
            # Triton's tiles have sides that are powers of two.
            if not _is_int(value) or value & (value - 1) or not minimum <= value <= maximum:
                raise ValueError(f"{name} must be a power of two from {minimum} to {maximum}, got {self}")
        if not _is_int(self.num_stages) or not 1 <= self.num_stages <= 8:
            raise ValueError(f"num_stages must be from 1 to 8, got {self}")
        if not isinstance(self.tma, bool):
            raise ValueError(f"tma must be true or false, got {self}")

    def shared_bytes(self, resident: int, streamed: int, depth: int, itemsize: int) -> int:
        """Estimate for a program: ``resident`` rows that stay, ``streamed`` rows a stage, ``depth`` elements a row."""
        return (resident + self.num_stages * streamed) * depth * itemsize


@stable_id(
    "tilewright/flash_attention.TritonForwardParams",
    formerly=("tilewright.kernels.flash_attention.triton:TritonForwardParams",),
)
@dataclasses.dataclass(frozen=True, slots=True)
class TritonForwardParams:
    """Config of the forward kernel."""

    tiles: Tiles = Tiles(128, 64, 4, 3)


@stable_id(
    "tilewright/flash_attention.TritonBackwardParams",
    formerly=("tilewright.kernels.flash_attention.triton:TritonBackwardParams",),
)
@dataclasses.dataclass(frozen=True, slots=True)
class TritonBackwardParams:
    """Config of the backward pass.

    Attributes:
      key_value: tiles of the kernel of dK and dV, which goes through tiles of queries.
      query: tiles of the kernel of dQ, which goes through tiles of keys; unused if not deterministic.
      deterministic: bitwise repeatable: dQ has a kernel of its own, for two more matmuls. Otherwise the kernel of dK
        and dV adds to dQ in float32, in no fixed order.
    """

    key_value: Tiles = Tiles(64, 128, 8, 2)
    query: Tiles = Tiles(128, 64, 8, 2)
    deterministic: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.deterministic, bool):
            raise ValueError(f"deterministic must be true or false, got {self}")
