"""The config of a matmul on Hopper."""

import dataclasses

from tilewright.ops.utils.stable_ids import stable_id

BLOCK_BYTES = 128
"""Bytes of a K step in a row of a K-major operand: the widest swizzle."""

MAX_ACCUMULATOR = 64 * 256
"""Elements of all accumulators of a warpgroup: 128 registers of each thread."""


@stable_id("tilewright/hopper.MatmulParams")
@dataclasses.dataclass(frozen=True, slots=True)
class MatmulParams:
    """The config of the Hopper matmul.

    Attributes:
      block_m, block_n: rows and columns of a CTA's tile. 64 rows have one consumer warpgroup, 128 and 256 have two,
        and 192 have three.
      num_stages: of the ring.
      cluster_m, cluster_n: CTAs of a cluster along both; those along m share tiles of rhs, those along n of lhs.
      store_buffers: parts of a consumer's tile of the result that shared memory holds while TMA stores them.
      band: tiles of rows (of a cluster) that take the same columns one after another, so that they find them in the L2
        cache.
    """

    block_m: int = 128
    block_n: int = 256
    num_stages: int = 4
    cluster_m: int = 1
    cluster_n: int = 1
    band: int = 8
    store_buffers: int = 2

    def __post_init__(self) -> None:
        if self.block_m not in (64, 128, 192, 256):
            raise ValueError(f"block_m must be 64, 128, 192 or 256, got {self}")
        if self.block_n not in (64, 128, 192, 256):
            raise ValueError(f"block_n must be 64, 128, 192 or 256, got {self}")
        if self.block_m // self.consumers * self.block_n > MAX_ACCUMULATOR:
            raise ValueError(f"a consumer's accumulators must fit 128 registers of a thread, got {self}")
        if self.consumers == 3 and self.block_n > 128:
            raise ValueError(f"three consumers have 160 registers each, which is too few, got {self}")
        if (self.cluster_m, self.cluster_n) not in ((1, 1), (1, 2), (2, 1)):
            raise ValueError(f"a cluster has one CTA, or two along m or n, got {self}")
        if self.store_buffers not in (2, 4, 8):
            raise ValueError(f"store_buffers must be 2, 4 or 8, got {self}")
        if not 2 <= self.num_stages <= 32 or self.band < 1:
            raise ValueError(f"num_stages must be from 2 to 32, and band positive, got {self}")

    @property
    def consumers(self) -> int:
        """Consumer warpgroups of a CTA."""
        return {64: 1, 128: 2, 192: 3, 256: 2}[self.block_m]

    @property
    def consumer_rows(self) -> int:
        """Rows of a consumer's accumulator."""
        return self.block_m // self.consumers

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.cluster_m * self.cluster_n
