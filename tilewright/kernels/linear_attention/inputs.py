"""The inputs and results of linear attention."""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from tilewright.kernels.op.inputs import OpInputs, static
from tilewright.kernels.sequences import num_sequences

type GateKind = Literal["none", "head", "token", "channel"]
"""The dimensions of a decay: none (no decay), the head, the head and the token, or also the channel of the key."""


class LinearAttentionInputs(OpInputs):
    """A call after ``prepare``; shapes and dtypes hold without further checks.

    Attributes:
      scale: multiplies the query.
      log_decay: ``[value_heads]``, ``[batch, length, value_heads]`` or ``[batch, length, value_heads, key_dim]``.
      removal_read: a of S + b (aᵀ S).
      removal_write: b of S + b (aᵀ S).
      only_maps: give what tokens make of states in place of results, as ``with_identity`` says; no caller's option.
    """

    query: Float[Array, "batch length heads key_dim"]
    key: Float[Array, "batch length heads key_dim"]
    value: Float[Array, "batch length value_heads value_dim"]
    scale: float = static()
    log_decay: Float[Array, "..."] | None = None
    beta: Float[Array, "batch length value_heads"] | None = None
    removal_read: Float[Array, "batch length value_heads key_dim"] | None = None
    removal_write: Float[Array, "batch length value_heads key_dim"] | None = None
    bonus: Float[Array, "value_heads key_dim"] | None = None
    initial_state: Float[Array, "sequences value_heads key_dim value_dim"] | None = None
    cum_seqlens: Int32[Array, " boundaries"] | None = None
    segment_ids: Int32[Array, "batch length"] | None = None
    seq_lengths: Int32[Array, " batch"] | None = None
    qk_l2norm: bool = static(default=False)
    l2norm_eps: float = static(default=1e-6)
    return_state: bool = static(default=False, role="call")
    only_maps: bool = static(default=False)

    @functools.cached_property
    def batch(self) -> int:
        return self.query.shape[0]

    @functools.cached_property
    def length(self) -> int:
        return self.query.shape[1]

    @functools.cached_property
    def heads(self) -> int:
        return self.query.shape[2]

    @functools.cached_property
    def value_heads(self) -> int:
        return self.value.shape[2]

    @functools.cached_property
    def groups(self) -> int:
        """Value heads per key head."""
        return self.value_heads // self.heads

    @functools.cached_property
    def key_dim(self) -> int:
        return self.query.shape[3]

    @functools.cached_property
    def value_dim(self) -> int:
        return self.value.shape[3]

    @functools.cached_property
    def sequences(self) -> int:
        """The number of states: one for each row, or for each sequence of a packed row."""
        return num_sequences(self.batch, self.cum_seqlens)

    @functools.cached_property
    def gate(self) -> GateKind:
        kinds: dict[int, GateKind] = {1: "head", 3: "token", 4: "channel"}
        return "none" if self.log_decay is None else kinds[self.log_decay.ndim]

    @functools.cached_property
    def removal(self) -> tuple[jax.Array, jax.Array] | None:
        """The pair (a, b) of S + b (aᵀ S)."""
        read, write = self.removal_read, self.removal_write
        return None if read is None or write is None else (read, write)

    @functools.cached_property
    def state_dtype(self) -> np.dtype:
        """The dtype of states, gates and sums: float32, or float64 for float64 values."""
        return jnp.promote_types(self.value.dtype, jnp.float32)

    @functools.cached_property
    def state_shape(self) -> tuple[int, int, int, int]:
        return self.sequences, self.value_heads, self.key_dim, self.value_dim

    @functools.cached_property
    def has_matrix(self) -> bool:
        """True if tokens multiply states by a matrix, and not by factors alone."""
        return self.beta is not None or self.removal is not None

    @functools.cached_property
    def map_shape(self) -> tuple[int, int, int, int]:
        """The shape of the states that ``only_maps`` gives."""
        sequences, heads, key_dim, value_dim = self.state_shape
        return sequences, heads, key_dim, value_dim + key_dim * self.has_matrix


class LinearAttentionResults(NamedTuple):
    """The results of a forward pass, or their cotangents; the backward pass needs none of them.

    Attributes:
      state: the states behind the last tokens, if the call returns them.
    """

    out: Float[Array, "batch length value_heads value_dim"] | None
    state: Float[Array, "sequences value_heads key_dim value_dim"] | None


def with_identity(inputs: LinearAttentionInputs) -> LinearAttentionInputs:
    """The call whose last states are what ``only_maps`` gives.

    They begin with what tokens make of states of zeros. With a removal the columns of M of M S follow, which are what
    tokens without values make of the identity.
    """
    inputs = inputs.replace(only_maps=False, return_state=True)
    if not inputs.has_matrix:
        return inputs
    sequences, heads, key_dim, value_dim = inputs.state_shape
    values = jnp.zeros((*inputs.value.shape[:3], key_dim), inputs.value.dtype)
    states = jnp.eye(key_dim, key_dim + value_dim, k=value_dim, dtype=inputs.state_dtype)
    return inputs.replace(
        value=jnp.concatenate([inputs.value, values], axis=-1),
        initial_state=jnp.broadcast_to(states, (sequences, heads, *states.shape)),
    )


def l2_normalized(x: jax.Array, eps: float) -> jax.Array:
    """The rows of the last dimension divided by their norms, as √(sum of squares + eps)."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + jnp.asarray(eps, x.dtype))
