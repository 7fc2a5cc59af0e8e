"""The draw of a token in plain JAX: the best of each group of tokens, and then the best group.

x       logits in float32, −∞ in place of NaN and of tokens that are ruled out
order   the same as integers in their order (``ordered``)
slope   1 / temperature, or 1 where the temperature is 0
greedy  True for rows of temperature 0, whose token is the first of those of the largest logit
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.sampling.inputs import GROUP, Draw
from tilewright.kernels.sampling.noise import gumbel
from tilewright.kernels.sampling.ordered import ordered, value_of

SLOPES = (1e-37, 1e37)
"""Range of slopes: beyond it the product of a slope with 0, or with −∞, would not be that."""


class Groups(NamedTuple):
    """The best token of each group, ``[..., groups]``.

    Attributes:
      order: of the largest logit of the group.
      score: of the best token, relative to that logit.
      tokens: the best token.
      logits: its logit.
      mass: the sum of ``exp((x - largest of the group) · slope)``.
    """

    order: jax.Array
    score: jax.Array
    tokens: jax.Array
    logits: jax.Array
    mass: jax.Array


def without_nan(x: jax.Array) -> jax.Array:
    """Logits in float32, with −∞ in place of NaN."""
    wide = x.astype(jnp.float32)
    return jnp.where(jnp.isnan(wide), -jnp.inf, wide)


def slopes(temperature: jax.Array | None, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """``(slope, greedy)`` of each row."""
    if temperature is None:
        return jnp.ones(shape, jnp.float32), jnp.zeros(shape, bool)
    greedy = ~(temperature > 0.0)
    return jnp.clip(1.0 / jnp.where(greedy, 1.0, temperature), *SLOPES), greedy


def relative(x: jax.Array, order: jax.Array, top: jax.Array, slope: jax.Array) -> jax.Array:
    """``(x - its maximum) · slope`` along the last axis, 0 at the maximum, which may be infinite."""
    return jnp.where(order == top[..., None], 0.0, x - value_of(top)[..., None]) * slope[..., None]


def best_of_groups(x: jax.Array, first: jax.Array | int, key: jax.Array, slope: jax.Array, greedy: jax.Array) -> Groups:
    """The best token of each group of logits ``[..., n]``, beginning with token ``first``, a multiple of GROUP."""
    x = lax.pad(x, jnp.float32(-jnp.inf), [(0, 0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % GROUP, 0)])
    x = x.reshape(*x.shape[:-1], x.shape[-1] // GROUP, GROUP)
    places = lax.broadcasted_iota(jnp.uint32, x.shape[-2:], 0) * GROUP + lax.broadcasted_iota(
        jnp.uint32, x.shape[-2:], 1
    )
    tokens = places + jnp.asarray(first).astype(jnp.uint32)
    order = ordered(x)
    top = order.max(-1)
    distance = relative(x, order, top, slope[..., None])
    noisy = distance + gumbel(key[..., None, None, :], tokens)
    score = jnp.where(greedy[..., None, None], jnp.where(order == top[..., None], 0.0, -jnp.inf), noisy)
    lane = jnp.argmax(score, -1)[..., None]
    weight = jnp.where(x == -jnp.inf, 0.0, jnp.exp(distance))
    return Groups(
        top,
        score.max(-1),
        jnp.take_along_axis(jnp.broadcast_to(tokens.astype(jnp.int32), x.shape), lane, -1)[..., 0],
        jnp.take_along_axis(x, lane, -1)[..., 0],
        weight.sum(-1),
    )


def best_group(groups: Groups, slope: jax.Array, greedy: jax.Array, *, log_probs: bool) -> Draw:
    """The best token of all groups; of a row without any logit above −∞ token 0."""
    top = groups.order.max(-1)
    largest = value_of(top)
    distance = relative(value_of(groups.order), groups.order, top, slope)
    noisy = distance + groups.score
    score = jnp.where(greedy[..., None], jnp.where(groups.order == top[..., None], 0.0, -jnp.inf), noisy)
    best = jnp.argmax(score, -1)[..., None]
    token, logit = (jnp.take_along_axis(x, best, -1)[..., 0] for x in (groups.tokens, groups.logits))
    is_empty = largest == -jnp.inf
    token = jnp.where(is_empty, 0, token)
    if not log_probs:
        return Draw(token, None)
    total = (groups.mass * jnp.exp(distance)).sum(-1)
    found = jnp.where(logit == largest, 0.0, logit - largest) * slope - jnp.log(total)
    return Draw(token, jnp.where(is_empty, -jnp.inf, found))
