"""Linear attention by its definition, token by token: the oracle."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs, LinearAttentionResults, l2_normalized
from tilewright.kernels.sequences import PADDING, begins, sequence_ids, without_padding


def linear_attention_reference(
    inputs: LinearAttentionInputs, compute_dtype: DTypeLike | None = None
) -> LinearAttentionResults:
    """The results in ``compute_dtype``, by default that of states; nothing is rounded, and all is differentiable."""
    dtype = jnp.dtype(compute_dtype or inputs.state_dtype)
    batch, length = inputs.batch, inputs.length
    ids = sequence_ids(
        batch,
        length,
        cum_seqlens=inputs.cum_seqlens,
        segment_ids=inputs.segment_ids,
        seq_lengths=inputs.seq_lengths,
    )
    tokens = _tokens(inputs, ids, dtype)
    states = jnp.zeros(inputs.state_shape, dtype)
    if inputs.initial_state is not None:
        states = inputs.initial_state.astype(dtype)
    if inputs.sequences == 0:
        return LinearAttentionResults(jnp.zeros(inputs.value.shape, dtype), states if inputs.return_state else None)
    # Of each token: which of its row's states it has, whether it is one at all, and whether that state begins anew.
    is_token = jnp.ones((batch, length), bool) if ids is None else ids != PADDING
    slot = jnp.maximum(ids, 0) if inputs.cum_seqlens is not None and ids is not None else jnp.zeros_like(is_token, int)
    anew = jnp.zeros_like(is_token) if inputs.segment_ids is None or ids is None else begins(ids)
    rows = states.reshape(batch, -1, *inputs.state_shape[1:])
    bonus = None if inputs.bonus is None else inputs.bonus.astype(dtype)

    def step(states: jax.Array, at: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        token, slot, is_token, anew = at
        before = states[slot]
        after, out = _step(jnp.where(anew, 0, before), token, bonus)
        states = states.at[slot].set(jnp.where(is_token, after, before))
        return states, jnp.where(is_token, out, 0)

    def row(states: jax.Array, *at: Any) -> Any:
        return lax.scan(step, states, at)

    found, out = jax.vmap(row)(rows, tokens, slot, is_token, anew)
    return LinearAttentionResults(out, found.reshape(inputs.state_shape) if inputs.return_state else None)


def _tokens(inputs: LinearAttentionInputs, ids: jax.Array | None, dtype: DTypeLike) -> dict[str, jax.Array]:
    """The arrays that a step takes for its token, of value heads, with the factors of the state made explicit."""

    def token(array: jax.Array | None) -> Any:
        return None if array is None else without_padding(array, ids).astype(dtype)

    query, key = token(inputs.query), token(inputs.key)
    if inputs.qk_l2norm:
        query, key = (l2_normalized(x, inputs.l2norm_eps) for x in (query, key))
    log_decay = inputs.log_decay
    if log_decay is None or log_decay.ndim == 1:
        per_head = jnp.zeros(inputs.value_heads) if log_decay is None else log_decay
        decay = jnp.broadcast_to(jnp.exp(per_head.astype(dtype)), inputs.value.shape[:3])[..., None]
    else:
        decay = jnp.exp(token(log_decay))
        decay = decay if decay.ndim == 4 else decay[..., None]
    query, key = (jnp.repeat(x, inputs.groups, axis=2) for x in (query * jnp.asarray(inputs.scale, dtype), key))
    found = {"query": query, "key": key, "value": token(inputs.value), "decay": decay}
    read, write = inputs.removal or (None, None)
    optional = {"beta": inputs.beta, "read": read, "write": write}
    return found | {name: token(array) for name, array in optional.items() if array is not None}


def _step(state: jax.Array, token: dict[str, jax.Array], bonus: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The state behind a token, and its result; all of shapes ``[heads, ...]``."""
    query, key, value = (token[name] for name in ("query", "key", "value"))
    decayed = token["decay"][..., None] * state
    added = key[..., :, None] * value[..., None, :]
    if "beta" in token:
        held = jnp.einsum("hk,hkv->hv", key, decayed, precision="highest")
        after = decayed + key[..., :, None] * (token["beta"][..., None] * (value - held))[..., None, :]
    elif "read" in token:
        held = jnp.einsum("hk,hkv->hv", token["read"], state, precision="highest")
        after = decayed + token["write"][..., :, None] * held[..., None, :] + added
    else:
        after = decayed + added
    seen = after if bonus is None else state + bonus[..., None] * added
    return after, jnp.einsum("hk,hkv->hv", query, seen, precision="highest")
