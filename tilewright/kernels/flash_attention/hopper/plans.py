"""The shared memory of the kernels on Hopper: their rings, tiles and bytes, from params and padded head dims."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from tilewright.kernels.flash_attention.hopper.bias_gradient import AnyBiasGradient
from tilewright.kernels.flash_attention.hopper.d_query import MAX_OVERLAPPED_DIM, ROW, STRIP
from tilewright.kernels.flash_attention.hopper.params import (
    CONSUMERS,
    HopperBackwardParams,
    HopperForwardParams,
)
from tilewright.kernels.flash_attention.hopper.scores import bias_ring
from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.limits import DQ_REGISTERS, REGISTERS, SHARED_BYTES, RegisterSplit
from tilewright.kernels.hopper.ring import RingPlan
from tilewright.kernels.hopper.shared import SharedTile
from tilewright.kernels.hopper.tiles import ROWS
from tilewright.kernels.hopper.turns import TurnsPlan

FORWARD_RESERVED = 2048
"""Shared memory of the forward kernel for lse, the barriers of the ping-pong and alignment, in bytes."""


class ForwardScratch[R, T, M](NamedTuple):
    """Shared memory of the forward kernel: plans of rings and types or, in the kernel, what they bind.

    Attributes:
      q: tiles of a work item.
      k, v: tiles of a step.
      lse: ``[consumers, 64]`` float32, where lse waits for its store.
      turns: of the consumers, to issue MMAs under ``ping_pong``.
      out: ``[block_q, value_dim]``, where O waits for its store; None if it takes the place of Q.
      bias: tiles of a step, of each consumer; None unless the bias passes through shared memory.
    """

    q: R
    k: R
    v: R
    bias: R | None
    lse: M
    turns: T
    out: M | None


@dataclasses.dataclass(frozen=True)
class ForwardPlan:
    """The shared memory of the forward kernel; ``head_dim`` and ``value_dim`` are padded ones.

    Attributes:
      panelled: whether tiles of query, key, value and output lie in panels. The last of them may be narrower, except
        for values, whose columns are those of one MMA.
      bias_dtype: of a bias that may pass through shared memory (`BiasTiles`), or None.
    """

    params: HopperForwardParams
    head_dim: int
    value_dim: int
    dtype: DTypeLike
    panelled: bool = False
    bias_dtype: DTypeLike | None = None

    @functools.cached_property
    def queries(self) -> RingPlan:
        return self._queries(self.query_stages)

    @functools.cached_property
    def keys(self) -> RingPlan:
        tile = self._tile(self.params.block_k, self.head_dim)
        return RingPlan(tile, self.params.num_stages, self.params.consumers)

    @functools.cached_property
    def values(self) -> RingPlan:
        params = self.params
        # PV contracts over keys, in steps of the swizzle's width: narrower for odd tile sizes, but not over panels.
        # Panels of V are whole where those of Q and K end with a narrower one: a narrower one would make PV two MMAs,
        # which feed P twice (docs/notes/hopper_attention.md).
        width, columns = math.gcd(params.block_k, self.value_dim, 64), self.value_dim
        if self.panelled:
            width = 32 if columns == 96 else 64
            columns = -(-columns // width) * width
        tile = SharedTile((params.block_k, columns), self.dtype, 2 * width, self.panelled)
        return RingPlan(tile, params.num_stages, params.consumers)

    def scratch(self) -> ForwardScratch[RingPlan, TurnsPlan, object]:
        """The rings, and scratch types of the buffers and of the barriers."""
        consumers = self.params.consumers
        return ForwardScratch(
            q=self.queries,
            k=self.keys,
            v=self.values,
            bias=self.bias,
            lse=plgpu.SMEM((consumers, ROWS), jnp.float32),
            turns=TurnsPlan(consumers),
            out=self.output.stack() if self.own_output else None,
        )

    @functools.cached_property
    def output(self) -> SharedTile:
        """Buffer of the output before its TMA store, if that does not reuse Q's."""
        return self._tile(self.params.block_q, self.value_dim)

    @functools.cached_property
    def stages_bias(self) -> bool:
        """True if the bias passes through shared memory, where a stage for each consumer fits."""
        return self.bias_dtype is not None and self._bytes(1, self.head_dim != self.value_dim, 1) <= SHARED_BYTES

    @functools.cached_property
    def bias(self) -> RingPlan | None:
        """The ring of the bias, with two stages for each consumer where they cost nothing else its memory."""
        stages = self._bias_stages
        if stages and self._bytes(self.query_stages, self.own_output, 2) <= SHARED_BYTES:
            stages = 2
        return self._bias(stages)

    @functools.cached_property
    def _bias_stages(self) -> int:
        return 1 if self.stages_bias else 0

    def _bias(self, stages: int) -> RingPlan | None:
        if not stages or self.bias_dtype is None:
            return None
        return bias_ring(ROWS, self.params.block_k, self.bias_dtype, stages, self.params.consumers)

    @functools.cached_property
    def ahead(self) -> bool:
        """True if the first step of the next item is computed before the output of an item is stored."""
        return self.params.ahead and self.query_stages == 2

    @functools.cached_property
    def query_stages(self) -> int:
        """Stages of Q: a second one, for the next item, where it fits beside a buffer for the output."""
        # A kernel with one item for each CTA has no next Q to load.
        return 2 if self.params.persistent and self._bytes(2, True, self._bias_stages) <= SHARED_BYTES else 1

    @functools.cached_property
    def own_output(self) -> bool:
        """True if the output has a buffer of its own; else it reuses Q's, which has its shape."""
        return self._bytes(1, True, self._bias_stages) <= SHARED_BYTES or self.head_dim != self.value_dim

    @functools.cached_property
    def shared_bytes(self) -> int:
        bias = self.bias
        return self._bytes(self.query_stages, self.own_output, 0) + (0 if bias is None else bias.shared_bytes)

    def _queries(self, stages: int) -> RingPlan:
        return RingPlan(self._tile(self.params.block_q, self.head_dim), stages, self.params.consumers)

    def _tile(self, rows: int, columns: int) -> SharedTile:
        swizzle = 128 if self.panelled and _has_narrow_panel(columns) else None
        return SharedTile((rows, columns), self.dtype, swizzle, self.panelled)

    def _bytes(self, query_stages: int, own_output: bool, bias_stages: int) -> int:
        plans = self._queries(query_stages), self.keys, self.values, self._bias(bias_stages)
        rings = sum(plan.shared_bytes for plan in plans if plan is not None)
        return rings + FORWARD_RESERVED + (self.output.stack_bytes(1) if own_output else 0)


def _has_narrow_panel(columns: int) -> bool:
    """True if the last panel of so many columns is narrower than the others; 96 are three panels of 32 columns.

    TMA loads these in 27 µs where panels of 64 take 33, and whatever is the widest swizzle serves the rest.
    """
    return columns % 64 in (16, 32) and columns != 96


NARROW_DIM = 128
"""Widest head dim for which every backward kernel has a warpgroup hold both dK and dV of 64 keys."""

HELD_DIMS = 320
"""Sum of head_dim and value_dim up to which a warpgroup can hold both: they take half as many of its 240 registers."""

OUTPUT_RESERVED = 32
"""Bytes of shared memory beside each output buffer, for alignment."""


class DqMmaTile(NamedTuple):
    """The part of a step's dQ that one MMA computes: 64 queries from ``row`` and ``columns`` from ``column`` on."""

    row: int
    column: int
    columns: int


class KeyValueScratch[R, M](NamedTuple):
    """Shared memory of the kernel for dK and dV: plans of rings and types of buffers or, in the kernel, what they bind.

    Attributes:
      k, v: tiles of a work item.
      q, d_out, statistics: tiles of a step.
      ds: dS from the consumers to the dQ warpgroup, its only reader; None if deterministic.
      counter: the counter of the head whose dQ is to be converted; None without an `OverlappedConversion`.
      bias: tiles of a step, of each consumer; None unless the bias passes through shared memory.
      dv, dk: a buffer for each consumer, where its gradients wait for their TMA store. If both have one shape dk is
        None and dK waits in ``dv``; if both are None gradients wait in ``d_bias`` or are stored from registers.
      d_bias: a buffer for each consumer, for gradients of a bias that TMA stores or adds; else None.
      dq: strips of dQ that wait for their TMA reduction; None if deterministic.
    """

    k: R
    v: R
    q: R
    d_out: R
    statistics: R
    ds: R | None
    bias: R | None
    counter: R | None
    dv: M | None
    dk: M | None
    d_bias: M | None
    dq: M | None


class BackwardMemory(NamedTuple):
    """The division of shared memory by the kernel for dK and dV, which a bias makes scarce.

    Attributes:
      stages_bias: whether the bias passes through it.
      ds_stages: of the ring of dS.
      output_parts: column parts in which a gradient passes through its buffer; 0 if it has none.
      shares_d_bias: whether dK and dV wait in the buffer of the gradient of the bias.
    """

    stages_bias: bool
    ds_stages: int
    output_parts: int
    shares_d_bias: bool = False


@dataclasses.dataclass(frozen=True)
class BackwardPlan:
    """The shared memory and the registers of the kernel for dK and dV.

    Attributes:
      panelled: whether tiles of the arrays lie in panels.
      partial_gradients: whether a work item has a part of the query heads of its keys (`call.GroupParts`).
      bias_dtype: of a bias that may pass through shared memory (`BiasTiles`), or None.
    """

    params: HopperBackwardParams
    head_dim: int
    value_dim: int
    dtype: DTypeLike
    bias_gradient: AnyBiasGradient | None = None
    panelled: bool = False
    partial_gradients: bool = False
    bias_dtype: DTypeLike | None = None

    @functools.cached_property
    def memory(self) -> BackwardMemory:
        """The first of the ways to divide shared memory that fits, else the last."""
        for memory in self._memories[:-1]:
            if self._bytes(memory) <= SHARED_BYTES:
                return memory
        return self._memories[-1]

    @functools.cached_property
    def _memories(self) -> list[BackwardMemory]:
        """Ways to divide shared memory, best first."""
        parts = (1 + self.partial_gradients) * (1 + (max(self.head_dim, self.value_dim) > NARROW_DIM))
        unstaged = BackwardMemory(False, 2, parts)
        if self.bias_dtype is None and self.bias_gradient is None:
            return [unstaged]
        found = []
        # A bias in shared memory is given up last: before it go the output buffers, in parts and then as a whole, and
        # the second stage of dS.
        for memory in (unstaged,) if self.bias_dtype is None else (unstaged._replace(stages_bias=True), unstaged):
            found.append(memory)
            if self._may_share_d_bias:
                found.append(memory._replace(output_parts=0, shares_d_bias=True))
            found += [memory._replace(output_parts=2 * parts), memory._replace(output_parts=0)]
            found.append(found[-1]._replace(ds_stages=1))
        return found

    @functools.cached_property
    def _may_share_d_bias(self) -> bool:
        """True if gradients may pass through the buffer of the gradient of the bias, in parts of 64 columns."""
        gradient = self.bias_gradient
        if gradient is None or not gradient.exact or self.partial_gradients:
            return False
        # The buffer has 64 columns, and dK and dV pass through it in such parts.
        whole = self.head_dim % ROWS == 0 and self.value_dim % ROWS == 0
        return whole and jnp.dtype(gradient.dtype) == jnp.dtype(self.dtype)

    @functools.cached_property
    def stages_bias(self) -> bool:
        return self.memory.stages_bias

    @functools.cached_property
    def bias_ring(self) -> RingPlan | None:
        return self._bias_ring(self.memory)

    def _bias_ring(self, memory: BackwardMemory) -> RingPlan | None:
        if not memory.stages_bias or self.bias_dtype is None:
            return None
        return bias_ring(self.params.block_q, ROWS, self.bias_dtype, 1, CONSUMERS)

    @functools.cached_property
    def stores_from_registers(self) -> bool:
        """True if dK and dV have no buffer, so that TMA cannot clip them: they are stored as whole tiles."""
        return not self.memory.output_parts and not self.memory.shares_d_bias

    @functools.cached_property
    def reason(self) -> str:
        """Reason why a warpgroup's registers do not hold both dK and dV; empty if they do."""
        if max(self.head_dim, self.value_dim) <= NARROW_DIM:
            return ""
        if self.head_dim + self.value_dim > HELD_DIMS:
            return f"has no registers for both dK and dV, whose widths may add up to {HELD_DIMS}"
        if self.has_dq_warpgroup or self.params.block_q != ROWS:
            return f"has no registers: beyond head dim {NARROW_DIM} it takes {ROWS} queries, and dQ a kernel of its own"
        return ""

    @functools.cached_property
    def gradient_dtype(self) -> DTypeLike:
        """The dtype of dK and dV in global memory: float32 where they are parts of a sum."""
        return jnp.float32 if self.partial_gradients else self.dtype

    def _tile(self, rows: int, columns: int) -> SharedTile:
        return SharedTile((rows, columns), self.dtype, panelled=self.panelled)

    def _ring(self, rows: int, columns: int, stages: int) -> RingPlan:
        return RingPlan(self._tile(rows, columns), stages, CONSUMERS)

    @functools.cached_property
    def has_dq_warpgroup(self) -> bool:
        """True if dQ is computed here, by a warpgroup of its own, and added in global memory."""
        # Its TMA reductions are added in the order in which they arrive, so results that repeat bit for bit need a
        # kernel that sums dQ in registers.
        return not self.params.deterministic

    @functools.cached_property
    def k_ring(self) -> RingPlan:
        tile = self._tile(self.params.block_k, self.head_dim)
        # The dQ warpgroup reads K, too: dQ = dSᵀ·K.
        return RingPlan(tile, 1, CONSUMERS + self.has_dq_warpgroup)

    @functools.cached_property
    def v_ring(self) -> RingPlan:
        # One stage, as for K: both are released before dK and dV are stored, and those of the next item arrive
        # meanwhile.
        return self._ring(self.params.block_k, self.value_dim, 1)

    @functools.cached_property
    def q_ring(self) -> RingPlan:
        return self._ring(self.params.block_q, self.head_dim, self.params.num_stages)

    @functools.cached_property
    def d_out_ring(self) -> RingPlan:
        return self._ring(self.params.block_q, self.value_dim, self.params.num_stages)

    @functools.cached_property
    def statistics_ring(self) -> RingPlan:
        # Both rows in one copy, without a swizzle: threads read them, wgmma does not.
        return RingPlan(SharedTile((2, self.params.block_q), jnp.float32, 0), self.params.num_stages, CONSUMERS)

    @functools.cached_property
    def ds_ring(self) -> RingPlan:
        return self._ds_ring(self.memory.ds_stages)

    def _ds_ring(self, stages: int) -> RingPlan:
        shape = self.params.block_k, self.params.block_q
        # dS is an operand beside K, and both operands of a wgmma in shared memory have one swizzle: K's, which is Q's.
        # Two stages: consumers store the next dS while the dQ warpgroup reads one.
        return RingPlan(SharedTile(shape, self.dtype, self.q_ring.tile.swizzle), stages, 1, CONSUMERS)

    @functools.cached_property
    def counter_ring(self) -> RingPlan:
        return RingPlan(SharedTile((ROW // 2,), jnp.float32), 1, 1)

    @functools.cached_property
    def may_overlap_conversion(self) -> bool:
        """True if the dQ warpgroup may convert the dQ accumulator of heads that are complete."""
        return self.head_dim <= MAX_OVERLAPPED_DIM and self.has_dq_warpgroup

    @functools.cached_property
    def dq_mma_tiles(self) -> list[DqMmaTile]:
        """The MMAs for a step's dQ, with accumulators of 32 registers at most."""
        return [
            # 64 × 64 of float32 over 128 threads are 32 registers, of 72 that the dQ warpgroup has.
            DqMmaTile(row, column, min(64, self.head_dim - column))
            for row in range(0, self.params.block_q, ROWS)
            for column in range(0, self.head_dim, 64)
        ]

    @functools.cached_property
    def registers(self) -> RegisterSplit:
        """Registers of the warpgroup roles."""
        # 208 + 208 + 72 + 24 = 512: what four warpgroups start with. More would block setmaxnreg for ever.
        return DQ_REGISTERS if self.has_dq_warpgroup else REGISTERS[CONSUMERS]

    @functools.cached_property
    def overlaps_next_s(self) -> bool:
        """True if S of the next step is computed beside dK, so that every MMA has another one beside it.

        It takes the registers of a tile of S over the step: with tiles of 64 queries the whole is 2 % faster, with 128
        (head_dim 64) 1.5 % slower. Beside more accumulators than those of head_dim 128 it spills.
        """
        # At head dims of 192 and 128, both in the registers of a warpgroup, it cost 1 to 4 % and 40 bytes of spills
        # (docs/notes/hopper_attention.md).
        few = self.head_dim + self.value_dim <= 2 * NARROW_DIM
        return self.params.block_q == ROWS and self.params.num_stages > 1 and few

    @functools.cached_property
    def dq_staging_shape(self) -> tuple[int, int, int]:
        return self.head_dim // STRIP, self.params.block_q, STRIP

    @functools.cached_property
    def output_tiles(self) -> tuple[SharedTile, ...]:
        """Buffers of a consumer for dV and dK: one after the other in one buffer if they have the same shape.

        They hold half of the columns where these are float32 or wide, a quarter where they are both, and half of that
        where a bias needs the memory. Empty where even that does not fit: dK and dV are then stored from registers.
        """
        return self._output_tiles(self.memory.output_parts)

    def _output_tiles(self, parts: int) -> tuple[SharedTile, ...]:
        if not parts:
            return ()
        # Of one shape they share a buffer: `fromkeys` leaves one width then.
        widths = (width // parts for width in dict.fromkeys((self.value_dim, self.head_dim)))
        return tuple(SharedTile((ROWS, width), self.gradient_dtype, panelled=self.panelled) for width in widths)

    def scratch(self, overlaps_conversion: bool) -> KeyValueScratch[RingPlan, object]:
        """The rings, and scratch types of the buffers."""
        outputs = [tile.stack(CONSUMERS) for tile in self.output_tiles]
        return KeyValueScratch(
            k=self.k_ring,
            v=self.v_ring,
            q=self.q_ring,
            d_out=self.d_out_ring,
            statistics=self.statistics_ring,
            ds=self.ds_ring if self.has_dq_warpgroup else None,
            bias=self.bias_ring,
            counter=self.counter_ring if overlaps_conversion else None,
            dv=outputs[0] if outputs else None,
            dk=outputs[1] if len(outputs) > 1 else None,
            d_bias=None if self.bias_gradient is None else self.bias_gradient.staging(CONSUMERS),
            dq=plgpu.SMEM(self.dq_staging_shape, jnp.float32) if self.has_dq_warpgroup else None,
        )

    @functools.cached_property
    def shared_bytes(self) -> int:
        return self._bytes(self.memory)

    def _bytes(self, memory: BackwardMemory) -> int:
        rings = [self.k_ring, self.v_ring, self.q_ring, self.d_out_ring, self.statistics_ring]
        rings += [self._ds_ring(memory.ds_stages)] if self.has_dq_warpgroup else []
        bias = self._bias_ring(memory)
        rings += [] if bias is None else [bias]
        # Whether a conversion is planned depends on the schedule, which is not known here: counted if it is possible.
        rings += [self.counter_ring] if self.may_overlap_conversion else []
        size = sum(ring.shared_bytes for ring in rings)
        outputs = self._output_tiles(memory.output_parts)
        size += sum(tile.stack_bytes(CONSUMERS) + OUTPUT_RESERVED for tile in outputs)
        if self.bias_gradient is not None:
            size += self.bias_gradient.staging_bytes(CONSUMERS)
        return size + (4 * int(np.prod(self.dq_staging_shape)) if self.has_dq_warpgroup else 0)
