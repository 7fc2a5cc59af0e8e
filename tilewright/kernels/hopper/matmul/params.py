"""The config of a matmul on Hopper."""

import dataclasses

from tilewright.ops.utils.stable_ids import stable_id

BLOCK_BYTES = 128
"""Bytes of a K step in a row of a K-major operand: the widest swizzle."""

MAX_ACCUMULATOR = 64 * 256
"""Elements of all accumulators of a warpgroup: 128 registers of each thread."""

MAX_TURNS_ACCUMULATOR = 64 * 384
"""The same where consumers take turns: 192 registers."""


@stable_id("tilewright/hopper.MatmulParams")
@dataclasses.dataclass(frozen=True, slots=True)
class MatmulParams:
    """The config of the Hopper matmul.

    Attributes:
      block_m, block_n: rows and columns of a tile. Consumer warpgroups share its rows: 64 rows have one of them, 128
        and 256 have two, and 192 have three.
      num_stages: of the ring.
      cluster_m, cluster_n: CTAs of a cluster along both; those along m share tiles of rhs, those along n of lhs.
      band: tiles of rows (of a cluster) that take the same columns one after another, so that they find them in the L2
        cache.
      turns: whether each of two consumers has tiles of its own, every other one of the CTA's, so that the epilogue and
        the store of one run beside the MMAs of the other.
    """

    block_m: int = 128
    block_n: int = 256
    num_stages: int = 4
    cluster_m: int = 1
    cluster_n: int = 1
    band: int = 8
    turns: bool = False

    def __post_init__(self) -> None:
        if self.block_m not in (64, 128, 192, 256):
            raise ValueError(f"block_m must be 64, 128, 192 or 256, got {self}")
        if self.block_n not in (64, 128, 192, 256):
            raise ValueError(f"block_n must be 64, 128, 192 or 256, got {self}")
        most = MAX_TURNS_ACCUMULATOR if self.turns else MAX_ACCUMULATOR
        if self.consumer_rows * self.block_n > most:
            raise ValueError(f"a consumer's accumulators must fit {most // 128} registers of a thread, got {self}")
        if self.consumers == 3 and self.block_n > 128:
            raise ValueError(f"three consumers have 160 registers each, which is too few, got {self}")
        if (self.cluster_m, self.cluster_n) not in ((1, 1), (1, 2), (2, 1)):
            raise ValueError(f"a cluster has one CTA, or two along m or n, got {self}")
        if not 2 <= self.num_stages <= 32 or self.band < 1:
            raise ValueError(f"num_stages must be from 2 to 32, and band positive, got {self}")

    @property
    def consumers(self) -> int:
        """Consumer warpgroups of a CTA."""
        return 2 if self.turns else {64: 1, 128: 2, 192: 3, 256: 2}[self.block_m]

    @property
    def consumer_rows(self) -> int:
        """Rows of a consumer's accumulator."""
        return self.block_m // self.sharers

    @property
    def sharers(self) -> int:
        """Consumers that share the rows of a tile."""
        return 1 if self.turns else self.consumers

    @property
    def owners(self) -> int:
        """Consumers that have tiles of their own, in turns; 1 where they share them."""
        return self.consumers // self.sharers

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.cluster_m * self.cluster_n
