"""The forward pass in plain XLA: online softmax over the tiles that are not fully masked.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao et al., "FlashAttention" (2022).
"""

from typing import Any

import jax
import jax.numpy as jnp

from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.operands import with_cleared_values
from tilewright.kernels.flash_attention.results import Results
from tilewright.kernels.flash_attention.xla.scores import Scores
from tilewright.kernels.flash_attention.xla.tiles import (
    Tiling,
    is_unrolled,
    over_steps,
    read,
    run_tiles,
    schedule,
    write,
)
from tilewright.kernels.masks import Index
from tilewright.kernels.numerics.softmax import accumulation_dtype, finite_shift, sinks_statistics
from tilewright.kernels.op.sharding import vary_over, varying_axes

type RowState = tuple[Any, Any, Any]


def attention_forward(inputs: AttentionInputs, tiling: Tiling) -> Results:
    """``(out, lse)``; lse is float32, or float64 for float64 inputs."""
    inputs = with_cleared_values(vary_over(varying_axes(inputs), inputs))
    _, (out, lse) = over_steps(tiling, lambda step, carry: (carry, _step(inputs, tiling, step)), ())
    batch, _, heads, _ = inputs.query.shape
    out = jnp.moveaxis(out, 3, 1).reshape(batch, tiling.grid.q_length, heads, -1)
    return out, lse.reshape(batch, heads, tiling.grid.q_length)


def _step(inputs: AttentionInputs, tiling: Tiling, step: Index) -> tuple[Any, Any]:
    scores = Scores.of(inputs, tiling, step)
    value = tiling.kv_tiles(tiling.take(inputs.value, step, batch_axis=0, head_axis=2))
    runs = schedule(tiling, tiling.take_mask(inputs.mask, step))
    initial = _initial(inputs, tiling, step, scores.query, value)
    grid = tiling.grid

    if is_unrolled(runs):
        # None: the first tile of a row has nothing to rescale. With sinks there is something before it.
        fresh = None if inputs.softmax_aux is None else initial
        states: Any = [fresh] * grid.q_tiles

        def body(row, column, masked, states):
            return write(states, row, _tile(scores, value, row, column, masked, read(states, row)))

        states = run_tiles(runs, body, states)
        states = [initial if state is None else state for state in states]
        rows = tuple(jnp.stack([state[part] for state in states]) for part in range(3))
    else:
        stores = tuple(jnp.broadcast_to(part, (grid.q_tiles, *part.shape)) for part in initial)

        def body(row, column, masked, stores):
            state = tuple(read(store, row) for store in stores)
            state = _tile(scores, value, row, column, masked, state)
            return tuple(write(store, row, part) for store, part in zip(stores, state, strict=True))

        rows = run_tiles(runs, body, stores)
    return _finish(inputs, tiling, rows)


def _initial(inputs: AttentionInputs, tiling: Tiling, step: Index, query: jax.Array, value: jax.Array) -> RowState:
    """Row maximum, row sum and unnormalised output of a row tile before its first key: those of the sinks."""
    dtype = accumulation_dtype(inputs.query.dtype)
    shape = query.shape[1:-1]
    axes = varying_axes(inputs)
    weighted = vary_over(axes, jnp.zeros((*shape, value.shape[-1]), dtype))
    if inputs.softmax_aux is None:
        return *vary_over(axes, (jnp.full(shape, -jnp.inf, dtype), jnp.zeros(shape, dtype))), weighted
    sinks = tiling.take(inputs.softmax_aux[None].astype(dtype), step, batch_axis=0, head_axis=1)
    parts = sinks_statistics(sinks.reshape(tiling.head_size, tiling.group, 1, -1))
    row_max, total = (jnp.broadcast_to(part, shape) for part in parts)
    return row_max, total, weighted


def _tile(
    scores: Scores, value: jax.Array, row: Index, column: Index, masked: bool, state: RowState | None
) -> RowState:
    logits, factor, _ = scores.logits(row, column, masked)
    row_max = jnp.max(logits, axis=-1)
    # A factor that is left over is positive (`Scores.logits`), so it can follow the maximum.
    if factor != 1.0:
        row_max, logits = row_max * factor, logits * factor
    if state is not None:
        row_max = jnp.maximum(row_max, state[0])
    shift = finite_shift(row_max)
    probabilities = jnp.exp(logits - shift[..., None])
    total = jnp.sum(probabilities, axis=-1)
    # After the sum, for softmax comes before the dropout.
    if scores.dropout_keys is not None:
        probabilities = jnp.where(scores.keep(row, column), probabilities, 0.0)
    weighted = jnp.einsum(
        "bhgqk,bhkv->bhgqv",
        probabilities.astype(value.dtype),
        read(value, column),
        precision=scores.inputs.precision,
        preferred_element_type=probabilities.dtype,
    )
    if state is None:
        return row_max, total, weighted
    shrink = jnp.exp(state[0] - shift)
    return row_max, state[1] * shrink + total, state[2] * shrink[..., None] + weighted


def _finish(inputs: AttentionInputs, tiling: Tiling, rows: tuple[Any, ...]) -> tuple[Any, Any]:
    row_max, total, weighted = rows
    # The dropout's factor is applied once for each row; lse is that of all keys, dropped or not.
    denominator = (1.0 - inputs.drawn_dropout) * total
    out = weighted / jnp.where(total == 0.0, 1.0, denominator)[..., None]
    # Fully masked rows: −∞ + log 0 = −∞.
    lse = row_max + jnp.log(total)
    return tiling.q_rows(out.astype(inputs.query.dtype)), tiling.q_rows(lse)
