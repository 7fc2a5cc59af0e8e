"""The shared memory of the kernels of wide heads on Hopper: their rings, tiles and bytes."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from tilewright.kernels.flash_attention.hopper.bias_gradient import AnyBiasGradient
from tilewright.kernels.flash_attention.hopper.d_query import STRIP
from tilewright.kernels.flash_attention.hopper.params import (
    BLOCK,
    CONSUMERS,
    WideBackwardParams,
)
from tilewright.kernels.flash_attention.hopper.scores import bias_ring
from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.limits import SHARED_BYTES
from tilewright.kernels.hopper.ring import RingPlan
from tilewright.kernels.hopper.shared import SharedTile, aligned_bytes

WIDE_TILE = (BLOCK, BLOCK)
"""Shape of a tile of S, P, dP and dS in the kernels for wide heads."""


class WideKeyValueScratch[R, M](NamedTuple):
    """Shared memory of the kernel for dK and dV of wide heads: plans and types or, in the kernel, what they bind.

    Attributes:
      k, v: tiles of a work item.
      q, d_out, minus_lse, minus_delta: tiles of a step.
      p: from the dV to the dK warpgroup, P or, where dS needs another factor, that.
      ds: from the dK warpgroup to both MMAs for dQ; None if deterministic.
      p_dv: P as an operand of dV, where the ring holds another factor; else None.
      bias: tiles of a step; None unless the bias passes through shared memory.
      dq: strips of dQ that wait for their TMA reductions; None if deterministic.
      d_bias: a buffer for gradients of a bias that TMA stores or adds; else None.
    """

    k: R
    v: R
    q: R
    d_out: R
    minus_lse: R
    minus_delta: R
    bias: R | None
    p: R
    ds: R | None
    p_dv: M | None
    dq: M | None
    d_bias: M | None


class WideQueryScratch[R](NamedTuple):
    """Rings of the kernel for dQ of wide heads: Q and dO have a stage for each warpgroup, K and V those of a step.

    The ring of the bias, which has a stage for each warpgroup, is None unless the bias passes through shared memory.
    """

    q: R
    d_out: R
    k: R
    v: R
    bias: R | None


@dataclasses.dataclass(frozen=True, slots=True)
class WideBackwardPlan:
    """The shared memory of the kernels for wide heads; ``head_dim`` and ``value_dim`` are padded ones.

    Attributes:
      bias_dtype: of a bias that may pass through shared memory (`BiasTiles`), or None.
    """

    params: WideBackwardParams
    head_dim: int
    value_dim: int
    dtype: DTypeLike
    bias_gradient: AnyBiasGradient | None = None
    panelled: bool = False
    bias_dtype: DTypeLike | None = None

    @property
    def stages_bias(self) -> bool:
        """True if the bias passes through shared memory, where it fits."""
        return self.bias_dtype is not None and self._bytes(True) <= SHARED_BYTES

    def _bias_ring(self, staged: bool, consumers: int) -> RingPlan | None:
        return bias_ring(*WIDE_TILE, self.bias_dtype, 1, consumers) if staged and self.bias_dtype is not None else None

    @property
    def fuses_dq(self) -> bool:
        """True if the kernel for dK and dV computes dQ, too, and adds it in global memory."""
        return not self.params.deterministic

    @property
    def qk_tile(self) -> SharedTile:
        return SharedTile((BLOCK, self.head_dim), self.dtype, panelled=self.panelled)

    @property
    def v_tile(self) -> SharedTile:
        """A tile of V or dO."""
        return SharedTile((BLOCK, self.value_dim), self.dtype, panelled=self.panelled)

    @property
    def p_tile(self) -> SharedTile:
        """A tile of P in shared memory, where it is an operand beside dO: of the same swizzle."""
        return SharedTile(WIDE_TILE, self.dtype, self.v_tile.swizzle)

    @property
    def ds_tile(self) -> SharedTile:
        """A tile of dS in shared memory, where it is an operand beside Q and K: of the same swizzle."""
        return SharedTile(WIDE_TILE, self.dtype, self.qk_tile.swizzle)

    def scratch(self, separate_ds_factor: bool) -> WideKeyValueScratch[RingPlan, object]:
        """The rings and scratch types of the kernel for dK and dV.

        Args:
          separate_ds_factor: ``has_separate_ds_factor`` of the call.
        """
        return self._key_value_rings(self.stages_bias)._replace(
            p_dv=self.p_tile.scratch(1) if separate_ds_factor else None,
            dq=plgpu.SMEM(self.dq_staging_shape, jnp.float32) if self.fuses_dq else None,
            d_bias=None if self.bias_gradient is None else self.bias_gradient.staging(1),
        )

    def _key_value_rings(self, staged: bool) -> WideKeyValueScratch[RingPlan, object]:
        params, row_tile = self.params, SharedTile((BLOCK,), jnp.float32)
        return WideKeyValueScratch(
            # Both warpgroups read K where both compute columns of dQ.
            k=RingPlan(self.qk_tile, 1, 1 + self.fuses_dq),
            v=RingPlan(self.v_tile, 1, 1),
            # 1 consumer, although both warpgroups read Q: the dK warpgroup releases it after dS, which needs P, so S
            # has read Q.
            q=RingPlan(self.qk_tile, params.query_stages, 1),
            d_out=RingPlan(self.v_tile, params.d_out_stages, CONSUMERS),
            # As many stages as Q and dO, beside which they are loaded and used.
            minus_lse=RingPlan(row_tile, params.query_stages, 1),
            minus_delta=RingPlan(row_tile, params.d_out_stages, 1),
            bias=self._bias_ring(staged, 1),
            # The writer of P, and that of dS, may read it as an operand, too, but releases nothing: it writes the next
            # tile only behind the wait for its own MMAs.
            p=RingPlan(self.p_tile, 1, 1, writers=1),
            ds=RingPlan(self.ds_tile, 1, 1, writers=1) if self.fuses_dq else None,
            p_dv=None,
            dq=None,
            d_bias=None,
        )

    def query_scratch(self) -> WideQueryScratch[RingPlan]:
        """The rings of the kernel for dQ."""
        return self._query_rings(self.stages_bias)

    def _query_rings(self, staged: bool) -> WideQueryScratch[RingPlan]:
        return WideQueryScratch(
            q=RingPlan(self.qk_tile, CONSUMERS, 1),
            d_out=RingPlan(self.v_tile, CONSUMERS, 1),
            k=RingPlan(self.qk_tile, self.params.key_stages, CONSUMERS),
            v=RingPlan(self.v_tile, self.params.value_stages, CONSUMERS),
            bias=self._bias_ring(staged, CONSUMERS),
        )

    @property
    def d_query_split(self) -> int:
        """The column of dQ where the dK warpgroup's part begins: operands can be cut where a swizzle repeats."""
        width = (self.qk_tile.swizzle or 2) // 2
        return -(-self.head_dim // (2 * width)) * width

    @property
    def dq_staging_shape(self) -> tuple[int, ...]:
        params = self.params
        return CONSUMERS, params.d_query_buffers, params.d_query_columns // STRIP, BLOCK, STRIP

    @property
    def reason(self) -> str:
        """Reason why a warpgroup's part of dQ cannot be cut into reductions; empty if it can."""
        if self.params.deterministic:
            return ""
        split, width = self.d_query_split, self.params.d_query_columns
        for part in (split, self.head_dim - split):
            # The oldest buffer must be known while the kernel is traced.
            if part % (width * self.params.d_query_buffers):
                return f"cannot cut {part} columns of dQ into {self.params.d_query_buffers} buffers of {width} in turn"
        return ""

    @property
    def shared_bytes(self) -> int:
        """Bytes of the kernel that takes more, with those for soft caps and dropout, barriers and alignment."""
        return self._bytes(self.stages_bias)

    def _bytes(self, staged: bool) -> int:
        size = sum(ring.shared_bytes for ring in self._key_value_rings(staged) if isinstance(ring, RingPlan))
        size += self.p_tile.stack_bytes(1)
        if self.bias_gradient is not None:
            size += self.bias_gradient.staging_bytes(1)
        if self.params.deterministic:
            rings = self._query_rings(staged)
            size = max(size, sum(ring.shared_bytes for ring in rings if ring is not None))
        else:
            size += aligned_bytes(self.dq_staging_shape, jnp.float32)
        return size + 512
