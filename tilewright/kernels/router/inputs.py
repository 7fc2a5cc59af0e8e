"""The inputs of the router, and its formula."""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tilewright.kernels.op.inputs import OpInputs, array, static

type Scoring = Literal["softmax", "sigmoid", "softmax_after"]

EPSILON = 1e-20
"""The addend of the sum by which sigmoid's weights are divided, as in DeepSeek-V3's own code."""


class RouterInputs(OpInputs):
    """A call after ``prepare``; shapes and dtypes hold without further checks."""

    logits: Float[Array, "*leading experts"]
    k: int = static()
    bias: Float[Array, " experts"] | None = array(default=None, gradient=False)
    scoring: Scoring = static(default="softmax")
    normalize: bool = static(default=True)
    num_groups: int = static(default=1)
    top_groups: int = static(default=1)
    scale: float = static(default=1.0)

    @functools.cached_property
    def compute_dtype(self) -> np.dtype:
        """The dtype of scores and weights."""
        return jnp.promote_types(self.logits.dtype, jnp.float32)

    @functools.cached_property
    def tokens(self) -> int:
        """Number of all tokens."""
        return math.prod(self.logits.shape[:-1])

    @functools.cached_property
    def is_limited(self) -> bool:
        """True if only some groups of experts may be chosen from."""
        return self.num_groups > self.top_groups

    @functools.cached_property
    def sums_to_one(self) -> bool:
        """True if the weights are the softmax of the chosen logits, in which all other probabilities cancel."""
        return self.normalize and self.scoring != "sigmoid"


def routed(inputs: RouterInputs, compute_dtype: DTypeLike | None = None) -> tuple[jax.Array, jax.Array]:
    """``(weights, experts)``, the weights in ``compute_dtype``: float32 by default, float64 if the logits are."""
    logits = without_nan(inputs, compute_dtype)
    experts = _choice(inputs, logits)
    if inputs.scoring == "softmax" and not inputs.normalize:
        weights = entries(softmax(logits), experts)
    elif inputs.sums_to_one:
        weights = softmax(entries(logits, experts))
    else:
        weights = jax.nn.sigmoid(entries(logits, experts))
        if inputs.normalize:
            weights = weights / (weights.sum(-1, keepdims=True) + EPSILON)
    return inputs.scale * weights, experts


def without_nan(inputs: RouterInputs, compute_dtype: DTypeLike | None = None) -> jax.Array:
    """The logits in the dtype of the weights, with −inf in place of NaN."""
    logits = inputs.logits.astype(compute_dtype or inputs.compute_dtype)
    return jnp.where(jnp.isnan(logits), -jnp.inf, logits)


def entries(x: jax.Array, experts: jax.Array) -> jax.Array:
    """The elements of the chosen experts, ``[..., k]``."""
    return jnp.take_along_axis(x, experts, axis=-1, mode="promise_in_bounds")


def softmax(x: jax.Array) -> jax.Array:
    """The softmax along the last dimension, with zeros where all of it is −inf."""
    greatest = lax.stop_gradient(x.max(-1, keepdims=True))
    powers = jnp.exp(x - jnp.where(greatest == -jnp.inf, 0.0, greatest))
    total = powers.sum(-1, keepdims=True)
    return powers / jnp.where(total == 0.0, 1.0, total)


def _probabilities(x: jax.Array) -> jax.Array:
    """The softmax, with 1 for +inf and 0 beside it."""
    infinite = x == jnp.inf
    return jnp.where(infinite.any(-1, keepdims=True), infinite.astype(x.dtype), softmax(x))


def _choice(inputs: RouterInputs, logits: jax.Array) -> jax.Array:
    """The chosen experts, ``int32[..., k]``."""
    if inputs.bias is None and not inputs.is_limited:
        keys = logits  # in the order of their scores, of which those of great logits may round alike
    else:
        keys = {"softmax": _probabilities, "sigmoid": jax.nn.sigmoid, "softmax_after": lambda x: x}[inputs.scoring](
            logits
        )
    if inputs.bias is not None:
        keys = keys + inputs.bias.astype(keys.dtype)
    keys = jnp.where((logits == -jnp.inf) | jnp.isnan(keys), -jnp.inf, keys)
    keys = jnp.where(keys == 0.0, 0.0, keys)  # top_k has −0 below 0
    if inputs.is_limited:
        keys = _of_best_groups(inputs, keys)
    return lax.top_k(lax.stop_gradient(keys), inputs.k)[1].astype(jnp.int32)


def _of_best_groups(inputs: RouterInputs, keys: jax.Array) -> jax.Array:
    """Keys, with those outside of the best groups below all others but −inf."""
    size = keys.shape[-1] // inputs.num_groups
    grouped = keys.reshape(*keys.shape[:-1], inputs.num_groups, size)
    lowest = jnp.finfo(keys.dtype).min
    # A group with fewer −inf is better: a sum with −inf itself would not tell.
    totals = jnp.maximum(lax.top_k(grouped, min(2, size))[0], lowest).sum(-1)
    kept = lax.top_k(totals, inputs.top_groups)[1]
    is_kept = (kept[..., None] == jnp.arange(inputs.num_groups)).any(-2)
    return jnp.where(is_kept[..., None] | (grouped == -jnp.inf), grouped, lowest).reshape(keys.shape)
