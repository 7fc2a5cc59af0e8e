"""The context of each warpgroup of `latent`: the references of its CTA, and the work of an item."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, Self

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.hopper.ring import Ring
from tilewright.kernels.hopper.softmax import AttentionResults
from tilewright.kernels.hopper.tiles import ROWS
from tilewright.kernels.paged_attention.hopper.latent_work import (
    BLOCK_K,
    HALF,
    LATENT_DIM,
    VALUE_DIM,
    LatentCall,
    LatentRanges,
    LatentScratch,
    LatentWork,
    part_of_item,
    sequences_of_range,
    work_of_item,
)
from tilewright.kernels.pallas_types import Condition, Ref, Scalar

LEFT, RIGHT, REST = pl.ds(0, HALF), pl.ds(HALF, HALF), pl.ds(VALUE_DIM, LATENT_DIM - VALUE_DIM)
"""Columns of the parts of a latent, and of a query."""


class LatentOperands[Operand](NamedTuple):
    """Operands of `latent_kernel`, as arrays or references."""

    query: Operand
    pages: Operand
    page_table: Operand
    lengths: Operand
    sinks: Operand | None
    ranges: LatentRanges[Operand]


class LatentResults[Result](NamedTuple):
    """Results of `latent_kernel`.

    Attributes:
      whole: of rows, undefined for sequences that are cut.
      parts: of the cut sequences' items, for `latent_combine`; None if there is only one range.
    """

    whole: AttentionResults[Result]
    parts: AttentionResults[Result] | None


@dataclasses.dataclass(frozen=True, slots=True)
class LatentKernel:
    """The references of a warpgroup, for all items of its CTA."""

    call: LatentCall
    dtype: DTypeLike
    operands: LatentOperands[Ref]
    results: LatentResults[Ref]
    scratch: LatentScratch[Ring, Ref]


@dataclasses.dataclass(frozen=True, slots=True)
class LatentContext(LatentKernel):
    """Everything that a warpgroup role needs of an item: the rings count its steps, and its Q, from 0.

    Attributes:
      my_rows: rows of the sequence that this CTA has.
      zero: a 0 that is not a constant: JAX 0.12 refuses a slice that it can see to exceed an array.
    """

    work: LatentWork
    my_rows: pl.Slice
    zero: jax.Array

    @classmethod
    def of_item(cls, kernel: LatentKernel, sequence: Scalar, number: Scalar, first: Scalar) -> Self:
        """The context of item ``number`` of this CTA, whose step 0 is step ``first`` of the rings of latents."""
        scratch = kernel.scratch
        work = work_of_item(kernel.call, kernel.operands.ranges, kernel.operands.lengths, sequence)
        return cls(
            call=kernel.call,
            dtype=kernel.dtype,
            operands=kernel.operands,
            results=kernel.results,
            scratch=scratch._replace(
                q_left=scratch.q_left.after(number),
                q_right=scratch.q_right.after(number),
                q_rest=scratch.q_rest.after(number),
                left=scratch.left.after(first),
                right=scratch.right.after(first),
                rest=scratch.rest.after(first),
            ),
            work=work,
            my_rows=pl.ds(work.row_tile * ROWS, ROWS),
            zero=lax.axis_index("warpgroup") * 0,
        )

    def with_first_of_next(self) -> Callable[[Scalar], Self]:
        """Gives the context of a step, which of step ``work.total`` is that of the next item's first one."""
        own, call, operands = self.work, self.call, self.operands
        other = work_of_item(call, operands.ranges, operands.lengths, own.sequence + 1)
        other = dataclasses.replace(other, first=other.first - own.total, total=other.total + own.total)
        return lambda step: dataclasses.replace(
            self, work=jax.tree.map(functools.partial(jnp.where, step == own.total), other, own)
        )

    def part(self) -> jax.Array:
        """Index of the partial results, −1 without; read at the end of an item, as a register would be spilled."""
        return part_of_item(self.call, self.operands.ranges, self.operands.lengths, self.work.sequence)

    def page_of(self, step: Scalar) -> jax.Array:
        """Entry of the page table for a step; after the last step, that of the last one."""
        block = self.work.first + lax.min(step, self.work.total - 1)
        column = lax.min(lax.div(block, jnp.int32(self.call.blocks_per_page)), jnp.int32(self.call.columns - 1))
        return self.operands.page_table[self.work.sequence * self.call.columns + column]

    def row_of(self, step: Scalar) -> jax.Array:
        """First row of a step in its page."""
        return lax.rem(self.work.first + step, jnp.int32(self.call.blocks_per_page)) * BLOCK_K

    def exists(self, page: Scalar) -> Condition:
        """True where an entry of the page table is a page; others are masked."""
        return (page >= 0) & (page < self.call.num_pages)

    def visible_end(self, step: Scalar, page: Scalar) -> jax.Array:
        """One past the last key of a step that some row sees, counted from its first key."""
        return jnp.where(self.exists(page), self.work.visible_end - (self.work.first + step) * BLOCK_K, 0)


def for_each_item[Carry](
    kernel: LatentKernel, count: Scalar, role: Callable[[LatentContext, Carry], Carry], carry: Carry
) -> tuple[Scalar, Carry]:
    """Calls the role of a warpgroup for the first items of this CTA; returns the steps of all, and the carry."""
    sequence, _ = sequences_of_range(kernel.call, kernel.operands.ranges)

    def one(number: Scalar, state: tuple[Scalar, Carry]) -> tuple[Scalar, Carry]:
        first, carry = state
        ctx = LatentContext.of_item(kernel, sequence + number, number, first)
        return first + ctx.work.total, role(ctx, carry)

    found: tuple[Scalar, Carry] = lax.fori_loop(0, count, one, (jnp.int32(0), carry))
    return found
