"""Configs of the forward and backward kernels on Hopper, as they are chosen and tuned: tiles, stages, schedules."""

import abc
import dataclasses

from tilewright.kernels.hopper.tiles import ROWS
from tilewright.ops.utils.stable_ids import stable_id

CONSUMERS = 2
"""Consumer warpgroups of a backward kernel, which hold dK and dV, or dQ where a kernel computes only that."""


class BackwardParams(abc.ABC):
    """The properties that the params of all backward kernels share."""

    __slots__ = ()

    deterministic: bool

    @property
    @abc.abstractmethod
    def block_q(self) -> int:
        """Queries per step of the kernel for dK and dV."""

    @property
    @abc.abstractmethod
    def block_k(self) -> int:
        """Keys per work item of the kernel for dK and dV."""


@stable_id(
    "tilewright/flash_attention.HopperForwardParams",
    formerly=("tilewright.kernels.flash_attention.pallas_gpu_forward:HopperForwardParams",),
)
@dataclasses.dataclass(frozen=True, slots=True)
class HopperForwardParams:
    """Tile sizes and schedule of the forward kernel.

    Attributes:
      block_q: query rows per CTA, 64 for each consumer warpgroup.
      block_k: keys per step.
      num_stages: stages of the rings of K and of V.
      persistent: one CTA per SM, which goes on to its next tile of queries while the output of the last one is being
        stored; otherwise one CTA per tile.
      ping_pong: whether consumers take turns to issue MMAs, so that the softmax of one overlaps MMAs of another.
      ahead: whether the first step of the next item is computed beside the last PV of an item, if it is persistent and
        shared memory allows; otherwise the next queries are only loaded, and P need not stay in registers meanwhile.
    """

    block_q: int = 128
    block_k: int = 128
    num_stages: int = 2
    persistent: bool = True
    ping_pong: bool = False
    ahead: bool = True

    def __post_init__(self) -> None:
        if self.block_q not in (128, 192):
            raise ValueError(f"two or three warpgroups of 64 rows each, got {self.block_q=}")
        # Keys are the K of PV, 16 for 16-bit operands of wgmma, and the N of QKᵀ, which goes to 256.
        if self.block_k % 16 or not 16 <= self.block_k <= 256:
            raise ValueError(f"a tile has a multiple of 16 keys, 256 at most, got {self.block_k=}")
        if self.num_stages < 2:
            raise ValueError(f"the producer needs a stage ahead of the consumers, got {self.num_stages=}")

    @property
    def consumers(self) -> int:
        return self.block_q // ROWS


@stable_id(
    "tilewright/flash_attention.HopperBackwardParams",
    formerly=("tilewright.kernels.flash_attention.pallas_gpu_backward:HopperBackwardParams",),
)
@dataclasses.dataclass(frozen=True, slots=True)
class HopperBackwardParams(BackwardParams):
    """Tile sizes of the backward kernels in which a warpgroup holds both dK and dV of its keys.

    Attributes:
      block_q: queries per step of the kernel for dK and dV.
      num_stages: stages of the rings of Q and of dO.
      deterministic: bitwise repeatable: dQ by a kernel of its own, which takes two matmuls more.
    """

    block_q: int = 64
    num_stages: int = 2
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.block_q not in (64, 128):
            raise ValueError(f"a step takes 64 or 128 queries, got {self.block_q=}")
        if self.num_stages < 1:
            raise ValueError(f"the rings need a stage, got {self.num_stages=}")

    @property
    def block_k(self) -> int:
        return CONSUMERS * ROWS


BLOCK = ROWS
"""Keys, and queries, of a step: the M of wgmma and the N of the MMAs for scores."""


@stable_id(
    "tilewright/flash_attention.WideBackwardParams",
    formerly=("tilewright.kernels.flash_attention.pallas_gpu_backward_wide:WideBackwardParams",),
)
@dataclasses.dataclass(frozen=True, slots=True)
class WideBackwardParams(BackwardParams):
    """Tile sizes and stages of the backward kernels for wide heads.

    Attributes:
      deterministic: bitwise repeatable: dQ by a kernel of its own, which takes two matmuls more.
      query_stages: stages of the ring of Q in the kernel for dK and dV.
      d_out_stages: the same of dO; with two, dP = dO·Vᵀ runs a step ahead.
      d_query_columns: columns of dQ per TMA reduction; unused if deterministic.
      d_query_buffers: TMA reductions of a warpgroup that may be in flight; unused if deterministic.
      key_stages, value_stages: stages of the rings of K and V in the kernel for dQ; used only if deterministic.
    """

    deterministic: bool = True
    query_stages: int = 2
    d_out_stages: int = 2
    d_query_columns: int = 32
    d_query_buffers: int = 1
    key_stages: int = 2
    value_stages: int = 1

    def __post_init__(self) -> None:
        if self.query_stages < 2 or self.d_out_stages < 1:
            raise ValueError(f"queries want 2 stages, d_out 1, got {self.query_stages=}, {self.d_out_stages=}")
        if self.key_stages < 2 or self.value_stages < 1:
            raise ValueError(f"keys want 2 stages, values 1, got {self.key_stages=}, {self.value_stages=}")
        if self.d_query_columns not in (16, 32, 64):
            raise ValueError(f"a reduction takes 16, 32 or 64 columns, got {self.d_query_columns=}")
        if self.d_query_buffers < 1:
            raise ValueError(f"a reduction needs a buffer, got {self.d_query_buffers=}")

    @property
    def block_q(self) -> int:
        """Queries per step of the kernel for dK and dV."""
        return BLOCK

    @property
    def block_k(self) -> int:
        """Keys per CTA of the kernel for dK and dV, and per step of the kernel for dQ."""
        return BLOCK

    @property
    def query_rows(self) -> int:
        """Queries per CTA of the kernel for dQ."""
        return CONSUMERS * BLOCK
