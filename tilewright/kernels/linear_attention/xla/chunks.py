"""Linear attention in chunks: matmuls within all chunks at once, and a loop over the states between them.

Of a chunk with the state S before it, U are the values that its tokens add to the state: V without a removal, and else
the solution of a triangular system, linear in S, so that U = U₀ − W S. Then O = (Q e^γ) S + P U, and the state behind
is D ∘ S + (K e^(γ_C − γ))ᵀ U = D ∘ S − N S + E, of which the loop knows D, N and E.
"""

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs, LinearAttentionResults, l2_normalized
from tilewright.kernels.linear_attention.xla.finite import FiniteTokens
from tilewright.kernels.linear_attention.xla.gates import ChannelGate, Gate, HeadGate
from tilewright.kernels.linear_attention.xla.layout import Layout
from tilewright.kernels.linear_attention.xla.params import XlaLinearAttentionParams
from tilewright.kernels.linear_attention.xla.states import Maps, states_before
from tilewright.kernels.linear_attention.xla.triangular import inverse
from tilewright.kernels.op.sharding import varying_as


@dataclasses.dataclass(frozen=True)
class Update:
    """The maps that chunks are of states, before these are known.

    Attributes:
      added: E.
      removed: N; None for 0.
      values: U₀, which the state corrects; None without a removal.
      held: W.
    """

    added: jax.Array
    removed: jax.Array | None = None
    values: jax.Array | None = None
    held: jax.Array | None = None


def chunked_attention(inputs: LinearAttentionInputs, params: XlaLinearAttentionParams) -> LinearAttentionResults:
    """The results of a call; JAX can differentiate it in both modes."""
    if 0 in (inputs.batch, inputs.length, inputs.sequences, inputs.value_heads, inputs.key_dim, inputs.value_dim):
        return _without_tokens(inputs)
    tokens = FiniteTokens.of(inputs)
    return tokens.marked(_of_chunks(tokens.inputs, params))


def _of_chunks(inputs: LinearAttentionInputs, params: XlaLinearAttentionParams) -> LinearAttentionResults:
    layout = Layout.of(inputs, params)
    chunk = _Chunk.of(inputs, layout)
    update = chunk.update()
    maps = Maps(chunk.gate.decay, update.removed, chunk.keep)
    first = None if inputs.initial_state is None else inputs.initial_state.astype(inputs.state_dtype)
    states = states_before(maps, _entering(update.added, first, layout), params.segment, chunk.precision)
    out = jnp.moveaxis(chunk.out(update, states).astype(inputs.value.dtype), 2, 3)
    state = _final(maps, update.added, states, first, layout, chunk.precision) if inputs.return_state else None
    return LinearAttentionResults(layout.tokens(out), state)


def _without_tokens(inputs: LinearAttentionInputs) -> LinearAttentionResults:
    """The results of a call of which an array has no elements."""
    state = jnp.zeros(inputs.state_shape, inputs.state_dtype)
    if inputs.initial_state is not None:
        state = inputs.initial_state.astype(state.dtype)
    return LinearAttentionResults(jnp.zeros_like(inputs.value), state if inputs.return_state else None)


def _entering(added: jax.Array, first: jax.Array | None, layout: Layout) -> jax.Array:
    """``[chunks, batch, heads, K, V]``: what states before chunks have beside what flows on from the chunk before."""
    initial = jnp.zeros_like(added[:1]) if first is None or layout.sequence is not None else first[None]
    shifted = jnp.concatenate([initial, added[:-1]])
    if layout.is_first is None or layout.sequence is None:
        return shifted
    here: Any = 0 if first is None else first.at[layout.sequence].get(mode="fill", fill_value=0)[:, None]
    return jnp.where(_of_states(layout.is_first[:, None]), here, shifted)


def _final(
    maps: Maps, added: jax.Array, states: jax.Array, first: jax.Array | None, layout: Layout, precision: lax.Precision
) -> jax.Array:
    """The states behind the last chunks of sequences."""
    if layout.last is None:
        last = jax.tree.map(lambda x: x[-1], (dataclasses.replace(maps, keep=None), added, states))
        return cast(jax.Array, last[0].apply(last[2], precision) + last[1])
    has_tokens, index = (layout.last >= 0)[:, None, None, None], jnp.maximum(layout.last, 0)
    ends = jax.tree.map(lambda x: x[index, 0], (dataclasses.replace(maps, keep=None), added, states))
    found = ends[0].apply(ends[2], precision) + ends[1]
    return jnp.where(has_tokens, found, 0 if first is None else first)


def _of_states(flags: jax.Array) -> jax.Array:
    """Flags ``[chunks, batch]`` as those of states ``[chunks, batch, heads, K, V]``."""
    return flags[..., None, None, None]


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """The arrays of all chunks, ``[chunks, batch, value_heads, chunk, ...]`` in the dtype of states.

    Attributes:
      keep: False where no state flows from a chunk to the next one, as a factor of states.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    gate: Gate
    beta: jax.Array | None
    removal: tuple[jax.Array, jax.Array] | None
    bonus: jax.Array | None
    keep: jax.Array | None

    @property
    def precision(self) -> lax.Precision:
        return self.gate.precision

    @classmethod
    def of(cls, inputs: LinearAttentionInputs, layout: Layout) -> "_Chunk":
        dtype = inputs.state_dtype
        # TensorFloat-32 holds what 16 bits do, and is rounded less than results in 16 bits are.
        precision = lax.Precision.HIGH if inputs.value.dtype.itemsize < 4 else lax.Precision.HIGHEST

        def chunked(tokens: jax.Array | None) -> Any:
            return None if tokens is None else jnp.moveaxis(layout.chunked(tokens).astype(dtype), 3, 2)

        query, key = chunked(inputs.query), chunked(inputs.key)
        if inputs.qk_l2norm:
            query, key = (l2_normalized(x, inputs.l2norm_eps) for x in (query, key))
        query = query * jnp.asarray(inputs.scale, dtype)
        query, key = (_of_value_heads(x, inputs.groups) for x in (query, key))
        log_decay = inputs.log_decay
        if log_decay is None or log_decay.ndim == 1:
            # Inside of ``shard_map`` all that the loop over states solves for must vary alike.
            none = varying_as(jnp.zeros(inputs.value_heads, dtype), inputs.value)
            log_decay = jnp.broadcast_to(none if log_decay is None else log_decay, inputs.value.shape[:3])
        begun = layout.begun() if inputs.segment_ids is not None else None
        of_heads = None if begun is None else begun[:, :, None]
        is_channel = log_decay.ndim == 4
        kind, axis = (ChannelGate, -2) if is_channel else (HeadGate, -1)
        keep = None
        if begun is not None:
            keep = _of_states(begun[..., -1] == 0)
        elif layout.is_first is not None:
            keep = _of_states(~jnp.append(layout.is_first[1:], jnp.ones(1, bool)))[:, None]
        removal = inputs.removal
        return cls(
            query,
            key,
            chunked(inputs.value),
            kind.of(chunked(log_decay), axis, of_heads, precision),
            chunked(inputs.beta),
            None if removal is None else (chunked(removal[0]), chunked(removal[1])),
            None if inputs.bonus is None else inputs.bonus.astype(dtype),
            keep,
        )

    def update(self) -> Update:
        gate = self.gate
        if self.beta is not None:
            rows = self.beta[..., None]
            solved = inverse(rows * gate.scores(self.key, self.key, strict=True))
            values = gate.matmul(solved, rows * self.value)
            held = gate.combined(solved * self.beta[..., None, :], self.key)
            return Update(gate.written(self.key, values), gate.written(self.key, held), values, held)
        if self.removal is None:
            return Update(gate.written(self.key, self.value))
        read, write = self.removal
        seen = functools.partial(gate.scores, read, strict=True, before=True)
        solved = inverse(-seen(write))
        values = gate.matmul(solved, gate.matmul(seen(self.key), self.value))
        held = -gate.combined(solved, read, before=True)
        added = gate.written(self.key, self.value) + gate.written(write, values)
        return Update(added, gate.written(write, held), values, held)

    def out(self, update: Update, states: jax.Array) -> jax.Array:
        """The results of all tokens from the states before their chunks."""
        gate, value = self.gate, self.value
        if self.bonus is not None:
            own = jnp.sum(self.query * self.bonus[:, None] * self.key, axis=-1, keepdims=True)
            scores = gate.scores(self.query, self.key, strict=True, before=True)
            return gate.read(self.query, states, before=True) + gate.matmul(scores, value) + own * value
        found = gate.read(self.query, states)
        if update.values is not None and update.held is not None:
            corrected = update.values - gate.matmul(update.held, states)
            if self.removal is None:
                value = corrected
            else:
                found = found + gate.matmul(gate.scores(self.query, self.removal[1]), corrected)
        return found + gate.matmul(gate.scores(self.query, self.key), value)


def _of_value_heads(x: jax.Array, groups: int) -> jax.Array:
    """``[chunks, batch, value_heads, ...]`` from arrays of key heads, whose gradients are sums in the same dtype."""
    if groups == 1:
        return x
    *leading, heads, count, size = x.shape
    repeated = jnp.broadcast_to(x[:, :, :, None], (*leading, heads, groups, count, size))
    return repeated.reshape(*leading, heads * groups, count, size)
