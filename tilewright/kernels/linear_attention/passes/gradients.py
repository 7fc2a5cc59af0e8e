"""The gradients of tokens, from the states before all chunks and the gradients of those behind them, in Triton."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs
from tilewright.kernels.linear_attention.passes.chunks import Chunks, TritonPass, absent, block_k
from tilewright.kernels.triton import launch
from tilewright.kernels.triton.limits import power_of_two


class StatePasses(NamedTuple):
    """The results of the passes over states, there and back.

    Attributes:
      states, d_states: before each chunk, and the gradient of that behind it: see ``Chunks.states``.
      updates, d_updates: U and dR, or without a delta rule V and dU, of all tokens; see ``gradient_kernels``.
      d_initial: the gradient of the initial states; anything if there are none.
    """

    states: jax.Array
    updates: jax.Array
    d_states: jax.Array
    d_updates: jax.Array
    d_initial: jax.Array | None


def local_gradients(
    chunks: Chunks, d_out: jax.Array, updates: jax.Array, tile: TritonPass, *, through_scores: bool = True
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Pᵀ dO, or nothing of it unless ``through_scores``; and Y with its diagonal apart."""
    from tilewright.kernels.linear_attention.passes import gradient_kernels as kernels

    inputs = chunks.inputs
    d_updates, pairs, diagonal = launch(
        kernels.local_gradients,
        [chunks.query, chunks.key, updates, d_out, chunks.gamma, chunks.table.chunks],
        [
            chunks.struct(chunks.operand, *inputs.value.shape, present=through_scores),
            chunks.pairs(),
            chunks.struct(jnp.float32, *inputs.value.shape[:3]),
        ],
        grid=[chunks.table.num_chunks * inputs.value_heads],
        constants=chunks.constants(tile, block_k(inputs), scale=True) | {"SCORES": through_scores},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return d_updates, pairs, diagonal


def token_gradients(
    chunks: Chunks, d_out: jax.Array, passed: StatePasses, pairs: jax.Array, diagonal: jax.Array, tile: TritonPass
) -> dict[str, Any]:
    """Gradients by name, of all that is differentiable; ``pairs`` and ``diagonal`` are of ``local_gradients``."""
    from tilewright.kernels.linear_attention.passes import gradient_kernels as kernels

    inputs = chunks.inputs
    delta, gate = inputs.beta is not None, inputs.log_decay is not None
    constants = chunks.constants(tile, block_k(inputs))
    of_states = dict(zip(("STATE_K", "STATE_V"), chunks.state_strides, strict=True))
    shares = -(-inputs.key_dim // constants["BLOCK_K"])
    per_token = (shares, *inputs.value.shape[:3])
    launched: dict[str, Any] = {
        "grid": [chunks.table.num_chunks * inputs.heads * shares],
        "scalars": {"rows_of_all": chunks.rows},
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    d_query, d_sums = launch(
        kernels.query_gradients,
        [chunks.query, chunks.key, d_out, passed.states, chunks.gamma, chunks.table.chunks, pairs, diagonal],
        [
            chunks.struct(inputs.query.dtype, *inputs.query.shape),
            chunks.struct(jnp.float32, *per_token, present=gate),
        ],
        constants=constants | of_states | {"SCALE": float(inputs.scale)},
        **launched,
    )
    d_value, erasing, by_strength = passed.d_updates, absent(None), absent(None)
    if delta:
        d_value, erasing, by_strength = _pair_gradients(chunks, passed.updates, passed.d_updates, tile)
    d_key, d_beta, d_decay = launch(
        kernels.key_gradients,
        [
            chunks.query, chunks.key, absent(inputs.beta), passed.updates, passed.d_updates, passed.states,
            passed.d_states, chunks.gamma, chunks.table.chunks, pairs, diagonal, erasing, d_sums, by_strength,
        ],
        [
            chunks.struct(inputs.key.dtype, *inputs.key.shape),
            chunks.struct(jnp.float32, *per_token, present=delta),
            chunks.struct(jnp.float32, *per_token, present=gate),
        ],
        constants=constants | of_states | {"DELTA": delta},
        **launched,
    )  # fmt: skip
    if inputs.qk_l2norm:
        d_query, d_key = normalized_gradients(inputs, d_query, d_key)
    found: dict[str, Any] = {"query": d_query, "key": d_key, "value": d_value, "initial_state": passed.d_initial}
    if delta:
        found["beta"] = d_beta.sum(0)
    if gate:
        d_decay = d_decay.sum(0)
        found["log_decay"] = d_decay.sum((0, 1)) if inputs.gate == "head" else d_decay
    return {name: found[name].astype(getattr(inputs, name).dtype) for name in inputs.gradients}


def _pair_gradients(
    chunks: Chunks, updates: jax.Array, d_updates: jax.Array, tile: TritonPass
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradient of the values of a delta rule, X / β, and what values add to the gradient of β."""
    from tilewright.kernels.linear_attention.passes import gradient_kernels as kernels

    inputs = chunks.inputs
    erasing, d_value, by_strength = launch(
        kernels.pair_gradients,
        [inputs.value, absent(inputs.beta), updates, d_updates, chunks.gamma, chunks.table.chunks],
        [
            chunks.pairs(),
            chunks.struct(inputs.value.dtype, *inputs.value.shape),
            chunks.struct(jnp.float32, *inputs.value.shape[:3]),
        ],
        grid=[chunks.table.num_chunks * inputs.value_heads],
        constants=chunks.constants(tile, block_k(inputs)),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return d_value, erasing, by_strength


def normalized_gradients(
    inputs: LinearAttentionInputs, d_query: jax.Array, d_key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The gradients of queries and keys from those of normalized ones; zeros where a token belongs to no sequence."""
    return _normalized_gradient(inputs, inputs.query, d_query), _normalized_gradient(inputs, inputs.key, d_key)


def _normalized_gradient(inputs: LinearAttentionInputs, x: jax.Array, d_normalized: jax.Array) -> jax.Array:
    from tilewright.kernels.linear_attention.passes import gradient_kernels as kernels

    rows, width = x.size // inputs.key_dim, power_of_two(inputs.key_dim)
    block = max(4096 // width, 1)
    (found,) = launch(
        kernels.normalized_gradients,
        [x, d_normalized],
        [jax.ShapeDtypeStruct(x.shape, x.dtype)],
        grid=[-(-rows // block)],
        constants={
            "ROWS": rows,
            "K": inputs.key_dim,
            "EPS": float(inputs.l2norm_eps),
            "BLOCK": block,
            "BLOCK_K": width,
        },
    )
    return found
