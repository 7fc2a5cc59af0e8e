"""The inputs of every flash attention backend: canonical arrays, one mask, static options."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt32  # noqa: F401

from tilewright.kernels.flash_attention.position_bias import PositionBias
from tilewright.kernels.masks import Mask
from tilewright.kernels.numerics.dropout import head_keys


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionOptions:
    """The options of a call that are static values, not arrays.

    A backend that does not read a field computes without it: each declines what it cannot do, by name.

    Attributes:
      dropout_prob: what the generator really drops, a ``drawn_probability`` of ``tilewright.kernels.numerics.dropout``.
      beside_transfer: a transfer to another device is under way, which needs some of the SMs. It changes no result.
    """

    softmax_scale: float
    logits_soft_cap: float | None = None
    dropout_prob: float = 0.0
    precision: Any = None
    beside_transfer: bool = False


@dataclasses.dataclass(frozen=True)
class AttentionInputs:
    """A call after ``prepare``; shapes and dtypes hold without further checks.

    Causality, window, segments, lengths, packed lengths and an explicit mask are all folded into ``mask`` (``None``:
    every position is visible). ``bias`` has rank 4, each dimension full or 1; a bias that is computed from positions is
    ``position_bias`` instead, which a backend that does not serve it declines. If these arrays are a device's part of a
    call, ``dropout_origin`` holds the indices of the first batch element and query head in the whole call, from which
    the dropout generator counts. ``bias_is_constant`` says to a backward pass that nobody uses the gradient of either
    bias, the first of which is as large as the scores.
    """

    query: Float[Array, "batch q_length heads head_dim"]
    key: Float[Array, "batch kv_length kv_heads head_dim"]
    value: Float[Array, "batch kv_length kv_heads value_dim"]
    bias: Float[Array, "#batch #heads #q_length #kv_length"] | None
    mask: Mask | None
    softmax_aux: Float[Array, "heads sinks"] | None
    dropout_seed: UInt32[Array, "2"] | None
    options: AttentionOptions
    dropout_origin: UInt32[Array, "2"] | None = None
    bias_is_constant: bool = False
    position_bias: PositionBias | None = None

    @property
    def differentiated_bias(self) -> jax.Array | None:
        """The bias if its gradient is wanted."""
        return None if self.bias_is_constant else self.bias

    @property
    def differentiated_position_bias(self) -> PositionBias | None:
        """The bias of positions if its gradient is wanted: that of its values, by the name "position_bias"."""
        return None if self.bias_is_constant else self.position_bias

    @property
    def is_empty(self) -> bool:
        """True if there are no queries or no keys, or they have no elements."""
        return 0 in (*self.query.shape, *self.value.shape)


jax.tree_util.register_dataclass(
    AttentionInputs,
    data_fields=[
        "query", "key", "value", "bias", "mask", "softmax_aux", "dropout_seed", "dropout_origin", "position_bias",
    ],
    meta_fields=["options", "bias_is_constant"],
)  # fmt: skip


def dropout_keys(inputs: AttentionInputs) -> UInt32[Array, "batch heads 2"] | None:
    """The dropout generator's key of every head; None without dropout."""
    if inputs.dropout_seed is None or not inputs.options.dropout_prob:
        return None
    batch, _, heads, _ = inputs.query.shape
    origin = (0, 0) if inputs.dropout_origin is None else inputs.dropout_origin
    first = jnp.arange(batch, dtype=jnp.uint32)[:, None] + jnp.asarray(origin[0], jnp.uint32)
    second = jnp.arange(heads, dtype=jnp.uint32)[None, :] + jnp.asarray(origin[1], jnp.uint32)
    return jnp.stack(head_keys(inputs.dropout_seed, first, second), axis=-1)
