"""A call of linear attention on Hopper: a Triton kernel for what chunks need, then one for all that has states."""

import jax
import jax.numpy as jnp

from tilewright.kernels.linear_attention.chunks import CHUNK, ChunkTable, chunk_table
from tilewright.kernels.linear_attention.hopper.forward import (
    GATES,
    ForwardCall,
    ForwardOperands,
    chunk_forward,
)
from tilewright.kernels.linear_attention.hopper.params import HopperLinearAttentionParams
from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs, LinearAttentionResults
from tilewright.kernels.triton import launch

CLEARED = 1024
"""Elements of a store of zeros."""


def forward_call(inputs: LinearAttentionInputs, params: HopperLinearAttentionParams) -> ForwardCall:
    """The static half of the kernel's call."""
    return ForwardCall(
        sequences=inputs.sequences,
        heads=inputs.heads,
        value_heads=inputs.value_heads,
        key_dim=inputs.key_dim,
        value_dim=inputs.value_dim,
        delta=inputs.beta is not None,
        return_state=inputs.return_state,
        consumers=params.consumers,
        stages=params.stages,
    )


def forward(inputs: LinearAttentionInputs, params: HopperLinearAttentionParams) -> LinearAttentionResults:
    """The results of a call."""
    table = chunk_table(inputs.batch, inputs.length, cum_seqlens=inputs.cum_seqlens, seq_lengths=inputs.seq_lengths)
    gates, solve = prepared(inputs, table)
    rows = inputs.batch * inputs.length
    query, key, value = (x.reshape(rows, *x.shape[2:]) for x in (inputs.query, inputs.key, inputs.value))
    first_row, length = _sequences(inputs, table)
    operands = ForwardOperands(
        query, key, value, gates, solve,
        state=None if inputs.initial_state is None else inputs.initial_state.mT.astype(jnp.float32),
        first_row=first_row, first_chunk=table.sequences[:, 0], length=length,
    )  # fmt: skip
    results = chunk_forward(operands, forward_call(inputs, params))
    whole = inputs.cum_seqlens is None and inputs.seq_lengths is None
    out = results.out if whole else _with_zeros(results.out, table)
    return LinearAttentionResults(out.reshape(inputs.value.shape), None if results.state is None else results.state.mT)


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
            "PRECISION": "tf32",
        },
    )  # fmt: skip
    return gates, solve if delta else None


def _sequences(inputs: LinearAttentionInputs, table: ChunkTable) -> tuple[jax.Array, jax.Array]:
    """The first row and the number of tokens of each sequence."""
    if inputs.cum_seqlens is not None:
        bounds = jnp.clip(inputs.cum_seqlens, 0, inputs.length)
        return bounds[:-1], jnp.maximum(bounds[1:] - bounds[:-1], 0)
    lengths = jnp.full((inputs.batch,), inputs.length, jnp.int32)
    if inputs.seq_lengths is not None:
        lengths = jnp.clip(inputs.seq_lengths, 0, inputs.length)
    return jnp.arange(inputs.batch, dtype=jnp.int32) * inputs.length, lengths


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
