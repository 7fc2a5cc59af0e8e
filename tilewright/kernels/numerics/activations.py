"""The activations of gated linear units, by the names that options have."""

import functools
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp

type Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "sigmoid", "tanh", "identity"]

ACTIVATIONS: MappingProxyType[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "silu": jax.nn.silu,
        "gelu": functools.partial(jax.nn.gelu, approximate=False),
        "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
        "relu": jax.nn.relu,
        "sigmoid": jax.nn.sigmoid,
        "tanh": jnp.tanh,
        "identity": lambda x: x,
    }
)
"""``gelu`` is exact; ``jax.nn.gelu`` is ``gelu_tanh`` by default."""


def activation_name(activation: object, *more: str) -> str:
    """Checks the name of an activation, or one of ``more``."""
    names = *ACTIVATIONS, *more
    if not isinstance(activation, str) or activation not in names:
        raise ValueError(f"{activation=} must be one of {', '.join(map(repr, names))}")
    return activation


SWIGLU_OAI = "swiglu_oai"
"""The gate of gpt-oss, which is clamped and is no product of an activation of one and the other."""

_OAI_LIMIT, _OAI_ALPHA = 7.0, 1.702


def gated(activation: str, gate: jax.Array, up: jax.Array) -> jax.Array:
    """``act(gate) * up``, or the gate of gpt-oss."""
    if activation == SWIGLU_OAI:
        # By selection: a minimum halves the gradient at the limit, which rounded numbers reach.
        gate = jnp.where(gate > _OAI_LIMIT, _OAI_LIMIT, gate)
        up = jnp.where(up > _OAI_LIMIT, _OAI_LIMIT, jnp.where(up < -_OAI_LIMIT, -_OAI_LIMIT, up))
        return gate * jax.nn.sigmoid(_OAI_ALPHA * gate) * (up + 1)
    return ACTIVATIONS[activation](gate) * up


def gated_gradients(
    activation: str, gate: jax.Array, up: jax.Array, d_out: jax.Array, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """The gradients of both pre-activations, computed in ``dtype`` and returned in theirs."""
    wide = [x.astype(dtype) for x in (gate, up)]
    # Rows without a group have pre-activations of zero, and cotangents that may be anything.
    _, pull_back = jax.vjp(lambda gate, up: gated(activation, gate, up), *wide)
    d_gate, d_up = pull_back(jnp.asarray(d_out, dtype))
    return d_gate.astype(gate.dtype), d_up.astype(up.dtype)


def kept_apart[T](operands: T, cotangents: jax.Array) -> T:
    """Operands from which a backward pass recomputes: after its cotangents, so that XLA finds no equal computation.

    It would use the forward pass's result instead, and keep it.
    """
    return jax.lax.optimization_barrier((operands, cotangents))[0]
