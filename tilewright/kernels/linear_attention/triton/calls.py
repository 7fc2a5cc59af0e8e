"""The passes of linear attention over chunks, by launches of Triton kernels."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tilewright.kernels.linear_attention.chunks import CHUNK, ChunkTable, chunk_table
from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs, LinearAttentionResults, l2_normalized
from tilewright.kernels.linear_attention.inverse import chunk_inverse
from tilewright.kernels.linear_attention.triton.params import TritonLinearAttentionParams, TritonPass
from tilewright.kernels.triton import launch
from tilewright.kernels.triton.limits import MIN_DOT, power_of_two
from tilewright.kernels.triton.matmul import tl_precision

MAX_GRADIENT_BLOCK = 64
"""Channels of keys, and channels of values of a step, in the kernel of the gradients of tokens."""


def operand_dtype(dtype: DTypeLike) -> Any:
    """The dtype of operands of matmuls: float16 values are in TensorFloat-32, which has its digits and more range."""
    return jnp.bfloat16 if jnp.dtype(dtype) == jnp.bfloat16 else jnp.float32


def normalized(inputs: LinearAttentionInputs, query: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Queries and keys as the kernels read them, in their dtype."""
    if not inputs.qk_l2norm:
        return query, key
    wide = (l2_normalized(x.astype(jnp.float32), inputs.l2norm_eps) for x in (query, key))
    first, second = (x.astype(query.dtype) for x in wide)
    return first, second


@dataclasses.dataclass(frozen=True)
class Chunks:
    """A call, by chunks.

    Attributes:
      gamma, inverse: see ``forward_kernels``; without elements where there is no decay, or no delta rule.
    """

    inputs: LinearAttentionInputs
    table: ChunkTable
    query: jax.Array
    key: jax.Array
    gamma: jax.Array
    inverse: jax.Array

    @property
    def rows(self) -> int:
        return self.inputs.batch * self.inputs.length

    @property
    def operand(self) -> Any:
        return operand_dtype(self.inputs.value.dtype)

    def constants(self, tile: TritonPass, block_k: int, *, states: bool = False, scale: bool = False) -> dict[str, Any]:
        """The constants of a pass; ``states`` and ``scale`` for the kernels that have them."""
        inputs = self.inputs
        found: dict[str, Any] = {
            "H": inputs.heads,
            "HV": inputs.value_heads,
            "K": inputs.key_dim,
            "V": inputs.value_dim,
            "BLOCK_K": block_k,
            "BLOCK_V": min(tile.block_v, power_of_two(inputs.value_dim, MIN_DOT)),
            "GATE": inputs.log_decay is not None,
            "PRECISION": tl_precision(),
        }
        if states:
            found |= {"DELTA": inputs.beta is not None}
        return found | ({"SCALE": float(inputs.scale)} if scale else {})

    def struct(self, dtype: DTypeLike, *shape: int, present: bool = True) -> jax.ShapeDtypeStruct:
        """Shape and dtype of an output; without elements if it is not ``present``."""
        return jax.ShapeDtypeStruct(shape if present else (0,), dtype)

    def states(self, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        inputs = self.inputs
        return self.struct(dtype, self.table.num_chunks, inputs.value_heads, inputs.key_dim, inputs.value_dim)

    def blocks(self, constants: dict[str, Any]) -> int:
        """Blocks of V."""
        return -(-self.inputs.value_dim // constants["BLOCK_V"])


def absent(array: jax.Array | None) -> jax.Array:
    """The array, or a stand-in that no kernel reads."""
    return jnp.zeros((0,), jnp.float32) if array is None else array


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


def state_pass(chunks: Chunks, tile: TritonPass, *, final: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The states before all chunks, the updates, which are the values without a delta rule, and the last states."""
    from tilewright.kernels.linear_attention.triton import forward_kernels as kernels

    inputs, table = chunks.inputs, chunks.table
    constants = chunks.constants(tile, power_of_two(inputs.key_dim, MIN_DOT), states=True)
    delta = inputs.beta is not None
    states, updates, last = launch(
        kernels.chunk_states,
        [
            chunks.key, inputs.value, absent(inputs.beta), chunks.inverse, chunks.gamma, absent(inputs.initial_state),
            table.chunks, table.sequences,
        ],
        [
            chunks.states(chunks.operand),
            chunks.struct(chunks.operand, *inputs.value.shape, present=delta),
            chunks.struct(jnp.float32, *inputs.state_shape, present=final),
        ],
        grid=[table.num_sequences * inputs.value_heads * chunks.blocks(constants)],
        constants=constants | {"INITIAL": inputs.initial_state is not None, "FINAL": final},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    return states, updates if delta else inputs.value, last


def forward(inputs: LinearAttentionInputs, params: TritonLinearAttentionParams) -> LinearAttentionResults:
    """The results of a call."""
    from tilewright.kernels.linear_attention.triton import forward_kernels as kernels

    chunks = chunked(inputs)
    states, updates, last = state_pass(chunks, params.states, final=inputs.return_state)
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
    from tilewright.kernels.linear_attention.triton import backward_kernels as kernels

    chunks = chunked(inputs)
    states, updates, _ = state_pass(chunks, params.states, final=False)
    d_out = jnp.zeros_like(inputs.value) if cotangents.out is None else cotangents.out
    d_updates = _local_gradients(chunks, d_out, params.tokens)
    d_updates, d_states, d_initial = _state_gradients(chunks, d_out, d_updates, cotangents.state, params.states)
    delta, gate = inputs.beta is not None, inputs.log_decay is not None
    # The accumulators of all products of a chunk are in registers at once.
    tile = dataclasses.replace(params.tokens, block_v=min(params.tokens.block_v, MAX_GRADIENT_BLOCK))
    block_k = min(tile.block_v, power_of_two(inputs.key_dim, MIN_DOT))
    constants = chunks.constants(tile, block_k, states=True, scale=True)
    shares = -(-inputs.key_dim // block_k)
    per_token = (shares, *inputs.value.shape[:3])
    d_query, d_key, d_value, d_beta, d_decay = launch(
        kernels.token_gradients,
        [
            chunks.query, chunks.key, inputs.value, absent(inputs.beta), updates, d_out, d_updates, states, d_states,
            chunks.gamma, chunks.table.chunks,
        ],
        [
            chunks.struct(inputs.query.dtype, *inputs.query.shape),
            chunks.struct(inputs.key.dtype, *inputs.key.shape),
            chunks.struct(inputs.value.dtype, *inputs.value.shape, present=delta),
            chunks.struct(jnp.float32, *per_token, present=delta),
            chunks.struct(jnp.float32, *per_token, present=gate),
        ],
        grid=[chunks.table.num_chunks * inputs.heads * shares],
        scalars={"rows_of_all": chunks.rows},
        constants=constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    if inputs.qk_l2norm:
        d_query, d_key = normalized_gradients(inputs, d_query, d_key)
    found = {"query": d_query, "key": d_key, "value": d_value if delta else d_updates, "initial_state": d_initial}
    if delta:
        found["beta"] = d_beta.sum(0)
    if gate:
        d_decay = d_decay.sum(0)
        found["log_decay"] = d_decay.sum((0, 1)) if inputs.gate == "head" else d_decay
    return {name: found[name].astype(getattr(inputs, name).dtype) for name in inputs.gradients}


def block_k(inputs: LinearAttentionInputs) -> int:
    """Channels of keys of a step."""
    widest = 64 if operand_dtype(inputs.value.dtype) == jnp.bfloat16 else 32
    return min(power_of_two(inputs.key_dim, MIN_DOT), widest)


def _local_gradients(chunks: Chunks, d_out: jax.Array, tile: TritonPass) -> jax.Array:
    from tilewright.kernels.linear_attention.triton import backward_kernels as kernels

    inputs = chunks.inputs
    constants = chunks.constants(tile, block_k(inputs), scale=True)
    (found,) = launch(
        kernels.local_gradients,
        [chunks.query, chunks.key, d_out, chunks.gamma, chunks.table.chunks],
        [chunks.struct(chunks.operand, *inputs.value.shape)],
        grid=[chunks.table.num_chunks * inputs.value_heads * chunks.blocks(constants)],
        constants=constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return found


def _state_gradients(
    chunks: Chunks, d_out: jax.Array, d_updates: jax.Array, d_final: jax.Array | None, tile: TritonPass
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of the updates, of the states behind all chunks, and of the initial states."""
    from tilewright.kernels.linear_attention.triton import backward_kernels as kernels

    inputs, table = chunks.inputs, chunks.table
    constants = chunks.constants(tile, power_of_two(inputs.key_dim, MIN_DOT), states=True, scale=True)
    initial = inputs.initial_state is not None
    d_states, d_initial, d_updates = launch(
        kernels.state_gradients,
        [
            chunks.query, chunks.key, d_out, absent(inputs.beta), chunks.inverse, chunks.gamma, absent(d_final),
            table.chunks, table.sequences, d_updates,
        ],
        [
            chunks.states(chunks.operand),
            chunks.struct(jnp.float32, *inputs.state_shape, present=initial),
            chunks.struct(d_updates.dtype, *d_updates.shape),
        ],
        grid=[table.num_sequences * inputs.value_heads * chunks.blocks(constants)],
        constants=constants | {"INITIAL": initial, "FINAL": d_final is not None},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        in_place={2: 9},
    )  # fmt: skip
    return d_updates, d_states, d_initial


def normalized_gradients(
    inputs: LinearAttentionInputs, d_query: jax.Array, d_key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The gradients of queries and keys from those of normalized ones; zeros where a token belongs to no sequence."""
    from tilewright.kernels.sequences import sequence_ids, without_padding

    pull_back = jax.vjp(lambda query, key: normalized(inputs, query, key), inputs.query, inputs.key)[1]
    ids = sequence_ids(inputs.batch, inputs.length, cum_seqlens=inputs.cum_seqlens, seq_lengths=inputs.seq_lengths)
    # Where there is none, query and key may be NaN.
    first, second = (without_padding(x, ids) for x in pull_back((d_query, d_key)))
    return first, second
