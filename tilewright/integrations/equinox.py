"""Attention for Equinox: a module that replaces ``equinox.nn.MultiheadAttention``."""

import warnings
from collections.abc import Callable
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp

# Imported under its own name: a program may replace `equinox.nn.MultiheadAttention` by ours.
from equinox.nn import MultiheadAttention as EquinoxAttention

from tilewright.modules import flash_attention

_COPIED = (
    "query_proj", "key_proj", "value_proj", "output_proj", "dropout", "num_heads",
    "query_size", "key_size", "value_size", "output_size", "qk_size", "vo_size",
    "use_query_bias", "use_key_bias", "use_value_bias", "use_output_bias",
)  # fmt: skip
"""The fields of Equinox's layer, which ours has too."""


class MultiheadAttention(eqx.Module):
    """``equinox.nn.MultiheadAttention``, computed by ``flash_attention``.

    It has the arguments, the fields, the parameters and, for one key, the initial values of Equinox's, so that
    ``equinox.nn.MultiheadAttention`` may be replaced by it for a whole program. Two results differ: a query that
    attends to nothing gives zeros, where Equinox averages all values, and dropout drops other positions.

    Args:
      num_heads: of queries, keys and values.
      query_size, key_size, value_size, output_size: channels; ``query_size`` where they are ``None``.
      qk_size, vo_size: channels of a head; ``query_size // num_heads`` where they are ``None``.
      use_query_bias, use_key_bias, use_value_bias, use_output_bias: whether a projection has a bias.
      dropout_p: the part of the probabilities to drop.
      inference: whether nothing is dropped; ``equinox.nn.inference_mode`` sets it.
      dtype: of the parameters.
      causal: query ``i`` sees the keys up to ``i``.
      platform: see ``flash_attention``.
      key: a ``jax.random`` key for the initial values.
    """

    query_proj: eqx.nn.Linear
    key_proj: eqx.nn.Linear
    value_proj: eqx.nn.Linear
    output_proj: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    num_heads: int = eqx.field(static=True)
    query_size: int = eqx.field(static=True)
    key_size: int = eqx.field(static=True)
    value_size: int = eqx.field(static=True)
    output_size: int = eqx.field(static=True)
    qk_size: int = eqx.field(static=True)
    vo_size: int = eqx.field(static=True)
    use_query_bias: bool = eqx.field(static=True)
    use_key_bias: bool = eqx.field(static=True)
    use_value_bias: bool = eqx.field(static=True)
    use_output_bias: bool = eqx.field(static=True)
    causal: bool = eqx.field(static=True)
    platform: Any = eqx.field(static=True)

    def __init__(
        self,
        num_heads: int,
        query_size: int,
        key_size: int | None = None,
        value_size: int | None = None,
        output_size: int | None = None,
        qk_size: int | None = None,
        vo_size: int | None = None,
        use_query_bias: bool = False,
        use_key_bias: bool = False,
        use_value_bias: bool = False,
        use_output_bias: bool = False,
        dropout_p: float = 0.0,
        inference: bool = False,
        dtype: object = None,
        *,
        causal: bool = False,
        platform: object = None,
        key: jax.Array,
    ):
        layer = EquinoxAttention(
            num_heads, query_size, key_size, value_size, output_size, qk_size, vo_size,
            use_query_bias, use_key_bias, use_value_bias, use_output_bias, dropout_p, inference, dtype, key=key,
        )  # fmt: skip
        for name in _COPIED:
            setattr(self, name, getattr(layer, name))
        self.causal, self.platform = causal, platform

    @classmethod
    def of(cls, layer: "EquinoxAttention | MultiheadAttention", *, causal: bool = False, platform: Any = None) -> Self:
        """The module with the fields of Equinox's, arrays and all; also of one of ours, with other options.

        Raises:
          TypeError: the layer is neither.
        """
        if not isinstance(layer, EquinoxAttention | MultiheadAttention):
            raise TypeError(f"layer must be an equinox.nn.MultiheadAttention, got {type(layer).__name__}")
        module = cls.__new__(cls)
        # Its fields may be anything that once had a layer's structure (shapes, `None`, specs), so nothing is computed.
        for name in _COPIED:
            object.__setattr__(module, name, getattr(layer, name))
        object.__setattr__(module, "causal", causal)
        object.__setattr__(module, "platform", platform)
        return module

    def __call__(
        self,
        query: jax.Array,
        key_: jax.Array,
        value: jax.Array,
        mask: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: Callable[..., Any] | None = None,
    ) -> jax.Array:
        """Attention of one sequence; ``jax.vmap`` it over a batch.

        Args:
          query: ``[q_length, query_size]``.
          key_: ``[kv_length, key_size]``.
          value: ``[kv_length, value_size]``.
          mask: ``[q_length, kv_length]`` or ``[num_heads, q_length, kv_length]``, True where a query attends.
          key: a ``jax.random`` key, wanted where dropout is active.
          inference: overrides the module's.
          deterministic: Equinox's former name of ``inference``; warns.
          process_heads: maps the heads of query, key and value, ``[length, num_heads, size]``, to others of the same
            shapes, such as rotated ones.

        Returns:
          ``[q_length, output_size]``.

        Raises:
          ValueError: shapes that do not fit; ``process_heads`` changed a shape.
          RuntimeError: dropout without a key.
        """
        query, key_, value = jnp.asarray(query), jnp.asarray(key_), jnp.asarray(value)
        if deterministic is not None:
            warnings.warn("MultiheadAttention()(deterministic=...) is now inference=...", stacklevel=2)
            inference = deterministic
        heads = (
            self._heads(self.query_proj, query),
            self._heads(self.key_proj, key_),
            self._heads(self.value_proj, value),
        )
        if process_heads is not None:
            shapes = [x.shape for x in heads]
            heads = process_heads(*heads)
            if [x.shape for x in heads] != shapes:
                raise ValueError(f"process_heads must keep the shapes {shapes}, got {[x.shape for x in heads]}")
        drops = self.dropout.p > 0 and not (self.dropout.inference if inference is None else inference)
        if drops and key is None:
            raise RuntimeError(f"dropout of p={self.dropout.p} needs a key; pass inference=True for none")
        out = flash_attention(
            *heads,
            mask=mask,
            causal=self.causal,
            dropout_prob=self.dropout.p if drops else 0.0,
            dropout_seed=jax.random.bits(key, (2,), jnp.uint32) if drops and key is not None else None,
            platform=self.platform,
        )
        return jax.vmap(self.output_proj)(out.reshape(query.shape[0], -1))

    def _heads(self, projection: eqx.nn.Linear, x: jax.Array) -> jax.Array:
        return jax.vmap(projection)(x).reshape(x.shape[0], self.num_heads, -1)
