"""The passes of linear attention over chunks, by launches of Triton kernels."""

from typing import Any

import jax
import jax.numpy as jnp

from tilewright.kernels.linear_attention import segments
from tilewright.kernels.linear_attention.chunks import CHUNK, chunk_table, segment_table
from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs, LinearAttentionResults
from tilewright.kernels.linear_attention.inverse import chunk_inverse
from tilewright.kernels.linear_attention.passes.chunks import Chunks, TritonPass, absent, block_k, normalized
from tilewright.kernels.linear_attention.passes.gradients import StatePasses, local_gradients, token_gradients
from tilewright.kernels.linear_attention.triton.params import TritonLinearAttentionParams
from tilewright.kernels.triton import launch
from tilewright.kernels.triton.limits import MIN_DOT, power_of_two


def chunked(inputs: LinearAttentionInputs) -> Chunks:
    """The table of chunks and what tokens of a chunk have in common, by kernels that are parallel over chunks."""
    from tilewright.kernels.linear_attention.triton import forward_kernels as kernels

    table = chunk_table(inputs.batch, inputs.length, cum_seqlens=inputs.cum_seqlens, seq_lengths=inputs.seq_lengths)
    query, key = normalized(inputs, inputs.query, inputs.key)
    gamma = inverse = absent(None)
    if inputs.log_decay is not None:
        block_h = min(power_of_two(inputs.value_heads), 16)
        (gamma,) = launch(
            kernels.chunk_gates,
            [inputs.log_decay, table.chunks],
            [jax.ShapeDtypeStruct((table.num_chunks, inputs.value_heads, CHUNK), jnp.float32)],
            grid=[table.num_chunks * -(-inputs.value_heads // block_h)],
            constants={
                "HV": inputs.value_heads,
                "BLOCK_H": block_h,
                "STRIDE": 0 if inputs.gate == "head" else inputs.value_heads,
            },
        )
    if inputs.beta is not None:
        narrow = inputs.qk_l2norm and key.dtype.itemsize == 2
        inverse = chunk_inverse(key, inputs.beta, table, dtype=jnp.float16 if narrow else jnp.float32)
    return Chunks(inputs, table, query, key, gamma, inverse)


def state_pass(
    chunks: Chunks, params: TritonLinearAttentionParams, *, final: bool
) -> tuple[jax.Array, jax.Array, jax.Array, segments.Segments | None]:
    """The states before all chunks, the updates, the last states, and the segments of a split call.

    The updates are the values without a delta rule.
    """
    inputs, tile = chunks.inputs, params.recomputed or params.states
    if not params.segment:
        states, updates, last = _chunk_states(chunks, tile, chunks.table.sequences, inputs.initial_state, final=final)
        return states, updates, last, None
    table = segment_table(chunks.table, params.segment)
    maps = _chunk_states(chunks, tile, table.segments, None, final=True, only_maps=True)[2]
    split = segments.Segments(inputs, table, params.segment, maps, chunks.gamma)
    begins = split.states(maps, inputs.initial_state)
    states, updates, ends = _chunk_states(chunks, tile, table.segments, begins, final=final)
    return states, updates, split.outermost(ends, inputs.initial_state) if final else ends, split


def _chunk_states(
    chunks: Chunks,
    tile: TritonPass,
    spans: jax.Array,
    initial: jax.Array | None,
    *,
    final: bool,
    only_maps: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The pass over states, of sequences or of segments; or what is made of any state."""
    from tilewright.kernels.linear_attention.triton import forward_kernels as kernels

    inputs = chunks.inputs
    constants = chunks.constants(tile, power_of_two(inputs.key_dim, MIN_DOT), states=True)
    delta = inputs.beta is not None
    columns = inputs.value_dim + (inputs.key_dim if only_maps and delta else 0)
    states, updates, last = launch(
        kernels.chunk_states,
        [
            chunks.key, inputs.value, absent(inputs.beta), chunks.inverse, chunks.gamma, absent(initial),
            chunks.table.chunks, spans,
        ],
        [
            chunks.states(chunks.operand, present=not only_maps),
            chunks.struct(chunks.operand, *inputs.value.shape, present=delta and not only_maps),
            chunks.struct(jnp.float32, spans.shape[0], inputs.value_heads, inputs.key_dim, columns, present=final),
        ],
        grid=[spans.shape[0] * inputs.value_heads * -(-columns // constants["BLOCK_V"])],
        constants=constants | {"INITIAL": initial is not None, "FINAL": final, "MAP": only_maps},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    return states, updates if delta else inputs.value, last


def state_maps(chunks: Chunks, params: TritonLinearAttentionParams) -> jax.Array:
    """The maps of states that the sequences are; see ``with_identity``.

    Segments are split as for results, so that XLA computes their maps once for both.
    """
    inputs, tile = chunks.inputs, params.recomputed or params.states
    if params.segment and not inputs.has_matrix:
        return state_pass(chunks, params, final=True)[2]
    is_split = params.segment > 0 and inputs.sequences == 1
    spans = segment_table(chunks.table, params.segment).segments if is_split else chunks.table.sequences
    maps = _chunk_states(chunks, tile, spans, None, final=True, only_maps=True)[2]
    return segments.composed(maps, inputs.value_dim) if is_split else maps


def forward(inputs: LinearAttentionInputs, params: TritonLinearAttentionParams) -> LinearAttentionResults:
    """The results of a call."""
    from tilewright.kernels.linear_attention.triton import forward_kernels as kernels

    chunks = chunked(inputs)
    if inputs.only_maps:
        return LinearAttentionResults(None, state_maps(chunks, params))
    states, updates, last, _ = state_pass(chunks, params, final=inputs.return_state)
    tile = params.tokens
    constants = chunks.constants(tile, block_k(inputs), scale=True)
    (out,) = launch(
        kernels.chunk_outputs,
        [chunks.query, chunks.key, updates, states, chunks.gamma, chunks.table.chunks],
        [chunks.struct(inputs.value.dtype, *inputs.value.shape)],
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
    chunks = chunked(inputs)
    states, updates, _, split = state_pass(chunks, params, final=False)
    d_out = jnp.zeros_like(inputs.value) if cotangents.out is None else cotangents.out
    d_updates, pairs, diagonal = local_gradients(chunks, d_out, updates, params.tokens)
    d_updates, d_states, d_initial = _state_gradients(chunks, d_out, d_updates, cotangents.state, params.states, split)
    passed = StatePasses(states, updates, d_states, d_updates, d_initial)
    return token_gradients(chunks, d_out, passed, pairs, diagonal, params.tokens)


def _state_gradients(
    chunks: Chunks,
    d_out: jax.Array,
    d_updates: jax.Array,
    d_final: jax.Array | None,
    tile: TritonPass,
    split: segments.Segments | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of the updates, of the states behind all chunks, and of the initial states."""
    initial = chunks.inputs.initial_state is not None
    given = chunks, d_out, d_updates, tile
    if split is None:
        return _gradients_of_spans(*given, chunks.table.sequences, d_final, initial=initial)
    d_external = _gradients_of_spans(*given, split.table.segments, None, initial=True, only_maps=True)[2]
    ends = split.states(d_external, d_final, reverse=True)
    d_updates, d_states, begins = _gradients_of_spans(*given, split.table.segments, ends, initial=initial)
    return d_updates, d_states, split.outermost(begins, d_final, first=True) if initial else begins


def _gradients_of_spans(
    chunks: Chunks,
    d_out: jax.Array,
    d_updates: jax.Array,
    tile: TritonPass,
    spans: jax.Array,
    d_final: jax.Array | None,
    *,
    initial: bool,
    only_maps: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same of sequences or of segments; or only the gradients before them."""
    from tilewright.kernels.linear_attention.triton import backward_kernels as kernels

    inputs = chunks.inputs
    constants = chunks.constants(tile, power_of_two(inputs.key_dim, MIN_DOT), states=True, scale=True)
    shape = spans.shape[0], *inputs.state_shape[1:]
    found = launch(
        kernels.state_gradients,
        [
            chunks.query, chunks.key, d_out, absent(inputs.beta), chunks.inverse, chunks.gamma, absent(d_final),
            chunks.table.chunks, spans, d_updates,
        ],
        [
            chunks.states(chunks.operand, present=not only_maps),
            chunks.struct(jnp.float32, *shape, present=initial),
            *([] if only_maps else [chunks.struct(d_updates.dtype, *d_updates.shape)]),
        ],
        grid=[spans.shape[0] * inputs.value_heads * chunks.blocks(constants)],
        constants=constants | {"INITIAL": initial, "FINAL": d_final is not None, "MAP": only_maps},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        in_place={} if only_maps else {2: 9},
    )  # fmt: skip
    d_states, d_initial = found[:2]
    return d_updates if only_maps else found[2], d_states, d_initial
