"""Combines the partial results of sequences that `latent` cut at the ends of ranges, one warpgroup for each few rows.

A range that begins in the midst of a sequence is one cut. The CTAs of a sequence's first cut combine all of its parts,
those of other cuts have nothing to do. Always in the order of the keys, so that the same bits come out every time.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.launch import run_kernel
from tilewright.kernels.hopper.softmax import AttentionResults
from tilewright.kernels.in_place import frozen
from tilewright.kernels.paged_attention.hopper.latent_work import (
    VALUE_DIM,
    LatentCall,
    LatentRanges,
    begin_of_range,
    last_of_sequence,
    part_of,
)
from tilewright.kernels.pallas_types import Ref, Scalar

TILES_AT_ONCE = 8
"""Rows of parts that a CTA loads before it needs the first: 4 registers of a thread for each."""


class CombineOperands[Operand](NamedTuple):
    """Operands of `combine_parts`; ``whole`` are references, which are written."""

    ranges: LatentRanges[Operand]
    parts: AttentionResults[Operand]
    whole: AttentionResults[Operand]
    sinks: Operand | None


def combine_parts(
    whole: AttentionResults[jax.Array],
    parts: AttentionResults[jax.Array],
    ranges: LatentRanges[jax.Array],
    sinks: jax.Array | None,
    *,
    call: LatentCall,
) -> AttentionResults[jax.Array]:
    """The results of all rows, in the place of ``whole``, which has those of sequences that are not cut.

    Args:
      whole, parts: of `latent_kernel`.
      ranges, sinks: as there.
    """
    # With many sequences most of those that are cut have two parts, with few of them many.
    parts_at_once = 2 if 2 * call.sequences >= call.ranges else TILES_AT_ONCE
    rows_of_cta = TILES_AT_ONCE // parts_at_once
    ctas = whole.out.shape[1] // rows_of_cta
    # In place: a kernel that also copied what is not cut would read and write all results once more.
    results = AttentionResults(*map(jax.new_ref, whole))

    def body(operands: CombineOperands[Ref], no_results: None, no_scratch: None) -> None:
        program, ranges = lax.axis_index("program"), operands.ranges
        cut = lax.div(program, jnp.int32(ctas)) + 1
        sequence, block = begin_of_range(call, ranges, cut)
        sequence_before, block_before = begin_of_range(call, ranges, cut - 1)
        is_first = (sequence_before != sequence) | (block_before == 0)

        @pl.when((block > 0) & is_first)
        def _() -> None:
            first = lax.rem(program, jnp.int32(ctas)) * rows_of_cta
            rows = [first + number for number in range(rows_of_cta)]
            combine_rows(operands, sequence, rows, cut, last_of_sequence(call, ranges, cut), parts_at_once)

    run_kernel(
        body,
        CombineOperands[Any](ranges, parts, results, sinks),
        None,
        None,
        role="combine",
        num_ctas=(call.ranges - 1) * ctas,
    )
    return AttentionResults(*map(frozen, results))


class RowSum(NamedTuple):
    """A row of the parts so far: the sum of their outputs and weights, relative to the largest lse."""

    out: jax.Array
    maximum: jax.Array
    total: jax.Array

    @classmethod
    def of_sinks(cls, sinks: Ref | None, row: Scalar) -> Self:
        """The sum before the first part."""
        # A maximum, although of nothing else: in `shard_map` what a reference gives has another type than a sum.
        maximum = jnp.float32(-jnp.inf) if sinks is None else jnp.maximum(sinks[row], -jnp.inf)
        total = jnp.where(maximum == -jnp.inf, 0.0, 1.0)
        zeros = jnp.zeros((VALUE_DIM,), jnp.float32)
        return cls(plgpu.layout_cast(zeros, plgpu.Layout.WG_STRIDED((VALUE_DIM,), vec_size=4)), maximum, total)

    def plus(self, outs: Sequence[jax.Array], lses: Sequence[jax.Array]) -> Self:
        """The sum with further parts."""
        maximum = functools.reduce(jnp.maximum, lses, self.maximum)
        shift = jnp.where(maximum == -jnp.inf, 0.0, maximum)
        alpha = jnp.exp(self.maximum - shift)
        out, total = self.out * alpha, self.total * alpha
        for values, lse in zip(outs, lses, strict=True):
            weight = jnp.exp(lse - shift)
            out, total = out + values * weight, total + weight
        return type(self)(out, maximum, total)


def combine_rows(
    operands: CombineOperands[Ref],
    sequence: Scalar,
    rows: Sequence[Scalar],
    cut: Scalar,
    last: Scalar,
    parts_at_once: int,
) -> None:
    """Combines rows of a sequence, whose first part is in the range before ``cut``, and its last one in ``last``."""
    parts, whole = operands.parts, operands.whole

    def one(step: Scalar, sums: tuple[RowSum, ...]) -> tuple[RowSum, ...]:
        ranges = [cut - 1 + step * parts_at_once + number for number in range(parts_at_once)]
        indices = [part_of(lax.min(each, last), each - (cut - 1)) for each in ranges]
        # All loads before the first sum.
        outs = [[parts.out[index, row, :] for index in indices] for row in rows]
        lses = [[parts.lse[index, row] for index in indices] for row in rows]
        exists = [each <= last for each in ranges]
        lses = [[jnp.where(*pair, -jnp.inf) for pair in zip(exists, row, strict=True)] for row in lses]
        return tuple(map(RowSum.plus, sums, outs, lses))

    steps = lax.div(last - cut + (2 + parts_at_once - 1), jnp.int32(parts_at_once))
    sums = lax.fori_loop(0, steps, one, tuple(RowSum.of_sinks(operands.sinks, row) for row in rows))
    for row, (out, maximum, total) in zip(rows, sums, strict=True):
        # A row without keys has 0 and −∞.
        out = out * jnp.where(total == 0.0, 0.0, 1 / total)
        whole.out.at[sequence, row][...] = out.astype(whole.out.dtype)
        whole.lse[sequence, row] = jnp.where(total == 0.0, -jnp.inf, maximum + jnp.log(total))
