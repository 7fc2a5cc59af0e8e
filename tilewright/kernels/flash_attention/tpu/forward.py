"""The forward pass of attention on TPUs: O and lse by online softmax.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao, "FlashAttention-2" (2023).

  Q, K, V   blocks ``[block_q, head_dim]``, ``[block_k, head_dim]``, ``[block_k, value_dim]``
  x         logits of a unit: QKᵀ, or natural logits where there are a bias or a soft cap
  P         exp2((x − m) · factor), not normalised, rounded to the dtype of V for its matmul
  m, l      maximum of x and sum of P so far: the same in all 128 columns of a buffer
  O         P·V / l; the accumulator holds P·V relative to the current m, and l where V has a column of ones

Grid: batch, heads, blocks of queries, steps of a `Schedule`. A block without a mask is straight-line code, in which the
matmul QKᵀ of a unit stands before the softmax of the unit before it: the compiler's scheduler overlaps them. Without
that the systolic array waits: at head dim 128 and 4096 queries and keys a v6e needs 59000 cycles in place of 71000 by
libtpu's simulator.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.results import HIDING_BIAS, Results
from tilewright.kernels.flash_attention.tpu.call import DIM_STEP, Block, Launch, Operand, Plan, Turn, lanes, rounded_up
from tilewright.kernels.flash_attention.tpu.params import TpuTiles, Unit
from tilewright.kernels.flash_attention.tpu.schedule import Corner, plan_schedule
from tilewright.kernels.flash_attention.tpu.scores import KEPT, kept, logits, run_units
from tilewright.kernels.numerics.softmax import sinks_lse
from tilewright.kernels.tpu.device import LANES
from tilewright.kernels.tpu.launch import Order

LOWEST_MAXIMUM = float(np.nextafter(np.float32(HIDING_BIAS), np.float32(0)))
"""The maximum of a row that has seen nothing: finite, so that P of a masked key is exp2(−∞) = 0 there, too, and above
all keys that a bias hides, whose P is 0 beside it."""


def attention_forward(inputs: AttentionInputs, tiles: TpuTiles) -> Results:
    """``(out, lse)`` of a call with keys, whose values outside of lengths are zeros."""
    plan = Plan(inputs.structs, tiles)
    schedule, entries = plan_schedule(inputs.mask, plan.grid)
    head_dim, value_dim = rounded_up(inputs.head_dim, DIM_STEP), rounded_up(inputs.value_dim, LANES)
    value = inputs.value
    if _sums_in_padding(plan):
        value = jnp.pad(value, [(0, 0)] * 3 + [(0, value_dim - inputs.value_dim)], constant_values=1)
    operands = {
        "query": plan.query_block(plan.rows_of_queries(inputs.query, head_dim)),
        "key": plan.key_block(plan.rows_of_keys(inputs.key, head_dim)),
        "value": plan.key_block(plan.rows_of_keys(value, value_dim)),
        **plan.score_operands(inputs),
    }
    sinks = sinks_lse(inputs.softmax_aux)
    if sinks is not None:
        first = jnp.broadcast_to((sinks / plan.scale)[:, None, None], (inputs.heads, 1, LANES))
        operands["sinks"] = Operand(first, (1, 1, LANES), lambda b, h, i, j: (h, 0, 0))
    (rows, _), block_q = plan.padded, plan.grid.block_q
    leading = (inputs.batch, inputs.heads)
    out = jax.ShapeDtypeStruct((*leading, rows, value_dim), inputs.dtype)
    lse = jax.ShapeDtypeStruct((*leading, 1, rows), jnp.float32)
    results = {
        "out": plan.query_block(out),
        "lse": Operand(lse, (1, 1, 1, block_q), lambda b, h, i, j: (b, h, 0, i)),
    }
    scratch = {"maximum": (block_q, LANES), "accumulator": (block_q, _accumulated(plan))}
    if not _sums_by_matmul(plan):
        scratch["sums"] = (block_q, LANES)
    if inputs.dropout:
        scratch[KEPT] = (block_q, plan.grid.block_k)
    axes: list[tuple[int, Order]] = [
        (inputs.batch, "parallel"),
        (inputs.heads, "parallel"),
        (plan.grid.q_tiles, "parallel"),
    ]
    launch = Launch(plan, schedule, axes, lambda b, h, i: (b, h, i))
    scalars = plan.scalars(inputs, entries)
    found = launch.run(_step, scalars, operands, results, scratch, role="forward", matmuls=2)
    out = found["out"][:, :, : inputs.q_length, : inputs.value_dim].transpose(0, 2, 1, 3)
    return out, found["lse"][:, :, 0, : inputs.q_length]


def _sums_by_matmul(plan: Plan) -> bool:
    """True if l is a column of P·V. A dropout drops some of P there."""
    return plan.tiles.sums_by_matmul and not plan.inputs.dropout


def _sums_in_padding(plan: Plan) -> bool:
    """True if the columns of ones are those that pad the values to whole tiles."""
    return _sums_by_matmul(plan) and plan.inputs.value_dim % LANES != 0


def _accumulated(plan: Plan) -> int:
    """Columns of the accumulator."""
    own = _sums_by_matmul(plan) and not _sums_in_padding(plan)
    return rounded_up(plan.inputs.value_dim, LANES) + (LANES if own else 0)


def _step(block: Block, turn: Turn) -> None:
    @pl.when(turn.begins)
    def _() -> None:
        _begin(block)

    def scores(unit: Unit) -> tuple[jax.Array]:
        return (block.plan.dot(block.queries("query", unit), block.keys("key", unit), (1, 1)),)

    run_units(block, turn, scores, lambda found, unit, corner: _update(block, found[0], unit, corner))

    @pl.when(turn.ends)
    def _() -> None:
        _finish(block)


def _begin(block: Block) -> None:
    """m and l of the sinks, or of nothing; O is 0."""
    plan, refs = block.plan, block.refs
    maximum, accumulator = refs["maximum"], refs["accumulator"]
    total = jnp.zeros((1, LANES), jnp.float32)
    if "sinks" in refs:
        sinks = refs["sinks"][0]
        first = jnp.maximum(sinks, LOWEST_MAXIMUM)
        maximum[...] = jnp.broadcast_to(first, maximum.shape)
        # l relative to m, which is their log-sum-exp: 1, or 0 where all sinks are −∞.
        total = jnp.exp2((sinks - first) * plan.factor)
    else:
        maximum[...] = jnp.full(maximum.shape, LOWEST_MAXIMUM, jnp.float32)
    if _sums_by_matmul(plan):
        column = jax.lax.broadcasted_iota(jnp.int32, accumulator.shape, 1)
        accumulator[...] = jnp.where(column < plan.inputs.value_dim, 0.0, total[:, 0:1])
    else:
        accumulator[...] = jnp.zeros(accumulator.shape, jnp.float32)
        refs["sums"][...] = jnp.broadcast_to(total, refs["sums"].shape)


def _update(block: Block, scores: jax.Array, unit: Unit, corner: Corner | None) -> None:
    """Updates O, m and l with the keys of a unit."""
    plan, refs = block.plan, block.refs
    rows = pl.ds(unit.row, unit.rows)
    x, _ = logits(block, scores, unit, corner)
    before = refs["maximum"][rows, :]
    maximum = jnp.maximum(before, jnp.max(x, axis=1, keepdims=True))
    refs["maximum"][rows, :] = maximum
    p = jnp.exp2((x - lanes(maximum, unit.columns)) * plan.factor)
    correction = jnp.exp2((before - maximum) * plan.factor)
    value = block.keys("value", unit)
    if not _sums_by_matmul(plan):
        refs["sums"][rows, :] = correction * refs["sums"][rows, :] + jnp.sum(p, axis=1, keepdims=True)
        if plan.inputs.dropout:
            p = p * kept(block, unit)
    elif not _sums_in_padding(plan):
        value = jnp.concatenate([value, jnp.ones((unit.columns, LANES), value.dtype)], axis=1)
    accumulator = refs["accumulator"]
    added = plan.dot(p.astype(value.dtype), value, (1, 0))
    accumulator[rows, :] = accumulator[rows, :] * lanes(correction, added.shape[1]) + added


def _finish(block: Block) -> None:
    """O divided by l, and lse; 0 and −∞ of a row that sees nothing."""
    plan, refs = block.plan, block.refs
    accumulator, maximum = refs["accumulator"], refs["maximum"][...]
    width = refs["out"].shape[3]
    if _sums_in_padding(plan):
        column = accumulator[:, plan.inputs.value_dim : plan.inputs.value_dim + 1]
        total = jnp.broadcast_to(column, maximum.shape)
    else:
        total = accumulator[:, width:] if _sums_by_matmul(plan) else refs["sums"][...]
    empty = total == 0.0
    total = jnp.where(empty, 1.0, total)
    # The dropout's factor multiplies O once, instead of every P.
    keep_scale = 1.0 / (1.0 - plan.inputs.drawn_dropout)
    out = accumulator[:, :width] * lanes(jnp.where(empty, 0.0, keep_scale / total), width)
    refs["out"][0, 0] = out.astype(refs["out"].dtype)
    lse = jnp.where(empty, -jnp.inf, maximum * plan.scale + jnp.log(total))
    refs["lse"][0, 0] = lse.T[0:1]
