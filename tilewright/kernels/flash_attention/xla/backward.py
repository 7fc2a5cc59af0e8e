"""The backward pass in plain XLA: recomputes P from lse, over the tiles that are not fully masked."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.operands import with_cleared_rows
from tilewright.kernels.flash_attention.results import row_terms, sinks_gradient
from tilewright.kernels.flash_attention.xla.position_bias import (
    add_position_bias,
    padded_gradient,
    unpadded_gradient,
)
from tilewright.kernels.flash_attention.xla.scores import Scores, pad_scores
from tilewright.kernels.flash_attention.xla.tiles import (
    TileRun,
    Tiling,
    is_unrolled,
    over_steps,
    read,
    run_tiles,
    schedule,
    write,
)
from tilewright.kernels.masks import Index
from tilewright.kernels.numerics.softmax import accumulation_dtype
from tilewright.kernels.op.sharding import vary_over, varying_axes


class BiasGradients(NamedTuple):
    """The gradients of both kinds of bias, padded to whole tiles; None if not wanted.

    Attributes:
      array: ``[batch | 1, heads | 1, q_length | 1, kv_length | 1]``.
      values: those of a bias of positions.
    """

    array: jax.Array | None
    values: jax.Array | None


def attention_backward(
    inputs: AttentionInputs, out: Array, lse: Array, d_out: Array, d_lse: Array | None, tiling: Tiling
) -> dict[str, Array | None]:
    """Gradients by name of the input; None for a bias or sinks that are absent, and for a constant bias.

    Inside ``shard_map`` those of the device's part: who calls sums them over the devices that share an argument.
    """
    axes = varying_axes((inputs, d_out))
    inputs, out, lse, d_out, d_lse = vary_over(axes, (inputs, out, lse, d_out, d_lse))
    inputs, d_out = with_cleared_rows(inputs, d_out)
    delta, exponent = row_terms(inputs, out, lse, d_out, d_lse)
    dtype = accumulation_dtype(inputs.query.dtype)
    bias = inputs.differentiated_bias
    d_bias = None if bias is None else pad_scores(vary_over(axes, jnp.zeros(bias.shape, dtype)), tiling)
    position_bias, d_values = inputs.differentiated_position_bias, None
    if position_bias is not None:
        d_values = vary_over(axes, padded_gradient(position_bias, tiling, dtype))

    def run_step(step, d_biases):
        return _step(inputs, d_out, exponent, delta, tiling, step, d_biases)

    d_biases = BiasGradients(d_bias, d_values)
    (d_bias, d_values), (d_query, d_key, d_value) = over_steps(tiling, run_step, d_biases)
    batch, q_length, heads, _ = inputs.query.shape
    if bias is not None:
        d_bias = d_bias[tuple(slice(0, size) for size in bias.shape)].astype(bias.dtype)
    gradients = {
        "query": jnp.moveaxis(d_query, 3, 1).reshape(batch, q_length, heads, -1),
        "key": jnp.moveaxis(d_key, 2, 1),
        "value": jnp.moveaxis(d_value, 2, 1),
        "bias": d_bias,
        "softmax_aux": sinks_gradient(inputs, delta, exponent),
    }
    if position_bias is not None:
        gradients["position_bias"] = unpadded_gradient(d_values, position_bias, tiling)
    return gradients


def _step(
    inputs: AttentionInputs,
    d_out: Array,
    exponent: Array,
    delta: Array,
    tiling: Tiling,
    step: Index,
    d_biases: BiasGradients,
) -> tuple[Any, tuple[Any, Any, Any]]:
    scores = Scores.of(inputs, tiling, step)
    value = tiling.kv_tiles(tiling.take(inputs.value, step, batch_axis=0, head_axis=2))
    d_out_tiles = tiling.q_tiles(tiling.take(d_out, step, batch_axis=0, head_axis=2))
    rows = [tiling.take(part, step, batch_axis=0, head_axis=1).transpose(0, 2, 1) for part in (exponent, delta)]
    # In the padding of a ragged tile P = exp(x − ∞) = 0, so it adds to no gradient.
    exponent_tiles, delta_tiles = tiling.q_tiles(rows[0], fill=jnp.inf), tiling.q_tiles(rows[1])
    runs = schedule(tiling, tiling.take_mask(inputs.mask, step))

    def body(row, column, masked, carry):
        d_query, d_key, d_value, (d_bias, d_values) = carry
        terms = (read(d_out_tiles, row), read(value, column), read(exponent_tiles, row), read(delta_tiles, row))
        d_logits, *parts = _tile(scores, *terms, row, column, masked)
        if d_bias is not None:
            d_bias = _add_bias(d_bias, d_logits, tiling, step, row, column)
        if d_values is not None:
            assert scores.position_bias is not None
            d_values = add_position_bias(d_values, scores.position_bias, d_logits, step, row, column)
        d_biases = BiasGradients(d_bias, d_values)
        return _add(d_query, row, parts[0]), _add(d_key, column, parts[1]), _add(d_value, column, parts[2]), d_biases

    carry = _accumulate(runs, body, tiling, scores, value, d_biases)
    d_query, d_key, d_value, d_biases = carry
    # dQ = scale · dS·K and dK = scale · dSᵀ·Q. The query of ``scores`` has the scale, or the rest of it is ``factor``.
    d_query = tiling.q_rows(d_query) * inputs.softmax_scale
    d_key = _kv_columns(tiling, d_key)
    if scores.factor != 1.0:
        d_key = d_key * scores.factor
    gradients = (
        d_query.astype(inputs.query.dtype),
        d_key.astype(inputs.key.dtype),
        _kv_columns(tiling, d_value).astype(inputs.value.dtype),
    )
    return d_biases, gradients


def _accumulate(
    runs: list[TileRun],
    body: Callable[..., Any],
    tiling: Tiling,
    scores: Scores,
    value: jax.Array,
    d_biases: BiasGradients,
) -> Any:
    """Accumulates the gradients as arrays of tiles; those of key and value are transposed within a tile."""
    grid = tiling.grid
    dtype = accumulation_dtype(scores.query.dtype)
    q_tile, k_tile, v_tile = scores.query.shape[1:], scores.key.shape[1:], value.shape[1:]
    tiles = (
        (grid.q_tiles, q_tile),
        (grid.kv_tiles, (*k_tile[:2], k_tile[3], k_tile[2])),
        (grid.kv_tiles, (*v_tile[:2], v_tile[3], v_tile[2])),
    )
    axes = varying_axes(scores.query)
    if not is_unrolled(runs):
        zeros = vary_over(axes, tuple(jnp.zeros((count, *shape), dtype) for count, shape in tiles))
        return run_tiles(runs, body, (*zeros, d_biases))
    *lists, d_biases = run_tiles(runs, body, (*([None] * count for count, _ in tiles), d_biases))
    # None: no tile of that row or column is visible, so its gradient is 0.
    filled = [
        jnp.stack([vary_over(axes, jnp.zeros(shape, dtype)) if part is None else part for part in parts])
        for parts, (_, shape) in zip(lists, tiles, strict=True)
    ]
    return (*filled, d_biases)


def _tile(
    scores: Scores,
    d_out: jax.Array,
    value: jax.Array,
    exponent: jax.Array,
    delta: jax.Array,
    row: Index,
    column: Index,
    masked: bool,
) -> tuple[Any, Any, Any, Any]:
    """``(d_logits, d_query, d_key, d_value)`` of one tile."""
    inputs = scores.inputs
    query, key = read(scores.query, row), read(scores.key, column)

    def matmul(subscripts: str, left: jax.Array, right: jax.Array) -> Any:
        dtype = accumulation_dtype(query.dtype)
        return jnp.einsum(subscripts, left, right, precision=inputs.precision, preferred_element_type=dtype)

    logits, factor, slope = scores.logits(row, column, masked)
    if factor != 1.0:
        logits = logits * factor
    probabilities = jnp.exp(logits - exponent[..., None])
    d_probabilities = matmul("bhgqv,bhkv->bhgqk", d_out, value)
    # dV takes P after the dropout. dS takes P before it, and dP times the dropout's factor: softmax comes first.
    dropped_probabilities = probabilities
    if scores.dropout_keys is not None:
        keep_scale = jnp.where(scores.keep(row, column), 1.0 / (1.0 - inputs.drawn_dropout), 0.0).astype(
            dropped_probabilities.dtype
        )
        dropped_probabilities, d_probabilities = dropped_probabilities * keep_scale, d_probabilities * keep_scale
    d_logits = probabilities * (d_probabilities - delta[..., None])
    if slope is not None:
        d_logits = d_logits * slope
    # Rounded as an operand of matmuls only: the gradient of a bias is summed from float32.
    d_logits_low = d_logits.astype(query.dtype)
    # The transposed operand is the small one: contracting the rows of a whole tile of scores is twice as slow on CPU.
    return (
        d_logits,
        matmul("bhgqk,bhkd->bhgqd", d_logits_low, key),
        matmul("bhgqd,bhgqk->bhdk", query, d_logits_low),
        matmul("bhgqv,bhgqk->bhvk", d_out, dropped_probabilities.astype(d_out.dtype)),
    )


def _add(store: Any, index: Index, part: jax.Array) -> Any:
    old = read(store, index)
    return write(store, index, part if old is None else old + part)


def _kv_columns(tiling: Tiling, tiles: jax.Array) -> Any:
    """Reshapes ``[kv_tiles, b, kv_heads, d, block_k]`` to ``[b, kv_heads, kv_length, d]``."""
    columns = tiles.transpose(1, 2, 0, 4, 3)
    columns = columns.reshape(*columns.shape[:2], -1, columns.shape[4])
    return columns[:, :, : tiling.grid.kv_length]


def _add_bias(d_bias: jax.Array, d_logits: jax.Array, tiling: Tiling, step: Index, row: Index, column: Index) -> Any:
    """Adds a tile's gradient to the whole bias's, summed over the dimensions that the bias broadcasts."""
    batch, kv_heads, group, block_q, block_k = d_logits.shape
    tile = d_logits.reshape(batch, kv_heads * group, block_q, block_k)
    summed = tuple(axis for axis in range(4) if d_bias.shape[axis] == 1 and tile.shape[axis] != 1)
    tile = jnp.sum(tile, axis=summed, keepdims=True)
    batch_start, head_start = tiling.starts(step)
    corner = (batch_start, head_start * tiling.group, row * block_q, column * block_k)
    # Dimensions that the bias broadcasts begin at 0, wherever the tile is.
    begins = [0 if size == 1 else start for start, size in zip(corner, d_bias.shape, strict=True)]
    starts = [np.int32(start) if isinstance(start, int) else start for start in begins]  # one type, also in x64 mode
    old = lax.dynamic_slice(d_bias, starts, tile.shape)
    return lax.dynamic_update_slice(d_bias, old + tile, starts)
