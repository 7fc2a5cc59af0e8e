"""The static half of a matmul kernel: its tiles in shared memory."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from tilewright.kernels.hopper.limits import BARRIER_BYTES, SHARED_BYTES, WARPGROUP_THREADS, WGMMA_M
from tilewright.kernels.hopper.matmul.operands import OperandLayout
from tilewright.kernels.hopper.matmul.params import BLOCK_BYTES, MatmulParams
from tilewright.kernels.hopper.matmul.schedule import TileShape
from tilewright.kernels.hopper.ring import RingPlan
from tilewright.kernels.hopper.shared import SharedTile
from tilewright.kernels.op.footprint import Footprint


@dataclasses.dataclass(frozen=True)
class MatmulPlan:
    """Tiles and shared memory of a kernel.

    Attributes:
      lhs: its layout.
      rhs: the layouts of the operands that lhs is multiplied with, each of which has an accumulator.
      out_dtype: of all results.
      reserved: bytes of shared memory that a kernel has besides.
    """

    params: MatmulParams
    lhs: OperandLayout
    rhs: tuple[OperandLayout, ...]
    out_dtype: Any
    reserved: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "out_dtype", jnp.dtype(self.out_dtype))
        if self.shared_bytes > SHARED_BYTES:
            raise ValueError(f"takes {self.shared_bytes} bytes of shared memory, of {SHARED_BYTES}: {self.params}")

    @functools.cached_property
    def gathers(self) -> bool:
        """True if the rows of an operand are those that an index names."""
        return any(layout.indexed for layout in (self.lhs, *self.rhs))

    @functools.cached_property
    def columns(self) -> int:
        """Columns of an accumulator: the operands of rhs share the CTA's."""
        return self.params.block_n // len(self.rhs)

    @functools.cached_property
    def tile(self) -> TileShape:
        """The part of each result that a CTA computes."""
        params = self.params
        return TileShape(params.block_m, self.columns, params.cluster_m, params.cluster_n, params.band)

    @functools.cached_property
    def stages(self) -> RingPlan:
        """The ring of the operands: lhs, then those of rhs."""
        params = self.params
        # The CTAs of a cluster along n have the same rows, those along m the same columns. In turns each consumer reads
        # the whole tile of its own items; else they split lhs, and all read rhs.
        parts = [self.lhs.part(params.block_m, params.sharers, params.cluster_n > 1)]
        parts += [layout.part(self.columns, 1, params.cluster_m > 1) for layout in self.rhs]
        return RingPlan(tuple(parts), params.num_stages, params.sharers, cluster=params.cluster, owners=params.owners)

    @functools.cached_property
    def store_tile(self) -> SharedTile:
        """A part of the result: the rows of one wgmma, and a swizzle width of columns."""
        return SharedTile((WGMMA_M, BLOCK_BYTES // self.out_dtype.itemsize), self.out_dtype, BLOCK_BYTES, True)

    @functools.cached_property
    def store_buffers(self) -> int:
        """Parts of a consumer's tile that it writes while TMA stores others: as many as it has, if there is memory."""
        rows, columns = self.store_tile.shape
        parts = self.params.consumer_rows // rows * (self.columns // columns)
        # At least two, so that a part is written while TMA stores the one before.
        # Only what the stages leave: twice as many buffers with a stage less were slower in sums over the rows of 64
        # groups, 1.06 ms for 1.00 (docs/notes/hopper_matmul.md).
        free = SHARED_BYTES - self.stages.shared_bytes - self._barrier_bytes - self.reserved
        return max(min(parts, free // self.store_tile.stack_bytes(self.params.consumers)), min(parts, 2))

    @functools.cached_property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA."""
        stores = self.store_tile.stack_bytes(self.params.consumers * self.store_buffers)
        return self.stages.shared_bytes + stores + self._barrier_bytes + self.reserved

    @functools.cached_property
    def _barrier_bytes(self) -> int:
        """Bytes of the barriers besides the ring's: of masks, and of turns."""
        # Counted whether or not the kernel has them: which it has follows from the schedule, which a plan does not
        # know.
        return (self.params.num_stages + self.params.consumers) * BARRIER_BYTES

    def footprint(self, num_sms: int) -> Footprint:
        """Blocks, threads and shared memory; the grid is persistent."""
        return Footprint(num_sms, (self.params.consumers + 1) * WARPGROUP_THREADS, self.shared_bytes)


def plan_reasons(plan: Callable[[], object]) -> list[str]:
    """The reason why plans cannot be made, which is their ``ValueError``; empty if they can."""
    try:
        plan()
    except ValueError as error:
        return [str(error)]
    return []
