"""The shared memory of the kernels on Hopper: their rings, tiles and bytes, from params and padded head dims."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from tilewright.kernels.flash_attention.hopper.bias_gradient import BiasGradient
from tilewright.kernels.flash_attention.hopper.d_query import (
    EARLY_DIM,
    ROW,
    STRIP,
)
from tilewright.kernels.flash_attention.hopper.params import (
    BLOCK,
    CONSUMERS,
    HopperBackwardParams,
    HopperForwardParams,
    WideBackwardParams,
)
from tilewright.kernels.hopper.limits import REGISTERS, SHARED_BYTES
from tilewright.kernels.hopper.ring import RingPlan
from tilewright.kernels.hopper.shared import SharedTile, aligned_bytes
from tilewright.kernels.hopper.tiles import ROWS

FORWARD_RESERVED = 2048
"""Shared memory of the forward kernel for lse, the barriers of the ping-pong and alignment, in bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardPlan:
    """The shared memory of the forward kernel; ``head_dim`` and ``value_dim`` are padded ones."""

    params: HopperForwardParams
    head_dim: int
    value_dim: int
    dtype: DTypeLike

    @property
    def queries(self) -> RingPlan:
        return self._queries(2 if self.ahead else 1)

    @property
    def keys(self) -> RingPlan:
        params = self.params
        tile = SharedTile((params.block_k, self.head_dim), self.dtype)
        return RingPlan(tile, params.num_stages, params.consumers)

    @property
    def values(self) -> RingPlan:
        params = self.params
        # PV contracts over keys, in steps of the swizzle's width: narrower for odd tile sizes.
        width = math.gcd(params.block_k, self.value_dim, 64)
        tile = SharedTile((params.block_k, self.value_dim), self.dtype, 2 * width)
        return RingPlan(tile, params.num_stages, params.consumers)

    @property
    def rings(self) -> tuple[RingPlan, ...]:
        return self.queries, self.keys, self.values

    @property
    def output(self) -> SharedTile:
        """Buffer of the output before its TMA store, if that does not reuse Q's."""
        return SharedTile((self.params.block_q, self.value_dim), self.dtype)

    @property
    def ahead(self) -> bool:
        """True if Q of the next item is loaded, and its first step computed, before the output of an item is stored.

        It takes two stages of Q and a buffer for the output, which must fit.
        """
        return self.params.persistent and self._bytes(2, True) <= SHARED_BYTES

    @property
    def own_output(self) -> bool:
        """True if the output has a buffer of its own; else it reuses Q's, which has its shape."""
        return self._bytes(1, True) <= SHARED_BYTES or self.head_dim != self.value_dim

    @property
    def shared_bytes(self) -> int:
        return self._bytes(2 if self.ahead else 1, self.own_output)

    def _queries(self, stages: int) -> RingPlan:
        return RingPlan(SharedTile((self.params.block_q, self.head_dim), self.dtype), stages, self.params.consumers)

    def _bytes(self, query_stages: int, own_output: bool) -> int:
        rings = sum(plan.shared_bytes for plan in (self._queries(query_stages), self.keys, self.values))
        return rings + FORWARD_RESERVED + (self.output.stack_bytes(1) if own_output else 0)


OUTPUT_RESERVED = 32
"""Shared memory beside each output for alignment, in bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class BackwardPlan:
    """The shared memory of the kernel for dK and dV."""

    params: HopperBackwardParams
    head_dim: int
    value_dim: int
    dtype: DTypeLike
    bias_gradient: BiasGradient | None = None

    def _ring(self, rows: int, columns: int, stages: int) -> RingPlan:
        return RingPlan(SharedTile((rows, columns), self.dtype), stages, CONSUMERS)

    @property
    def keys(self) -> RingPlan:
        tile = SharedTile((self.params.block_k, self.head_dim), self.dtype)
        return RingPlan(tile, 1, CONSUMERS + (not self.params.deterministic))

    @property
    def values(self) -> RingPlan:
        return self._ring(self.params.block_k, self.value_dim, 1)

    @property
    def queries(self) -> RingPlan:
        return self._ring(self.params.block_q, self.head_dim, self.params.num_stages)

    @property
    def d_outs(self) -> RingPlan:
        return self._ring(self.params.block_q, self.value_dim, self.params.num_stages)

    @property
    def statistics(self) -> RingPlan:
        return RingPlan(SharedTile((2, self.params.block_q), jnp.float32, 0), self.params.num_stages, CONSUMERS)

    @property
    def d_scores(self) -> RingPlan:
        """dS on its way from the warpgroups that own dK to the one that computes dQ."""
        shape = self.params.block_k, self.params.block_q
        return RingPlan(SharedTile(shape, self.dtype, self.queries.tile.swizzle), 2, 1, CONSUMERS)

    @property
    def converts(self) -> bool:
        """Whether the warpgroup for dQ may convert the sums of heads that are complete."""
        return self.head_dim <= EARLY_DIM and not self.params.deterministic

    @property
    def count(self) -> RingPlan:
        """What has been counted of the head whose dQ is to be converted."""
        return RingPlan(SharedTile((ROW // 2,), jnp.float32), 1, 1)

    @property
    def rings(self) -> tuple[RingPlan, ...]:
        rings = self.keys, self.values, self.queries, self.d_outs, self.statistics
        return rings if self.params.deterministic else (*rings, self.d_scores)

    @property
    def d_query_parts(self) -> list[tuple[int, int, int]]:
        """First query, first column and number of columns of each product for a step's dQ: 32 registers at most."""
        return [
            (row, column, min(64, self.head_dim - column))
            for row in range(0, self.params.block_q, ROWS)
            for column in range(0, self.head_dim, 64)
        ]

    @property
    def registers(self) -> tuple[int, ...]:
        """Per thread, of those that own dK and dV, of the warpgroup for dQ if there is one, and of the producer.

        See ``limits.REGISTERS``.
        """
        return REGISTERS[CONSUMERS] if self.params.deterministic else (208, 72, 24)

    @property
    def ahead(self) -> bool:
        """Whether the next step's scores are computed beside dK, which leaves no product alone.

        It takes the registers of a tile of scores over the step: with tiles of 64 queries the whole is 2 % faster, with
        128 (head_dim 64) 1.5 % slower.
        """
        return self.params.block_q == ROWS and self.params.num_stages > 1

    @property
    def staging_shape(self) -> tuple[int, int, int]:
        return self.head_dim // STRIP, self.params.block_q, STRIP

    @property
    def outputs(self) -> tuple[SharedTile, ...]:
        """Where a warpgroup's dV and dK wait for their stores: one after the other in one place if they are alike.

        Gradients of a bias that are added want their memory: with those they are stored from registers.
        """
        if self.bias_gradient is not None and self.bias_gradient.added:
            return ()
        widths = dict.fromkeys((self.value_dim, self.head_dim))
        return tuple(SharedTile((ROWS, width), self.dtype) for width in widths)

    @property
    def shared_bytes(self) -> int:
        rings = sum(ring.shared_bytes for ring in self.rings)
        rings += sum(output.stack_bytes(CONSUMERS) + OUTPUT_RESERVED for output in self.outputs)
        if self.converts:
            rings += self.count.shared_bytes
        if self.bias_gradient is not None:
            rings += self.bias_gradient.staging_bytes(CONSUMERS)
        return rings + (0 if self.params.deterministic else 4 * int(np.prod(self.staging_shape)))


@dataclasses.dataclass(frozen=True, slots=True)
class QueryPlan:
    """The shared memory of the kernel for dQ alone: 128 queries per program, ``block_k`` keys per step."""

    block_k: int
    num_stages: int
    head_dim: int
    value_dim: int
    dtype: DTypeLike

    @property
    def rings(self) -> tuple[RingPlan, ...]:
        rows, dims = CONSUMERS * ROWS, (self.head_dim, self.value_dim)
        return (
            *(RingPlan(SharedTile((rows, dim), self.dtype), 1, CONSUMERS) for dim in dims),
            RingPlan(SharedTile((2, rows), jnp.float32, 0), 1, CONSUMERS),
            *(RingPlan(SharedTile((self.block_k, dim), self.dtype), self.num_stages, CONSUMERS) for dim in dims),
        )

    @property
    def output(self) -> SharedTile:
        """Where a warpgroup's dQ waits for its store."""
        return SharedTile((ROWS, self.head_dim), self.dtype)

    @property
    def out_steps(self) -> int:
        """Loads that bring an item's rows of ``out``, which pass through the ring of the values."""
        return CONSUMERS * ROWS // self.block_k


WIDE_SHAPE = (BLOCK, BLOCK)


@dataclasses.dataclass(frozen=True, slots=True)
class WideBackwardPlan:
    """The shared memory of the kernels; ``head_dim`` and ``value_dim`` are padded ones."""

    params: WideBackwardParams
    head_dim: int
    value_dim: int
    dtype: DTypeLike
    bias_gradient: BiasGradient | None = None

    @property
    def tiles(self) -> tuple[SharedTile, SharedTile]:
        """Of queries and keys; of values and d_out."""
        return SharedTile((BLOCK, self.head_dim), self.dtype), SharedTile((BLOCK, self.value_dim), self.dtype)

    @property
    def rings(self) -> tuple[RingPlan, ...]:
        """Keys, values, queries, d_out, both rows of the statistics, what dP is multiplied by; if not deterministic
        gradients of scores."""
        params, (of_head, of_value), of_rows = self.params, self.tiles, SharedTile((BLOCK,), jnp.float32)
        exchanged = (of_value,) if params.deterministic else (of_value, of_head)
        return (
            RingPlan(of_head, 1, 1),
            RingPlan(of_value, 1, 1),
            RingPlan(of_head, params.query_stages, 1),
            RingPlan(of_value, params.d_out_stages, CONSUMERS),
            RingPlan(of_rows, params.query_stages, 1),
            RingPlan(of_rows, params.d_out_stages, 1),
            *(RingPlan(SharedTile(WIDE_SHAPE, self.dtype, tile.swizzle), 1, 1, writers=1) for tile in exchanged),
        )

    @property
    def query_rings(self) -> tuple[RingPlan, ...]:
        """Of the kernel for dQ: queries and d_out, a stage for each warpgroup; keys; values."""
        of_head, of_value = self.tiles
        return (
            RingPlan(of_head, CONSUMERS, 1),
            RingPlan(of_value, CONSUMERS, 1),
            RingPlan(of_head, self.params.key_stages, CONSUMERS),
            RingPlan(of_value, self.params.value_stages, CONSUMERS),
        )

    @property
    def d_query_split(self) -> int:
        """The column of dQ where the second warpgroup's part begins: operands can be cut where a swizzle repeats."""
        width = (self.tiles[0].swizzle or 2) // 2
        return -(-self.head_dim // (2 * width)) * width

    @property
    def weights(self) -> SharedTile:
        """What d_out is multiplied by, where dP is multiplied by something else."""
        return SharedTile(WIDE_SHAPE, self.dtype, self.tiles[1].swizzle)

    @property
    def staging_shape(self) -> tuple[int, ...]:
        params = self.params
        return CONSUMERS, params.d_query_buffers, params.d_query_columns // STRIP, BLOCK, STRIP

    @property
    def reason(self) -> str:
        """Why a warpgroup's part of dQ cannot be cut into reductions; empty if it can."""
        if self.params.deterministic:
            return ""
        split, width = self.d_query_split, self.params.d_query_columns
        for part in (split, self.head_dim - split):
            # Which buffer is the oldest must be known while a program is written.
            if part % (width * self.params.d_query_buffers):
                return f"cannot cut {part} columns of dQ into {self.params.d_query_buffers} buffers of {width} in turn"
        return ""

    @property
    def shared_bytes(self) -> int:
        """Of the kernel that takes more, with what soft caps and dropout add, barriers and alignment."""
        size = sum(ring.shared_bytes for ring in self.rings) + self.weights.stack_bytes(1)
        if self.bias_gradient is not None:
            size += self.bias_gradient.staging_bytes(1)
        if self.params.deterministic:
            size = max(size, sum(ring.shared_bytes for ring in self.query_rings))
        else:
            size += aligned_bytes(self.staging_shape, jnp.float32)
        return size + 512
