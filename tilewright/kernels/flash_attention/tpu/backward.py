"""The backward pass of attention on TPUs: P again from lse, and all three gradients of a block in one kernel.

Dao, "FlashAttention-2" (2023). Names as in `forward`, and

  dP        dO·Vᵀ
  delta     rowsum(dO ∘ O) − dlse
  dS        P ∘ (dP − delta), times the derivative of the soft cap

Blocks of keys are the last axis of the grid: a block of queries adds up its dQ in a buffer, while dK and dV of a whole
head of keys stay in VMEM, where all queries of its group of heads add to them; of longer keys in several calls. These
gradients are transposed, as dKᵀ = Qᵀ·dS and dVᵀ = dOᵀ·P, of Qᵀ and dOᵀ that XLA makes: products with dSᵀ and Pᵀ, which
the vector unit would transpose, take 100000 cycles where these take 82000 (v6e, head dim 128, 4096 queries and keys, by
libtpu's simulator).

Every sum has one order, so gradients repeat bit for bit.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.operands import bias_gradient
from tilewright.kernels.flash_attention.results import row_terms, sinks_gradient
from tilewright.kernels.flash_attention.tpu.call import (
    DIM_STEP,
    Block,
    Launch,
    Operand,
    Plan,
    Turn,
    lanes,
    rounded_up,
)
from tilewright.kernels.flash_attention.tpu.params import TpuTiles, Unit
from tilewright.kernels.flash_attention.tpu.schedule import Corner, plan_schedule
from tilewright.kernels.flash_attention.tpu.scores import KEPT, kept, logits, run_units
from tilewright.kernels.tpu.device import LANES
from tilewright.kernels.tpu.launch import Order


@dataclasses.dataclass(frozen=True)
class Rows:
    """The arrays of queries in whole blocks: Q, dO, their transposes, and lse and delta in units of the logits."""

    query: jax.Array
    d_out: jax.Array
    statistics: jax.Array


def attention_backward(
    inputs: AttentionInputs, out: Array, lse: Array, d_out: Array, d_lse: Array | None, tiles: TpuTiles, vmem: int
) -> dict[str, Array | None]:
    """Gradients by name of the input, of a call in which what lies outside of lengths is zeros.

    Args:
      vmem: bytes that the gradients of keys and values may take.
    """
    plan = Plan(inputs.structs, tiles)
    delta, exponent = row_terms(inputs, out, lse, d_out, d_lse)
    width = [(0, 0), (0, 0), (0, plan.padded[0] - inputs.q_length)]
    # In the padding P = exp2(x − ∞) = 0.
    statistics = jnp.stack(
        [jnp.pad(exponent / plan.scale, width, constant_values=jnp.inf), jnp.pad(delta, width)], axis=2
    )
    rows = Rows(
        plan.rows_of_queries(inputs.query, rounded_up(inputs.head_dim, DIM_STEP)),
        plan.rows_of_queries(d_out.astype(inputs.dtype), rounded_up(inputs.value_dim, DIM_STEP)),
        statistics,
    )
    parts = [_keys_in_range(inputs, plan, rows, keys) for keys in key_ranges(plan, vmem)]
    d_query = parts[0]["d_query"]
    for part in parts[1:]:
        d_query = d_query + part["d_query"]

    def joined(name: str) -> jax.Array:
        return jnp.concatenate([part[name] for part in parts], axis=3) if len(parts) > 1 else parts[0][name]

    def of_keys(name: str, dim: int, scale: float) -> jax.Array:
        whole = (joined(name) * scale).astype(inputs.dtype)
        return whole.transpose(0, 3, 1, 2)[:, : inputs.kv_length, :, :dim]

    d_bias, bias = None, inputs.differentiated_bias
    if bias is not None:
        d_scores = joined("d_scores")[:, :, : inputs.q_length, : inputs.kv_length]
        if inputs.mask is not None:  # what no block computes is not written
            d_scores = jnp.where(inputs.mask.materialise(inputs.q_length, inputs.kv_length), d_scores, 0.0)
        d_bias = bias_gradient(d_scores, bias)
    d_query = d_query[:, :, : inputs.q_length, : inputs.head_dim].astype(inputs.dtype)
    return {
        "query": d_query.transpose(0, 2, 1, 3),
        "key": of_keys("d_key", inputs.head_dim, inputs.softmax_scale),
        "value": of_keys("d_value", inputs.value_dim, 1.0),
        "bias": d_bias,
        "softmax_aux": sinks_gradient(inputs, delta, exponent),
    }


def key_ranges(plan: Plan, vmem: int) -> list[tuple[int, int]]:
    """Ranges of blocks of keys, as few as there are in which the gradients of keys and values take so many bytes."""
    dims = rounded_up(plan.inputs.head_dim, DIM_STEP) + rounded_up(plan.inputs.value_dim, DIM_STEP)
    # Float32, and two buffers of each result.
    largest = max(vmem // (8 * dims * plan.grid.block_k), 1)
    calls = -(-plan.grid.kv_tiles // largest)
    blocks = -(-plan.grid.kv_tiles // calls)
    return [(first, min(first + blocks, plan.grid.kv_tiles)) for first in range(0, plan.grid.kv_tiles, blocks)]


def _keys_in_range(inputs: AttentionInputs, plan: Plan, rows: Rows, keys: tuple[int, int]) -> dict[str, jax.Array]:
    """A range of blocks of keys: its part of dQ, its dKᵀ and dVᵀ, and dS if a bias has a gradient."""
    schedule, entries = plan_schedule(inputs.mask, plan.grid, keys)
    grid, groups = plan.grid, inputs.groups
    head_dim, value_dim = rows.query.shape[3], rows.d_out.shape[3]

    def transposed(array: jax.Array) -> Operand:
        block = (1, 1, array.shape[3], grid.block_q)
        return Operand(array.transpose(0, 1, 3, 2), block, lambda b, h, i, j: (b, h, 0, i))

    operands = {
        "query": plan.query_block(rows.query),
        "d_out": plan.query_block(rows.d_out),
        "query_t": transposed(rows.query),
        "d_out_t": transposed(rows.d_out),
        "statistics": Operand(rows.statistics, (1, 1, 2, grid.block_q), lambda b, h, i, j: (b, h, 0, i)),
        "key": plan.key_block(plan.rows_of_keys(inputs.key, head_dim)),
        "value": plan.key_block(plan.rows_of_keys(inputs.value, value_dim)),
        **plan.score_operands(inputs),
    }
    length = (keys[1] - keys[0]) * grid.block_k

    def of_keys(dim: int) -> Operand:
        struct = jax.ShapeDtypeStruct((inputs.batch, inputs.kv_heads, dim, length), jnp.float32)
        return Operand(struct, (1, 1, dim, length), lambda b, h, i, j: (b, h // groups, 0, 0))

    whole = keys == (0, grid.kv_tiles)
    d_query = jax.ShapeDtypeStruct(rows.query.shape, inputs.dtype if whole else jnp.float32)
    results = {"d_query": plan.query_block(d_query), "d_key": of_keys(head_dim), "d_value": of_keys(value_dim)}
    if inputs.differentiated_bias is not None:
        scores = jax.ShapeDtypeStruct((inputs.batch, inputs.heads, plan.padded[0], length), jnp.float32)
        block = (1, 1, grid.block_q, grid.block_k)
        results["d_scores"] = Operand(scores, block, lambda b, h, i, j: (b, h, i, j - keys[0]))
    scratch = {"accumulator": (grid.block_q, head_dim)} | dict.fromkeys(("lse", "delta"), (grid.block_q, LANES))
    if inputs.dropout:
        scratch[KEPT] = (grid.block_q, grid.block_k)
    axes: list[tuple[int, Order]] = [
        (inputs.batch, "parallel"), (inputs.kv_heads, "parallel"), (groups, "arbitrary"), (grid.q_tiles, "arbitrary"),
    ]  # fmt: skip
    launch = Launch(plan, schedule, axes, lambda b, h, g, i: (b, h * groups + g, i))
    scalars = plan.scalars(inputs, entries)

    def step(block: Block, turn: Turn) -> None:
        _step(block, turn, keys[0])

    return launch.run(step, scalars, operands, results, scratch, role="backward", matmuls=5)


def _step(block: Block, turn: Turn, first: int) -> None:
    plan, refs = block.plan, block.refs

    @pl.when(turn.begins)
    def _() -> None:
        refs["accumulator"][...] = jnp.zeros(refs["accumulator"].shape, jnp.float32)
        for number, name in enumerate(("lse", "delta")):
            row = refs["statistics"][0, 0, number : number + 1, :]
            refs[name][...] = jnp.broadcast_to(row, (LANES, plan.grid.block_q)).T

    @pl.when(turn.begins & (block.row == 0) & (jax.lax.rem(block.head, jnp.int32(plan.inputs.groups)) == 0))
    def _() -> None:
        for name in ("d_key", "d_value"):
            refs[name][...] = jnp.zeros(refs[name].shape, jnp.float32)

    def products(unit: Unit) -> tuple[jax.Array, jax.Array]:
        scores = plan.dot(block.queries("query", unit), block.keys("key", unit), (1, 1))
        return scores, plan.dot(block.queries("d_out", unit), block.keys("value", unit), (1, 1))

    run_units(block, turn, products, lambda found, unit, corner: _add(block, found, unit, corner, first))

    @pl.when(turn.ends)
    def _() -> None:
        d_query = refs["accumulator"][...] * plan.inputs.softmax_scale
        refs["d_query"][0, 0] = d_query.astype(refs["d_query"].dtype)


def _add(block: Block, found: tuple[jax.Array, ...], unit: Unit, corner: Corner | None, first: int) -> None:
    """Adds a unit to dQ, dK and dV.

    Args:
      found: QKᵀ and dP.
      first: the first block of keys of the call.
    """
    plan, refs = block.plan, block.refs
    rows = pl.ds(unit.row, unit.rows)
    scores, d_probabilities = found
    x, slope = logits(block, scores, unit, corner)
    p = jnp.exp2((x - lanes(refs["lse"][rows, :], unit.columns)) * plan.factor)
    used = p
    if plan.inputs.dropout:
        keep_scale = kept(block, unit) * (1.0 / (1.0 - plan.inputs.drawn_dropout))
        used, d_probabilities = p * keep_scale, d_probabilities * keep_scale
    d_scores = p * (d_probabilities - lanes(refs["delta"][rows, :], unit.columns))
    if slope is not None:
        d_scores = d_scores * slope
    if "d_scores" in refs:
        refs["d_scores"][0, 0, rows, pl.ds(unit.column, unit.columns)] = d_scores
    dtype = plan.inputs.dtype
    used, d_scores = used.astype(dtype), d_scores.astype(dtype)
    refs["accumulator"][rows, :] += plan.dot(d_scores, block.keys("key", unit), (1, 0))
    start = pl.multiple_of(jnp.asarray((block.column - first) * plan.grid.block_k), LANES)
    columns = pl.ds(start + unit.column, unit.columns)
    refs["d_value"][0, 0, :, columns] += plan.dot(refs["d_out_t"][0, 0, :, rows], used, (1, 0))
    refs["d_key"][0, 0, :, columns] += plan.dot(refs["query_t"][0, 0, :, rows], d_scores, (1, 0))
