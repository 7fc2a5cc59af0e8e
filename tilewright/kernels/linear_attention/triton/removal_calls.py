"""The passes of linear attention with a removal over chunks, by launches of Triton kernels."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.kernels.linear_attention.chunks import CHUNK, chunk_table
from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs, LinearAttentionResults
from tilewright.kernels.linear_attention.inverse import inverted
from tilewright.kernels.linear_attention.passes.chunks import TritonPass, absent, block_k, normalized, operand_dtype
from tilewright.kernels.linear_attention.passes.gradients import normalized_gradients
from tilewright.kernels.linear_attention.triton.channel_calls import (
    SCORE_WARPS,
    ChunksOfChannels,
    block_constants,
    block_range,
    channel_sums,
    score_constants,
    struct,
)
from tilewright.kernels.linear_attention.triton.params import TritonLinearAttentionParams
from tilewright.kernels.triton import launch
from tilewright.kernels.triton.limits import MIN_DOT, power_of_two

SCORE_CHANNELS = 16
"""Channels of a step of the kernel of scores, which has four [64, 64] accumulators."""


@dataclasses.dataclass(frozen=True)
class RemovalChunks(ChunksOfChannels):
    """A call with a removal; see ``removal_kernels`` for the arrays."""

    from_query: jax.Array
    from_read: jax.Array
    to_end: jax.Array
    write_to_end: jax.Array
    key_pairs: jax.Array
    write_pairs: jax.Array
    read_pairs: jax.Array
    inverse: jax.Array

    @property
    def states(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the states of all chunks, or of their gradients."""
        return struct(self.per_chunk(self.inputs.key_dim, self.inputs.value_dim), self.operand)


def chunked(inputs: LinearAttentionInputs) -> RemovalChunks:
    """The table of chunks and what tokens of a chunk have in common, by kernels that are parallel over chunks."""
    from tilewright.kernels.linear_attention.triton import removal_kernels as kernels

    table = chunk_table(inputs.batch, inputs.length, cum_seqlens=inputs.cum_seqlens, seq_lengths=inputs.seq_lengths)
    query, key = normalized(inputs, inputs.query, inputs.key)
    heads, key_dim, operand = inputs.value_heads, inputs.key_dim, operand_dtype(inputs.value.dtype)
    width = min(power_of_two(key_dim, MIN_DOT), SCORE_CHANNELS)
    gamma = channel_sums(inputs, table, width)
    tokens, pairs = (table.num_chunks, heads, CHUNK, key_dim), (table.num_chunks, heads, CHUNK, CHUNK)
    constants = score_constants(inputs, width)
    from_query, from_read, to_end, write_to_end, *of_pairs, levels = launch(
        kernels.removal_scores,
        [query, key, inputs.removal_read, inputs.removal_write, gamma, table.chunks],
        [
            *[struct(tokens, operand)] * 4,
            *[struct(pairs, operand)] * 3,
            struct(pairs, jnp.float32),
            struct(tokens[:2], jnp.int32),
        ],
        grid=[table.num_chunks * heads],
        constants=constants | block_constants(inputs),
        num_warps=SCORE_WARPS,
        num_stages=1,
    )
    key_pairs, write_pairs, read_pairs, negative = launch(
        kernels.removal_scores_of_halves,
        [query, key, inputs.removal_read, inputs.removal_write, gamma, table.chunks, levels, *of_pairs],
        [struct(each.shape, each.dtype) for each in of_pairs],
        grid=[table.num_chunks * heads],
        constants=constants,
        num_warps=SCORE_WARPS,
        num_stages=1,
        in_place={0: 7, 1: 8, 2: 9, 3: 10},
    )
    return RemovalChunks(
        inputs, table, query, key, gamma, from_query, from_read, to_end, write_to_end, key_pairs, write_pairs,
        read_pairs, inverted(negative, table),
    )  # fmt: skip


def state_pass(chunks: RemovalChunks, tile: TritonPass, *, final: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The states before all chunks, the updates, and the last states."""
    from tilewright.kernels.linear_attention.triton import removal_kernels as kernels

    inputs, table = chunks.inputs, chunks.table
    constants = chunks.constants(tile, power_of_two(inputs.key_dim, MIN_DOT))
    states, updates, last = launch(
        kernels.removal_states,
        [
            inputs.value, chunks.from_read, chunks.to_end, chunks.write_to_end, chunks.read_pairs, chunks.inverse,
            chunks.gamma, absent(inputs.initial_state), table.chunks, table.sequences,
        ],
        [
            chunks.states,
            struct(inputs.value.shape, chunks.operand),
            struct(inputs.state_shape, jnp.float32, present=final),
        ],
        grid=[table.num_sequences * inputs.value_heads * chunks.blocks(constants)],
        constants=constants | {"INITIAL": inputs.initial_state is not None, "FINAL": final},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    return states, updates, last


def forward(inputs: LinearAttentionInputs, params: TritonLinearAttentionParams) -> LinearAttentionResults:
    """The results of a call."""
    from tilewright.kernels.linear_attention.triton import removal_kernels as kernels

    chunks, tile = chunked(inputs), params.tokens
    states, updates, last = state_pass(chunks, params.states, final=inputs.return_state)
    constants = chunks.constants(tile, block_k(inputs))
    (out,) = launch(
        kernels.removal_outputs,
        [
            inputs.value, chunks.from_query, chunks.key_pairs, chunks.write_pairs, updates, states,
            chunks.table.chunks,
        ],
        [struct(inputs.value.shape, inputs.value.dtype)],
        grid=[chunks.table.num_chunks * inputs.value_heads * chunks.blocks(constants)],
        constants=constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    return LinearAttentionResults(out, last if inputs.return_state else None)


def backward(
    inputs: LinearAttentionInputs, cotangents: LinearAttentionResults, params: TritonLinearAttentionParams
) -> dict[str, Any]:
    """Gradients by name, of all that is differentiable; the states are computed again."""
    from tilewright.kernels.linear_attention.triton import removal_backward_kernels as kernels

    chunks, tile = chunked(inputs), params.tokens
    states, updates, _ = state_pass(chunks, params.states, final=False)
    d_out = jnp.zeros_like(inputs.value) if cotangents.out is None else cotangents.out
    d_states, d_initial, d_value, d_updates = _state_gradients(chunks, d_out, cotangents.state, params.states)
    width = min(tile.block_v, power_of_two(inputs.key_dim, MIN_DOT))
    constants = chunks.constants(tile, width)
    pairs = [
        _pair_gradients(chunks, late, early, tile, scale)
        for late, scale in ((d_out, float(inputs.scale)), (d_updates, 1.0))
        for early in (inputs.value, updates)
    ]
    of_heads = (*inputs.value.shape[:3], inputs.key_dim)
    d_query, d_key, d_read, d_write, d_decay = launch(
        kernels.removal_token_gradients,
        [
            chunks.query, chunks.key, inputs.removal_read, inputs.removal_write, inputs.value, updates, d_out,
            d_updates, states, d_states, *pairs, chunks.gamma, chunks.table.chunks,
        ],
        [
            struct(inputs.query.shape, inputs.query.dtype),
            struct(inputs.key.shape, inputs.key.dtype),
            *[struct(of_heads, jnp.float32)] * 3,
        ],
        grid=[chunks.table.num_chunks * inputs.heads * -(-inputs.key_dim // width)],
        constants=constants
        | {"H": inputs.heads, "SCALE": float(inputs.scale), "RANGE": block_range(inputs)},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    if inputs.qk_l2norm:
        d_query, d_key = normalized_gradients(inputs, d_query, d_key)
    found = {
        "query": d_query,
        "key": d_key,
        "value": d_value,
        "log_decay": d_decay,
        "removal_read": d_read,
        "removal_write": d_write,
        "initial_state": d_initial,
    }
    return {name: found[name].astype(getattr(inputs, name).dtype) for name in inputs.gradients}


def _state_gradients(
    chunks: RemovalChunks, d_out: jax.Array, d_final: jax.Array | None, tile: TritonPass
) -> tuple[jax.Array, ...]:
    """The gradients of the states behind all chunks, of the initial states, of the values and of the updates."""
    from tilewright.kernels.linear_attention.triton import removal_backward_kernels as kernels

    inputs, table = chunks.inputs, chunks.table
    constants = chunks.constants(tile, power_of_two(inputs.key_dim, MIN_DOT))
    initial = inputs.initial_state is not None
    # The rows of padding, of which the pass over states knows nothing.
    d_value, d_updates = jnp.zeros_like(inputs.value), jnp.zeros(inputs.value.shape, chunks.operand)
    return launch(
        kernels.removal_state_gradients,
        [
            d_out, chunks.from_query, chunks.from_read, chunks.to_end, chunks.write_to_end, chunks.key_pairs,
            chunks.write_pairs, chunks.read_pairs, chunks.inverse, chunks.gamma, absent(d_final), table.chunks,
            table.sequences, d_value, d_updates,
        ],
        [
            chunks.states,
            struct(inputs.state_shape, jnp.float32, present=initial),
            struct(d_value.shape, d_value.dtype),
            struct(d_updates.shape, d_updates.dtype),
        ],
        grid=[table.num_sequences * inputs.value_heads * chunks.blocks(constants)],
        constants=constants | {"INITIAL": initial, "FINAL": d_final is not None},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        in_place={2: 13, 3: 14},
    )  # fmt: skip


def _pair_gradients(
    chunks: RemovalChunks, late: jax.Array, early: jax.Array, tile: TritonPass, scale: float
) -> jax.Array:
    from tilewright.kernels.linear_attention.triton import removal_backward_kernels as kernels

    table, inputs, constants = chunks.table, chunks.inputs, chunks.constants(tile, MIN_DOT)
    (found,) = launch(
        kernels.pair_gradients,
        [late, early, table.chunks],
        [struct(chunks.per_chunk(CHUNK, CHUNK), chunks.operand)],
        grid=[table.num_chunks * inputs.value_heads],
        constants={name: constants[name] for name in ("HV", "V", "BLOCK_V", "PRECISION")} | {"SCALE": scale},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return found
