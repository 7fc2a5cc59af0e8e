"""The shared memory of the kernel for dQ alone, up to head_dim 128."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from tilewright.kernels.flash_attention.hopper.bias_tiles import bias_ring
from tilewright.kernels.flash_attention.hopper.params import CONSUMERS
from tilewright.kernels.hopper.ring import RingPlan
from tilewright.kernels.hopper.shared import SharedTile
from tilewright.kernels.hopper.tiles import ROWS


class QueryScratch[R, M](NamedTuple):
    """Shared memory of the kernel for dQ alone: plans of rings and a type or, in the kernel, what they bind.

    Attributes:
      q, d_out, statistics: tiles of a work item.
      k, v: tiles of a step. The ring of V also brings the rows of O, which delta is computed from.
      bias: tiles of a step, of each consumer; None unless the bias passes through shared memory.
      dq: a buffer for each consumer, where its dQ waits for its TMA store.
    """

    q: R
    d_out: R
    statistics: R
    k: R
    v: R
    bias: R | None
    dq: M


@dataclasses.dataclass(frozen=True, slots=True)
class QueryPlan:
    """The shared memory of the kernel for dQ alone: 128 queries per work item, ``block_k`` keys per step.

    Attributes:
      bias_dtype: of a bias that passes through shared memory, or None.
    """

    block_k: int
    num_stages: int
    head_dim: int
    value_dim: int
    dtype: DTypeLike
    panelled: bool = False
    bias_dtype: DTypeLike | None = None

    @property
    def block_q(self) -> int:
        return CONSUMERS * ROWS

    def _tile(self, rows: int, columns: int) -> SharedTile:
        return SharedTile((rows, columns), self.dtype, panelled=self.panelled)

    def _ring(self, rows: int, columns: int, stages: int) -> RingPlan:
        return RingPlan(self._tile(rows, columns), stages, CONSUMERS)

    def scratch(self) -> QueryScratch[RingPlan, object]:
        """The rings, and the scratch type of the buffer."""
        bias_dtype = self.bias_dtype
        return QueryScratch(
            q=self._ring(self.block_q, self.head_dim, 1),
            d_out=self._ring(self.block_q, self.value_dim, 1),
            statistics=RingPlan(SharedTile((2, self.block_q), jnp.float32, 0), 1, CONSUMERS),
            k=self._ring(self.block_k, self.head_dim, self.num_stages),
            v=self._ring(self.block_k, self.value_dim, self.num_stages),
            bias=None if bias_dtype is None else bias_ring(ROWS, self.block_k, bias_dtype, 1, CONSUMERS),
            dq=self._tile(ROWS, self.head_dim).stack(CONSUMERS),
        )

    @property
    def out_steps(self) -> int:
        """Loads that bring an item's rows of O, through the ring of V."""
        return self.block_q // self.block_k
