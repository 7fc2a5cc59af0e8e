"""The recurrence over the tokens of all chunks at once, and over the states between the chunks.

The state of a chunk's start is known when the chunks before it are done, so it is computed from what each contributes:

    state behind = exp(A · sum of delta) · state before + state behind, from a state of zeros

A pass over the tokens of a chunk takes as many steps as it has tokens, each for all chunks, and the one over the chunks
a step for each. States are ``[batch, chunks, groups, channels of a group, state]``, those of tokens alike.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.op.sharding import varying_as
from tilewright.kernels.selective_scan.inputs import Pieces

STORED = 8
"""Tokens whose states the backward pass has at a time, beside the states between such parts of a chunk."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
    """The tokens of all chunks, ``[batch, chunks, chunk, ...]``; zeros where there is no token.

    Attributes:
      u, delta: ``[..., groups, channels of a group]``, delta as it is used.
      b, c: ``[..., groups, state]``.
      reset: True where a token does not see the state before it; None if all do.
      a: ``[groups, channels of a group, state]``.
    """

    u: Any
    delta: Any
    b: Any
    c: Any
    reset: Any
    a: Any

    @property
    def size(self) -> int:
        found: int = self.u.shape[2]
        return found

    def token(self, index: jax.Array) -> tuple[Any, ...]:
        """``(a, input, u, delta, b, c, reset)`` of a token of each chunk."""

        def at(x: jax.Array) -> Any:
            return lax.dynamic_index_in_dim(x, index, 2, keepdims=False)

        u, delta, b, c = (at(x) for x in (self.u, self.delta, self.b, self.c))
        decay = jnp.exp(delta[..., None] * self.a)
        reset = None if self.reset is None else at(self.reset)
        return decay, (delta * u)[..., None] * b[..., None, :], u, delta, b, c, reset

    @property
    def zeros(self) -> Any:
        """A state of zeros for each chunk."""
        batch, chunks = self.u.shape[:2]
        return varying_as(jnp.zeros((batch, chunks, *self.a.shape), self.u.dtype), self)

    def transition(self) -> tuple[Any, Any]:
        """The factors of the state before a chunk in that behind it, and True for chunks that do not see it."""
        factor = jnp.exp(jnp.sum(self.delta, axis=2)[..., None] * self.a)
        return factor, None if self.reset is None else jnp.any(self.reset, axis=2)


def unless(condition: jax.Array, states: jax.Array) -> Any:
    """Zeros where a condition of chunks holds, and not a product with zero, which would keep NaN and infinities."""
    if condition is None:
        return states
    return jnp.where(jnp.expand_dims(condition, range(condition.ndim, states.ndim)), 0, states)


def forward_step(tokens: Tokens, h: jax.Array, index: jax.Array) -> tuple[Any, Any, Any]:
    """``(state before, as it is seen, state behind, y)`` of a token of each chunk."""
    decay, added, *_, c, reset = tokens.token(index)
    before = unless(reset, h)
    h = decay * before + added
    return before, h, jnp.sum(h * c[..., None, :], axis=-1)


def contributions(tokens: Tokens) -> Any:
    """The states behind the chunks, each from a state of zeros."""

    def step(h: jax.Array, index: jax.Array) -> tuple[Any, None]:
        return forward_step(tokens, h, index)[1], None

    return lax.scan(step, tokens.zeros, jnp.arange(tokens.size))[0]


def outputs(tokens: Tokens, before: jax.Array) -> Any:
    """``[batch, chunks, chunk, groups, channels of a group]`` from the states before the chunks."""

    def step(h: jax.Array, index: jax.Array) -> tuple[Any, Any]:
        _, h, y = forward_step(tokens, h, index)
        return h, y

    return jnp.moveaxis(lax.scan(step, before, jnp.arange(tokens.size))[1], 0, 2)


def _by_chunk(arrays: Any) -> Any:
    return jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), arrays)


def _carried(transition: tuple[Any, Any], states: jax.Array) -> Any:
    factor, reset = transition
    return unless(reset, factor * states)


def states_before(tokens: Tokens, initial: jax.Array, pieces: Pieces | None) -> tuple[Any, Any]:
    """``(states before the chunks, states behind the sequences)``; one chunk after the other, in their order.

    Args:
      initial: ``[sequences, groups, channels of a group, state]``.
    """
    sequences = initial.shape[0]
    # One more where a row is packed, for chunks of no sequence.
    spare = initial if pieces is None else jnp.pad(initial, ((0, 1), (0, 0), (0, 0), (0, 0)))
    of_chunk = None if pieces is None else (pieces.sequence, pieces.first == jnp.arange(pieces.first.shape[0]))

    def step(h: jax.Array, chunk: Any) -> tuple[Any, Any]:
        transition, added, described = chunk
        if described is not None:
            sequence, is_first = described
            # −1 is the last one.
            h = jnp.where(is_first, spare[sequence][None], h)
        behind = _carried(transition, h) + added
        return behind, (h, behind if described is not None else None)

    first = initial if pieces is None else varying_as(jnp.zeros((1, *initial.shape[1:]), initial.dtype), tokens)
    by_chunk = (*_by_chunk((tokens.transition(), contributions(tokens))), of_chunk)
    last, (before, behind) = lax.scan(step, first, by_chunk)
    if pieces is not None:
        is_empty = pieces.last_of < pieces.first_of
        found = jnp.take(behind[:, 0], jnp.where(is_empty, 0, pieces.last_of), axis=0, mode="clip")
        last = jnp.where(is_empty[:, None, None, None], initial, found)
    assert last.shape[0] == sequences
    return jnp.moveaxis(before, 0, 1), last


def cotangents_behind(tokens: Tokens, d_y: jax.Array, d_last: jax.Array, pieces: Pieces | None) -> tuple[Any, Any]:
    """``(cotangents of the states behind the chunks, those of the initial states)``.

    Args:
      d_y: like the results of ``outputs``.
      d_last: like the initial states: the cotangents of the states behind the sequences.
    """

    def through(mu: jax.Array, index: jax.Array) -> tuple[Any, None]:
        decay, *_, c, reset = tokens.token(index)
        return unless(reset, decay * _cotangent(mu, c, d_y, index)), None

    added = lax.scan(through, tokens.zeros, jnp.arange(tokens.size), reverse=True)[0]
    spare, of_chunk = d_last, None
    if pieces is not None:
        spare = jnp.pad(d_last, ((0, 1), (0, 0), (0, 0), (0, 0)))
        chunks = jnp.arange(pieces.first.shape[0])
        last_of = jnp.append(pieces.last_of, -1)
        of_chunk = (pieces.sequence, chunks == last_of[pieces.sequence])

    def step(after: jax.Array, chunk: Any) -> tuple[Any, Any]:
        transition, added, described = chunk
        if described is not None:
            sequence, is_last = described
            after = jnp.where(is_last, spare[sequence][None], after)
        before = _carried(transition, after) + added
        return before, (after, before if described is not None else None)

    start = d_last if pieces is None else varying_as(jnp.zeros((1, *d_last.shape[1:]), d_last.dtype), tokens)
    by_chunk = (*_by_chunk((tokens.transition(), added)), of_chunk)
    d_initial, (behind, before) = lax.scan(step, start, by_chunk, reverse=True)
    if pieces is not None:
        is_empty = pieces.last_of < pieces.first_of
        found = jnp.take(before[:, 0], jnp.where(is_empty, 0, pieces.first_of), axis=0, mode="clip")
        d_initial = jnp.where(is_empty[:, None, None, None], d_last, found)
    return jnp.moveaxis(behind, 0, 1), d_initial


def _cotangent(mu: jax.Array, c: jax.Array, d_y: jax.Array, index: jax.Array) -> Any:
    """The cotangent of the state behind a token, from that which comes from the next one."""
    return mu + lax.dynamic_index_in_dim(d_y, index, 2, keepdims=False)[..., None] * c[..., None, :]


def gradients(tokens: Tokens, before: jax.Array, behind: jax.Array, d_y: jax.Array) -> tuple[Any, Any, Tokens]:
    """``(y, d_y's share in the gradient of c, gradients of the other tokens' arrays)``.

    Args:
      before: the states before the chunks.
      behind: the cotangents of the states behind them.
    """
    parts = tokens.size // STORED

    def by_token(
        first: jax.Array, step: Callable[..., Any], carry: Any, arrays: Any = None, reverse: bool = False
    ) -> Any:
        index = first + jnp.arange(STORED)
        return lax.scan(lambda carry, each: step(carry, *each), carry, (index, arrays), reverse=reverse)

    def keep(h: jax.Array, index: jax.Array, _: jax.Array) -> Any:
        seen, h, y = forward_step(tokens, h, index)
        d_c = jnp.sum(h * lax.dynamic_index_in_dim(d_y, index, 2, keepdims=False)[..., None], axis=3)
        return h, (seen, y, d_c)

    def skip(h: jax.Array, index: jax.Array, _: jax.Array) -> Any:
        return forward_step(tokens, h, index)[1], None

    def back(carry: Any, index: jax.Array, seen: jax.Array) -> Any:
        mu, d_a = carry
        decay, _, u, delta, b, c, reset = tokens.token(index)
        d_h = _cotangent(mu, c, d_y, index)
        d_decayed = d_h * decay
        d_exponent = d_decayed * seen
        shared = jnp.sum(d_h * b[..., None, :], axis=-1)
        d_delta = jnp.sum(d_exponent * tokens.a, axis=-1) + u * shared
        d_a = d_a + jnp.sum(d_exponent * delta[..., None], axis=(0, 1))
        d_b = jnp.sum(d_h * (delta * u)[..., None], axis=3)
        return (unless(reset, d_decayed), d_a), (delta * shared, d_delta, d_b)

    firsts = jnp.arange(parts) * STORED
    # The states between parts of a chunk, and then of one part after the other those of its tokens, from the end.
    _, between = lax.scan(lambda h, first: (by_token(first, skip, h)[0], h), before, firsts)

    def part(carry: Any, each: Any) -> Any:
        first, h = each
        _, (seen, y, d_c) = by_token(first, keep, h)
        carry, found = by_token(first, back, carry, seen, reverse=True)
        return carry, (y, d_c, *found)

    d_a = varying_as(jnp.zeros_like(tokens.a), tokens)
    (_, d_a), found = lax.scan(part, (behind, d_a), (firsts, between), reverse=True)
    y, d_c, d_u, d_delta, d_b = (jnp.moveaxis(x.reshape(parts * STORED, *x.shape[2:]), 0, 2) for x in found)
    return y, d_c, Tokens(d_u, d_delta, d_b, d_c, None, d_a)
