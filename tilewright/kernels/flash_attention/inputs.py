"""The inputs of every flash attention backend: canonical arrays, one mask, options."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt32  # noqa: F401

from tilewright.kernels.flash_attention.position_bias import PositionBias
from tilewright.kernels.heads import HeadInputs
from tilewright.kernels.masks import Mask
from tilewright.kernels.numerics.dropout import drawn_probability, head_keys
from tilewright.kernels.op.inputs import array, static
from tilewright.ops.kernel.arrays import struct_like


class AttentionInputs(HeadInputs):
    """A call after ``prepare``; shapes and dtypes hold without further checks.

    Causality, window, segments, lengths, packed lengths and an explicit mask are all folded into ``mask`` (``None``:
    every position is visible). ``bias`` has rank 4, each dimension full or 1; a bias that is computed from positions is
    ``position_bias`` instead.

    Attributes:
      dropout_prob: as given; ``drawn_dropout`` is what the generator really drops.
      beside_transfer: a transfer to another device is under way, which needs some of the SMs.
      return_lse: the caller reads, and may differentiate, the log-sum-exp.
      unbatched: the caller's arrays have no batch dimension.
      dropout_origin: if the arrays are a device's part of a call, the indices of the first batch element and query head
        in the whole call, from which the dropout generator counts.
    """

    query: Float[Array, "batch q_length heads head_dim"]
    key: Float[Array, "batch kv_length kv_heads head_dim"]
    value: Float[Array, "batch kv_length kv_heads value_dim"]
    softmax_scale: float = static()
    bias: Float[Array, "#batch #heads #q_length #kv_length"] | None = None
    position_bias: PositionBias | None = None
    mask: Mask | None = None
    softmax_aux: Float[Array, "heads sinks"] | None = None
    dropout_seed: UInt32[Array, "2"] | None = None
    logits_soft_cap: float | None = static(default=None)
    dropout_prob: float = static(default=0.0)
    precision: Any = static(default=None)
    beside_transfer: bool = static(default=False, role="call")
    return_lse: bool = static(default=False, role="call")
    unbatched: bool = static(default=False, role="call")
    dropout_origin: UInt32[Array, "2"] | None = array(default=None, role="stage")

    @functools.cached_property
    def batch(self) -> int:
        return self.query.shape[0]

    @functools.cached_property
    def q_length(self) -> int:
        return self.query.shape[1]

    @functools.cached_property
    def kv_length(self) -> int:
        return self.key.shape[1]

    @functools.cached_property
    def value_dim(self) -> int:
        return self.value.shape[3]

    @functools.cached_property
    def score_shape(self) -> tuple[int, int, int, int]:
        """Batch, heads, queries and keys."""
        return self.batch, self.heads, self.q_length, self.kv_length

    @functools.cached_property
    def sinks(self) -> int:
        """The number of extra logits per head."""
        return 0 if self.softmax_aux is None else self.softmax_aux.shape[1]

    @functools.cached_property
    def dropout(self) -> bool:
        """True if probabilities are dropped."""
        return self.drawn_dropout > 0.0

    @functools.cached_property
    def drawn_dropout(self) -> float:
        """The share of the probabilities that the generator drops."""
        return drawn_probability(self.dropout_prob)

    @functools.cached_property
    def differentiated_bias(self) -> jax.Array | None:
        """The bias if its gradient, which is as large as the scores, is wanted."""
        return self.bias if self.wants("bias") else None

    @functools.cached_property
    def differentiated_position_bias(self) -> PositionBias | None:
        """The bias of positions if its gradient is wanted: that of its values, by the name "position_bias"."""
        return self.position_bias if self.wants("position_bias") else None

    @functools.cached_property
    def gradients(self) -> dict[str, jax.ShapeDtypeStruct]:
        found = super().gradients
        if self.differentiated_position_bias is not None:
            found["position_bias"] = struct_like(self.differentiated_position_bias.values)
        return found

    @functools.cached_property
    def is_empty(self) -> bool:
        """True if there are no queries or no keys, or they have no elements."""
        return 0 in (*self.query.shape, *self.value.shape)


def dropout_keys(inputs: AttentionInputs) -> UInt32[Array, "batch heads 2"] | None:
    """The dropout generator's key of every head; None without dropout."""
    if inputs.dropout_seed is None or not inputs.dropout:
        return None
    batch, _, heads, _ = inputs.query.shape
    origin = (0, 0) if inputs.dropout_origin is None else inputs.dropout_origin
    first = jnp.arange(batch, dtype=jnp.uint32)[:, None] + jnp.asarray(origin[0], jnp.uint32)
    second = jnp.arange(heads, dtype=jnp.uint32)[None, :] + jnp.asarray(origin[1], jnp.uint32)
    return jnp.stack(head_keys(inputs.dropout_seed, first, second), axis=-1)
