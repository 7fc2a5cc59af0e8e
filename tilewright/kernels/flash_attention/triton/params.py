"""How the kernels in Triton are tiled and launched: the configs that are chosen and tuned."""

import dataclasses

from tilewright.kernels.triton.limits import MIN_DOT
from tilewright.ops.utils.stable_ids import stable_id


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@stable_id("tilewright/flash_attention.Tiles", formerly=("tilewright.kernels.flash_attention.triton:Tiles",))
@dataclasses.dataclass(frozen=True, slots=True)
class Tiles:
    """One kernel's tiles and launch.

    Attributes:
      block_q, block_k: queries and keys per tile.
      num_warps: warps per program.
      num_stages: stages of its pipelines.
      tma: whether tiles are loaded by TMA where it can be had: on compute capability 9.0 and up, for rows of a whole
        number of 16 bytes.
    """

    block_q: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 2
    tma: bool = False

    def __post_init__(self) -> None:
        for name, least, most in (
            ("block_q", MIN_DOT, 256), ("block_k", MIN_DOT, 256), ("num_warps", 1, 16),
        ):  # fmt: skip
            value = getattr(self, name)
            if not _is_int(value) or value & (value - 1) or not least <= value <= most:
                raise ValueError(f"{name} must be a power of two from {least} to {most}, got {self}")
        if not _is_int(self.num_stages) or not 1 <= self.num_stages <= 8:
            raise ValueError(f"num_stages must be from 1 to 8, got {self}")
        if not isinstance(self.tma, bool):
            raise ValueError(f"tma must be true or false, got {self}")

    def shared_bytes(self, resident: int, streamed: int, depth: int, itemsize: int) -> int:
        """About what a program takes: rows that stay and rows that stream, of so many elements together."""
        return (resident + self.num_stages * streamed) * depth * itemsize


@stable_id(
    "tilewright/flash_attention.TritonForwardParams",
    formerly=("tilewright.kernels.flash_attention.triton:TritonForwardParams",),
)
@dataclasses.dataclass(frozen=True, slots=True)
class TritonForwardParams:
    """How the forward kernel runs."""

    tiles: Tiles = Tiles(128, 64, 4, 3)


@stable_id(
    "tilewright/flash_attention.TritonBackwardParams",
    formerly=("tilewright.kernels.flash_attention.triton:TritonBackwardParams",),
)
@dataclasses.dataclass(frozen=True, slots=True)
class TritonBackwardParams:
    """How the backward pass runs.

    Attributes:
      key_value: of the kernel of dK and dV, which goes through tiles of queries.
      query: of that of dQ, which goes through tiles of keys; unused if not deterministic.
      deterministic: bitwise repeatable: dQ by a kernel of its own, two matrix products more. Otherwise the kernel of dK
        and dV adds to dQ in float32, in no fixed order.
    """

    key_value: Tiles = Tiles(64, 128, 8, 2)
    query: Tiles = Tiles(128, 64, 8, 2)
    deterministic: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.deterministic, bool):
            raise ValueError(f"deterministic must be true or false, got {self}")
