"""The logits of a unit of scores on TPUs: scale, bias, soft cap, mask and dropout, in float32."""

import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from tilewright.kernels.flash_attention.masking import FAR, Band
from tilewright.kernels.flash_attention.results import HIDING_BIAS
from tilewright.kernels.flash_attention.tpu.call import Block, Turn
from tilewright.kernels.flash_attention.tpu.params import Unit
from tilewright.kernels.flash_attention.tpu.schedule import Corner
from tilewright.kernels.numerics.dropout import BLOCK, PAIR, keep_threshold, philox2x32
from tilewright.kernels.tpu.device import LANES

KEPT = "kept"
"""The buffer ``[block_q, block_k]`` of a block's dropout."""


def run_units(
    block: Block,
    turn: Turn,
    first: Callable[[Unit], tuple[jax.Array, ...]],
    rest: Callable[[tuple[jax.Array, ...], Unit, Corner | None], None],
) -> None:
    """Computes what a step of the grid visits, by units.

    Args:
      first: the matmuls of a unit, which need no other unit.
      rest: ``rest(first(unit), unit, corner)``, in the order of the units; the corner is None where no mask touches
        the block.
    """
    plan, visited = block.plan, turn.visited
    grid = plan.grid

    def in_turn(units: Sequence[Unit], corner: Corner | None) -> None:
        if not units:  # of a block whose visible keys are behind the end
            return
        found = first(units[0])
        for unit, following in itertools.pairwise(units):
            ahead = first(following)
            rest(found, unit, corner)
            found = ahead
        rest(found, units[-1], corner)

    kinds = turn.kinds
    if plan.inputs.dropout:
        pl.when(visited.full | visited.masked)(lambda: _draw(block))
    if kinds.full and not kinds.other:
        in_turn(plan.units, None)
    elif kinds.full:
        pl.when(visited.full)(lambda: in_turn(plan.units, None))
    difference = block.column * grid.block_k - block.row * grid.block_q
    for corner in kinds.corners:
        units = visible_units(plan.units, plan.parts.band, corner)
        here = visited.masked
        if len(kinds.corners) > 1:
            left = grid.kv_length - block.column * grid.block_k
            here = here & (left >= grid.block_k if corner.limit is None else left == corner.limit)
            here = here if corner.difference is None else here & (difference == corner.difference)
        pl.when(here)(functools.partial(in_turn, units, corner))
    if kinds.masked and not kinds.corners:
        limit = grid.kv_length - block.column * grid.block_k if grid.kv_length % grid.block_k else None
        pl.when(visited.masked)(lambda: in_turn(plan.units, Corner(difference, limit)))


def visible_units(units: Sequence[Unit], band: Band, corner: Corner) -> list[Unit]:
    """The units of a block without the keys, by 128, that the band or the end of the keys hides from all queries."""
    found = []
    for unit in units:
        first, last = unit.column, unit.column + unit.columns - 1
        if isinstance(corner.limit, int):
            last = min(last, corner.limit - 1)
        if isinstance(corner.difference, int):
            first = max(first, unit.row + band.lowest - corner.difference)
            last = min(last, unit.row + unit.rows - 1 + band.highest - corner.difference)
        first, end = first // LANES * LANES, (last // LANES + 1) * LANES
        if first < end:
            found.append(Unit(unit.row, unit.rows, first, end - first))
    return found


def logits(block: Block, scores: jax.Array, unit: Unit, corner: Corner | None) -> tuple[jax.Array, jax.Array | None]:
    """Logits of QKᵀ, −∞ where they are masked, and the derivative of the soft cap, or None.

    Args:
      corner: of a block that the mask touches, else None.
    """
    inputs, slope, bias = block.plan.inputs, None, None
    if not block.plan.raw:
        scores = scores * inputs.softmax_scale
    if inputs.bias is not None:
        bias = block.scores("bias", unit).astype(jnp.float32)
        scores = scores + bias
    if inputs.logits_soft_cap is not None:
        ratio = jnp.tanh(scores * (1.0 / inputs.logits_soft_cap))
        scores, slope = inputs.logits_soft_cap * ratio, 1.0 - ratio * ratio
        # Without a cap the sum is as low as such a bias.
        if bias is not None:
            scores = jnp.where(bias <= HIDING_BIAS, -jnp.inf, scores)
    if corner is not None:
        scores = jnp.where(_visible(block, unit, corner), scores, -jnp.inf)
    return scores, slope


def _visible(block: Block, unit: Unit, corner: Corner) -> jax.Array:
    """Marks the visible scores of a unit, by every term of the mask."""
    plan = block.plan
    parts, band, terms = plan.parts, plan.parts.band, []
    if corner.limit is not None:
        terms.append(lax.broadcasted_iota(jnp.int32, (1, unit.columns), 1) < corner.limit - unit.column)
    if parts.has_rows:
        queries = block.refs["q_rows"][0, pl.ds(unit.row, unit.rows), :]
        keys = block.refs["kv_rows"][0, :, pl.ds(unit.column, unit.columns)]
        if parts.segments is not None:
            terms.append(queries[:, 0:1] == keys[0:1])
        terms += [keys[1:2] >= queries[:, 1:2], keys[1:2] <= queries[:, 2:3]]
    elif corner.difference is not None:
        shape = (unit.rows, unit.columns)
        moved = corner.difference + unit.column - unit.row
        difference = lax.broadcasted_iota(jnp.int32, shape, 1) - lax.broadcasted_iota(jnp.int32, shape, 0)
        if band.lowest > -FAR:
            terms.append(difference >= band.lowest - moved)
        if band.highest < FAR:
            terms.append(difference <= band.highest - moved)
    if parts.matrix is not None:
        terms.append(block.scores("matrix", unit).astype(jnp.int32) != 0)
    found = jnp.ones((1, 1), bool) if not terms else terms[0]
    for term in terms[1:]:
        found = found & term
    return jnp.broadcast_to(found, (unit.rows, unit.columns))


def kept(block: Block, unit: Unit) -> jax.Array:
    """1 for the probabilities of a unit that the dropout keeps, else 0."""
    return block.refs[KEPT][pl.ds(unit.row, unit.rows), pl.ds(unit.column, unit.columns)]


def _draw(block: Block) -> None:
    """Draws the elements that the dropout keeps of a block (`kernels.numerics.dropout`).

    In a loop, since a call of Philox is a hundred operations. It serves the rows r and r + 8: two of the registers'
    tiles of 8 rows.
    """
    grid, inputs = block.plan.grid, block.plan.inputs
    keys, first = block.refs["dropout_keys"], 2 * (block.batch * inputs.heads + block.head)
    key, second = (keys[first + word].astype(jnp.uint32) for word in range(2))
    calls = (PAIR, grid.block_k)
    columns = block.column * grid.block_k + lax.broadcasted_iota(jnp.int32, (1, grid.block_k), 1)
    columns = columns.astype(jnp.uint32)
    numbers = jnp.broadcast_to(((columns >> 4 << 3) | (columns & (PAIR - 1))) ^ second, calls)
    threshold = jnp.uint32(keep_threshold(inputs.drawn_dropout))

    def rows(number: jax.Array, _: None) -> None:
        row = lax.div(block.row * grid.block_q, jnp.int32(2)) + number * PAIR
        counter = (row + lax.broadcasted_iota(jnp.int32, calls, 0)).astype(jnp.uint32), numbers
        drawn = [(word >> ((columns & PAIR) << 1)) & 0xFFFF for word in philox2x32(key, counter)]
        found = jnp.concatenate([jnp.where(half >= threshold, 1.0, 0.0) for half in drawn], axis=0)
        block.refs[KEPT][pl.ds(pl.multiple_of(number * BLOCK, BLOCK), BLOCK), :] = found

    lax.fori_loop(0, grid.block_q // BLOCK, rows, None)
