"""The passes of linear attention with decays of channels over chunks, by launches of Triton kernels."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.kernels.linear_attention.chunks import CHUNK, ChunkTable, chunk_table
from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs, LinearAttentionResults
from tilewright.kernels.linear_attention.inverse import inverted
from tilewright.kernels.linear_attention.passes.chunks import TritonPass, absent, block_k, normalized, operand_dtype
from tilewright.kernels.linear_attention.passes.gradients import normalized_gradients
from tilewright.kernels.linear_attention.triton.params import TritonLinearAttentionParams
from tilewright.kernels.triton import launch
from tilewright.kernels.triton.limits import MIN_DOT, power_of_two
from tilewright.kernels.triton.matmul import tl_precision

SCORE_WARPS, SCORE_CHANNELS, STREAM_CHANNELS = 8, 32, 64
"""Warps of the kernels of scores, and channels of their steps: two programs of 8 warps fit a multiprocessor."""


@dataclasses.dataclass(frozen=True)
class ChunksOfChannels:
    """A call with decays of channels, by chunks; see ``channel_kernels`` for the arrays."""

    inputs: LinearAttentionInputs
    table: ChunkTable
    query: jax.Array
    key: jax.Array
    gamma: jax.Array

    @property
    def operand(self) -> Any:
        return operand_dtype(self.inputs.value.dtype)

    def constants(self, tile: TritonPass, block_k: int) -> dict[str, Any]:
        """The constants of a pass over values."""
        return {
            "HV": self.inputs.value_heads,
            "K": self.inputs.key_dim,
            "V": self.inputs.value_dim,
            "BLOCK_K": block_k,
            "BLOCK_V": min(tile.block_v, power_of_two(self.inputs.value_dim, MIN_DOT)),
            "PRECISION": tl_precision(),
        }

    def per_chunk(self, *shape: int) -> tuple[int, ...]:
        return (self.table.num_chunks, self.inputs.value_heads, *shape)

    def blocks(self, constants: dict[str, Any]) -> int:
        """Blocks of V."""
        return -(-self.inputs.value_dim // constants["BLOCK_V"])


@dataclasses.dataclass(frozen=True)
class ChannelChunks(ChunksOfChannels):
    """A call without a removal; arrays of a delta rule have no elements where there is none."""

    from_query: jax.Array
    from_key: jax.Array
    to_end: jax.Array
    scores: jax.Array
    inverse: jax.Array


def struct(shape: tuple[int, ...], dtype: Any, *, present: bool = True) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an output; without elements if it is not ``present``."""
    return jax.ShapeDtypeStruct(shape if present else (0,), dtype)


def channel_sums(inputs: LinearAttentionInputs, table: ChunkTable, width: int) -> jax.Array:
    """γ of all chunks, ``width`` channels in a program."""
    from tilewright.kernels.linear_attention.triton import channel_kernels as kernels

    heads, key_dim = inputs.value_heads, inputs.key_dim
    (gamma,) = launch(
        kernels.channel_gates,
        [inputs.log_decay, table.chunks],
        [struct((table.num_chunks, heads, CHUNK, key_dim), jnp.float32)],
        grid=[table.num_chunks * heads * -(-key_dim // width)],
        constants={"HV": heads, "K": key_dim, "BLOCK_K": width},
    )
    return gamma


def score_constants(inputs: LinearAttentionInputs, width: int) -> dict[str, Any]:
    """The constants of a kernel of scores."""
    wide = inputs.key.dtype.itemsize == 4
    return {
        "H": inputs.heads,
        "HV": inputs.value_heads,
        "K": inputs.key_dim,
        "BLOCK_K": width,
        "SCALE": float(inputs.scale),
        "GRID": 16.0 if wide else 64.0,
        "PRECISION": tl_precision(),
        "INVERSE": "tf32x3" if wide else "tf32",
    }


def block_range(inputs: LinearAttentionInputs) -> int:
    """log2 of what a channel may decay by in a block of tokens that has one anchor.

    On the grid of ``score_constants`` sums have 24 bits, so they are exact less an anchor half of that away.
    """
    return 56 if inputs.key.dtype.itemsize == 4 else 160


def block_constants(inputs: LinearAttentionInputs) -> dict[str, Any]:
    """More constants of the kernel of scores that divides chunks into blocks."""
    width = power_of_two(inputs.key_dim, MIN_DOT)
    return {"CHANNELS": width, "WIDTH": min(width, STREAM_CHANNELS), "RANGE": block_range(inputs)}


def chunked(inputs: LinearAttentionInputs) -> ChannelChunks:
    """The table of chunks and what tokens of a chunk have in common, by kernels that are parallel over chunks."""
    from tilewright.kernels.linear_attention.triton import channel_kernels as kernels

    table = chunk_table(inputs.batch, inputs.length, cum_seqlens=inputs.cum_seqlens, seq_lengths=inputs.seq_lengths)
    query, key = normalized(inputs, inputs.query, inputs.key)
    heads, key_dim, delta = inputs.value_heads, inputs.key_dim, inputs.beta is not None
    operand, width = operand_dtype(inputs.value.dtype), min(power_of_two(key_dim, MIN_DOT), SCORE_CHANNELS)
    tokens, pairs = (table.num_chunks, heads, CHUNK, key_dim), (table.num_chunks, heads, CHUNK, CHUNK)
    gamma = channel_sums(inputs, table, width)
    constants = score_constants(inputs, width)
    options = {"DELTA": delta, "BONUS": inputs.bonus is not None}
    from_query, from_key, to_end, scores, negative, levels = launch(
        kernels.channel_scores,
        [query, key, absent(inputs.beta), absent(inputs.bonus), gamma, table.chunks],
        [
            struct(tokens, operand),
            struct(tokens, operand, present=delta),
            struct(tokens, operand),
            struct(pairs, operand),
            struct(pairs, jnp.float32, present=delta),
            struct(tokens[:2], jnp.int32),
        ],
        grid=[table.num_chunks * heads],
        constants=constants | options | block_constants(inputs),
        num_warps=SCORE_WARPS,
        num_stages=1,
    )
    scores, negative = launch(
        kernels.channel_scores_of_halves,
        [query, key, absent(inputs.beta), gamma, table.chunks, levels, scores, negative],
        [struct(scores.shape, scores.dtype), struct(negative.shape, negative.dtype)],
        grid=[table.num_chunks * heads],
        constants=constants | options,
        num_warps=4,
        num_stages=1,
        in_place={0: 6, 1: 7},
    )
    # Not in float16: elements of strong decays are small, and nothing that they stand for is dropped.
    inverse = inverted(negative, table) if delta else negative
    return ChannelChunks(inputs, table, query, key, gamma, from_query, from_key, to_end, scores, inverse)


def state_pass(chunks: ChannelChunks, tile: TritonPass, *, final: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The states before all chunks, the updates, which are the values without a delta rule, and the last states."""
    from tilewright.kernels.linear_attention.triton import channel_kernels as kernels

    inputs, table = chunks.inputs, chunks.table
    constants = chunks.constants(tile, power_of_two(inputs.key_dim, MIN_DOT))
    delta = inputs.beta is not None
    states, updates, last = launch(
        kernels.channel_states,
        [
            inputs.value, absent(inputs.beta), chunks.from_key, chunks.to_end, chunks.inverse, chunks.gamma,
            absent(inputs.initial_state), table.chunks, table.sequences,
        ],
        [
            struct(chunks.per_chunk(inputs.key_dim, inputs.value_dim), chunks.operand),
            struct(inputs.value.shape, chunks.operand, present=delta),
            struct(inputs.state_shape, jnp.float32, present=final),
        ],
        grid=[table.num_sequences * inputs.value_heads * chunks.blocks(constants)],
        constants=constants | {"DELTA": delta, "INITIAL": inputs.initial_state is not None, "FINAL": final},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    return states, updates if delta else inputs.value, last


def forward(inputs: LinearAttentionInputs, params: TritonLinearAttentionParams) -> LinearAttentionResults:
    """The results of a call."""
    from tilewright.kernels.linear_attention.triton import channel_kernels as kernels

    chunks = chunked(inputs)
    states, updates, last = state_pass(chunks, params.states, final=inputs.return_state)
    tile = params.tokens
    constants = chunks.constants(tile, block_k(inputs))
    (out,) = launch(
        kernels.channel_outputs,
        [chunks.from_query, chunks.scores, updates, states, chunks.table.chunks],
        [struct(inputs.value.shape, inputs.value.dtype)],
        grid=[chunks.table.num_chunks * inputs.value_heads * chunks.blocks(constants)],
        constants=constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return LinearAttentionResults(out, last if inputs.return_state else None)


def backward(
    inputs: LinearAttentionInputs, cotangents: LinearAttentionResults, params: TritonLinearAttentionParams
) -> dict[str, Any]:
    """Gradients by name, of all that is differentiable; the states are computed again."""
    from tilewright.kernels.linear_attention.triton import channel_backward_kernels as kernels

    chunks = chunked(inputs)
    states, updates, _ = state_pass(chunks, params.states, final=False)
    d_out = jnp.zeros_like(inputs.value) if cotangents.out is None else cotangents.out
    d_updates, d_states, d_initial = _state_gradients(chunks, d_out, cotangents.state, params.states)
    delta, tile = inputs.beta is not None, params.tokens
    width = min(tile.block_v, power_of_two(inputs.key_dim, MIN_DOT))
    constants = chunks.constants(tile, width) | {"DELTA": delta, "SCALE": float(inputs.scale)}
    pairs, per_token = chunks.per_chunk(CHUNK, CHUNK), inputs.value.shape[:3]
    d_scores, d_products, d_value, d_beta = launch(
        kernels.channel_pair_gradients,
        [inputs.value, absent(inputs.beta), updates, d_out, d_updates, chunks.table.chunks],
        [
            struct(pairs, chunks.operand),
            struct(pairs, chunks.operand, present=delta),
            struct(inputs.value.shape, inputs.value.dtype, present=delta),
            struct(per_token, jnp.float32, present=delta),
        ],
        grid=[chunks.table.num_chunks * inputs.value_heads],
        constants={name: constants[name] for name in ("HV", "V", "BLOCK_V", "DELTA", "SCALE", "PRECISION")},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    shares = -(-inputs.key_dim // width)
    bonus = inputs.bonus is not None
    d_query, d_key, of_strength, d_bonus, d_decay = launch(
        kernels.channel_token_gradients,
        [
            chunks.query, chunks.key, absent(inputs.beta), absent(inputs.bonus), updates, d_out, d_updates, states,
            d_states, d_scores, d_products, chunks.gamma, chunks.table.chunks,
        ],
        [
            struct(inputs.query.shape, inputs.query.dtype),
            struct(inputs.key.shape, inputs.key.dtype),
            struct((shares, *per_token), jnp.float32, present=delta),
            struct(chunks.per_chunk(inputs.key_dim), jnp.float32, present=bonus),
            struct((*per_token, inputs.key_dim), jnp.float32),
        ],
        grid=[chunks.table.num_chunks * inputs.heads * shares],
        scalars={"rows_of_all": inputs.batch * inputs.length},
        constants=constants | {"H": inputs.heads, "BONUS": bonus, "RANGE": block_range(inputs)},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    if inputs.qk_l2norm:
        d_query, d_key = normalized_gradients(inputs, d_query, d_key)
    found = {"query": d_query, "key": d_key, "value": d_value if delta else d_updates, "initial_state": d_initial}
    found["log_decay"] = d_decay
    if delta:
        found["beta"] = d_beta + of_strength.sum(0)
    if bonus:
        found["bonus"] = d_bonus.sum(0)
    return {name: found[name].astype(getattr(inputs, name).dtype) for name in inputs.gradients}


def _state_gradients(
    chunks: ChannelChunks, d_out: jax.Array, d_final: jax.Array | None, tile: TritonPass
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of the updates, of the states behind all chunks, and of the initial states."""
    from tilewright.kernels.linear_attention.triton import channel_backward_kernels as kernels

    inputs, table = chunks.inputs, chunks.table
    constants = chunks.constants(tile, power_of_two(inputs.key_dim, MIN_DOT))
    initial = inputs.initial_state is not None
    d_states, d_initial, d_updates = launch(
        kernels.channel_state_gradients,
        [
            d_out, absent(inputs.beta), chunks.from_query, chunks.from_key, chunks.to_end, chunks.scores,
            chunks.inverse, chunks.gamma, absent(d_final), table.chunks, table.sequences,
            # The rows of padding, of which the pass over states knows nothing.
            jnp.zeros(inputs.value.shape, chunks.operand),
        ],
        [
            struct(chunks.per_chunk(inputs.key_dim, inputs.value_dim), chunks.operand),
            struct(inputs.state_shape, jnp.float32, present=initial),
            struct(inputs.value.shape, chunks.operand),
        ],
        grid=[table.num_sequences * inputs.value_heads * chunks.blocks(constants)],
        constants=constants
        | {"DELTA": inputs.beta is not None, "INITIAL": initial, "FINAL": d_final is not None},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        in_place={2: 11},
    )  # fmt: skip
    return d_updates, d_states, d_initial
