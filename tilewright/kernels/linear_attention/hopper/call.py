"""A call of linear attention on Hopper: a Triton kernel for what chunks need, then one for all that has states."""

import jax
import jax.numpy as jnp

from tilewright.kernels.linear_attention.chunks import CHUNK, ChunkTable, chunk_table, segment_table
from tilewright.kernels.linear_attention.hopper.forward import (
    GAMMA,
    GATES,
    ForwardCall,
    ForwardOperands,
    ForwardResults,
    chunk_forward,
)
from tilewright.kernels.linear_attention.hopper.params import HopperLinearAttentionParams
from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs, LinearAttentionResults
from tilewright.kernels.linear_attention.segments import Segments
from tilewright.kernels.triton import launch

CLEARED = 1024
"""Elements of a store of zeros."""


def forward_call(
    inputs: LinearAttentionInputs, params: HopperLinearAttentionParams, sequences: int, *, maps: bool = False
) -> ForwardCall:
    """The static half of the kernel's call for so many sequences or segments."""
    return ForwardCall(
        sequences=sequences,
        heads=inputs.heads,
        value_heads=inputs.value_heads,
        key_dim=inputs.key_dim,
        value_dim=inputs.value_dim,
        delta=inputs.beta is not None,
        return_state=inputs.return_state or maps,
        consumers=params.consumers,
        stages=params.stages,
        maps=maps,
    )


def forward(inputs: LinearAttentionInputs, params: HopperLinearAttentionParams) -> LinearAttentionResults:
    """The results of a call."""
    table = chunk_table(inputs.batch, inputs.length, cum_seqlens=inputs.cum_seqlens, seq_lengths=inputs.seq_lengths)
    gates, solve = prepared(inputs, table)

    def run(spans: jax.Array, initial: jax.Array | None, *, maps: bool = False) -> ForwardResults[jax.Array]:
        rows = inputs.batch * inputs.length
        query, key, value = (x.reshape(rows, *x.shape[2:]) for x in (inputs.query, inputs.key, inputs.value))
        state = None if initial is None else initial.mT.astype(jnp.float32)
        operands = ForwardOperands(query, key, value, gates, solve, state, *rows_of(spans, table))
        return chunk_forward(operands, forward_call(inputs, params, spans.shape[0], maps=maps))

    if params.segment:
        segments = segment_table(table, params.segment)
        # Nothing follows the last segment of a sequence; others are full of tokens.
        last = segments.sequences[:, 0] + segments.sequences[:, 1] - 1
        mapped = segments.segments.at[jnp.where(last >= 0, last, segments.num_segments), 1].set(0, mode="drop")
        transposed = run(mapped, None, maps=True).state
        assert transposed is not None  # the result of maps
        maps = transposed.mT
        split = Segments(inputs, segments, params.segment, maps, gates[:, :, GAMMA])
        results = run(segments.segments, split.states(maps, inputs.initial_state))
        state = None if results.state is None else split.outermost(results.state.mT, inputs.initial_state)
    else:
        results = run(table.sequences, inputs.initial_state)
        state = None if results.state is None else results.state.mT
    assert results.out is not None  # the result of a pass that is no map
    whole = inputs.cum_seqlens is None and inputs.seq_lengths is None
    out = results.out if whole else _with_zeros(results.out, table)
    return LinearAttentionResults(out.reshape(inputs.value.shape), state)


def rows_of(spans: jax.Array, table: ChunkTable) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The first row, the first chunk and the number of tokens of spans, ``[spans, 2]`` like those of the table."""
    first, count = spans[:, 0], spans[:, 1]
    # All chunks of a span but the last one are full.
    begin, last = (jnp.clip(each, 0, table.num_chunks - 1) for each in (first, first + count - 1))
    tokens = jnp.where(count > 0, (count - 1) * CHUNK + table.chunks[last, 2], 0)
    return table.chunks[begin, 0], first, tokens


def prepared(inputs: LinearAttentionInputs, table: ChunkTable) -> tuple[jax.Array, jax.Array | None]:
    """The gates of all chunks and, for a delta rule, T: see `ForwardOperands`."""
    from tilewright.kernels.linear_attention.hopper import prepare_kernels as kernels

    delta, absent = inputs.beta is not None, jnp.zeros((0,), jnp.float32)
    chunks = table.num_chunks, inputs.value_heads
    gates, solve = launch(
        kernels.prepare_chunk,
        [
            inputs.query, inputs.key, absent if inputs.log_decay is None else inputs.log_decay,
            absent if inputs.beta is None else inputs.beta, table.chunks,
        ],
        [
            jax.ShapeDtypeStruct((*chunks, GATES, CHUNK), jnp.float32),
            jax.ShapeDtypeStruct((*chunks, 2 * CHUNK, CHUNK) if delta else (0,), inputs.value.dtype),
        ],
        grid=[table.num_chunks * inputs.heads],
        constants={
            "H": inputs.heads,
            "HV": inputs.value_heads,
            "K": inputs.key_dim,
            "STRIDE": 0 if inputs.gate == "head" else inputs.value_heads,
            "GATE": inputs.log_decay is not None,
            "DELTA": delta,
            "NORM": inputs.qk_l2norm,
            "EPS": float(inputs.l2norm_eps),
            "SCALE": float(inputs.scale),
        },
        num_warps=1,
    )  # fmt: skip
    return gates, solve if delta else None


def _with_zeros(out: jax.Array, table: ChunkTable) -> jax.Array:
    """Zeros where a token belongs to no sequence, which the kernel has not written."""
    from tilewright.kernels.linear_attention.hopper import prepare_kernels as kernels

    (cleared,) = launch(
        kernels.clear_padding,
        [table.chunks, out],
        [jax.ShapeDtypeStruct(out.shape, out.dtype)],
        grid=[table.num_chunks],
        constants={"WIDTH": out.shape[1] * out.shape[2], "BLOCK": CLEARED},
        in_place={0: 1},
    )
    return cleared
