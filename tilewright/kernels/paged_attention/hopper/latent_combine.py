"""Combines the partial results of sequences that `latent` cut at the ends of ranges, one warpgroup for each two rows.

A range that begins in the midst of a sequence is one cut. The CTAs of a sequence's first cut combine all of its parts,
those of other cuts have nothing to do. Always in the order of the keys, so that the same bits come out every time.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.launch import run_kernel
from tilewright.kernels.hopper.softmax import AttentionResults
from tilewright.kernels.hopper.types import Ref, Scalar
from tilewright.kernels.in_place import frozen
from tilewright.kernels.paged_attention.hopper.latent_work import VALUE_DIM, LatentCall, LatentRanges, part_of

ROWS_OF_CTA = 2
"""Rows of a CTA, whose loads overlap: 8 registers of a thread for each part."""

PARTS_AT_ONCE = 4
"""Parts that are loaded before the first is needed."""


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
    rows = whole.out.shape[1] // ROWS_OF_CTA
    # In place: a kernel that also copied what is not cut would read and write all results once more.
    results = AttentionResults(*map(jax.new_ref, whole))

    def body(operands: CombineOperands[Ref], no_results: None, no_scratch: None) -> None:
        program, ranges = lax.axis_index("program"), operands.ranges
        cut = lax.div(program, jnp.int32(rows)) + 1
        sequence, block = ranges.sequence[cut], ranges.block[cut]
        is_first = (ranges.sequence[cut - 1] != sequence) | (ranges.block[cut - 1] == 0)

        @pl.when((block > 0) & is_first)
        def _() -> None:
            row = lax.rem(program, jnp.int32(rows)) * ROWS_OF_CTA
            for number in range(ROWS_OF_CTA):
                combine_row(operands, sequence, row + number, cut, ranges.last[cut])

    run_kernel(
        body,
        CombineOperands[Any](ranges, parts, results, sinks),
        None,
        None,
        role="combine",
        num_ctas=(call.ranges - 1) * rows,
    )
    return AttentionResults(*map(frozen, results))


def combine_row(operands: CombineOperands[Ref], sequence: Scalar, row: Scalar, cut: Scalar, last: Scalar) -> None:
    """Combines a row of a sequence, whose first part is in the range before ``cut``, and its last one in ``last``."""
    parts = operands.parts

    def one(step: Scalar, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        out, maximum, total = carry
        ranges = [cut - 1 + step * PARTS_AT_ONCE + number for number in range(PARTS_AT_ONCE)]
        indices = [part_of(lax.min(each, last), each - (cut - 1)) for each in ranges]
        loaded = [parts.out[index, row, :] for index in indices]
        lses = [
            jnp.where(each <= last, parts.lse[index, row], -jnp.inf)
            for each, index in zip(ranges, indices, strict=True)
        ]
        # The maximum of so many lse at a time, and online after that, as scalars of a row.
        larger = maximum
        for lse in lses:
            larger = jnp.maximum(larger, lse)
        shift = jnp.where(larger == -jnp.inf, 0.0, larger)
        alpha = jnp.exp(maximum - shift)
        out, total = out * alpha, total * alpha
        for values, lse in zip(loaded, lses, strict=True):
            weight = jnp.exp(lse - shift)
            out, total = out + values * weight, total + weight
        return out, larger, total

    steps = lax.div(last - cut + (2 + PARTS_AT_ONCE - 1), jnp.int32(PARTS_AT_ONCE))
    maximum = jnp.float32(-jnp.inf) if operands.sinks is None else operands.sinks[row]
    total = jnp.float32(0.0) if operands.sinks is None else jnp.where(maximum == -jnp.inf, 0.0, 1.0)
    zeros = plgpu.layout_cast(jnp.zeros((VALUE_DIM,), jnp.float32), plgpu.Layout.WG_STRIDED((VALUE_DIM,), vec_size=4))
    out, maximum, total = lax.fori_loop(0, steps, one, (zeros, maximum, total))
    whole = operands.whole
    # A row without keys has 0 and −∞.
    out = out * jnp.where(total == 0.0, 0.0, 1 / total)
    whole.out.at[sequence, row][...] = out.astype(whole.out.dtype)
    whole.lse[sequence, row] = jnp.where(total == 0.0, -jnp.inf, maximum + jnp.log(total))
