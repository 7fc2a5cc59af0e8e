"""Models that the engine serves: a Llama of any size, and the one that the demo trains."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import byte_transformer
import jax
import jax.numpy as jnp

from tilewright.modules import glu, rms_norm

type Parameters = dict[str, Any]


class Cache(Protocol):
    """The pages of all layers, as they are in one step; what attention has written is in the next one."""

    def attend(
        self,
        layer: Any,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        rope_scaling: Mapping[str, Any] | None = None,
        sliding_window: int | None = None,
    ) -> tuple[jax.Array, Any]:
        """Attention of the step's tokens in one layer, by its number, which may be traced; and the next cache.

        Args:
          rope_scaling: as in ``config.json``: queries and keys are rotated first.
        """
        ...


class Model(Protocol):
    """A decoder of packed tokens.

    Attributes:
      layers, kv_heads, head_dim, dtype: of the cache.
      history: how many tokens before each one ``features`` takes.
    """

    @property
    def layers(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def history(self) -> int: ...

    def features[C: Cache](
        self, parameters: Any, tokens: jax.Array, earlier: Sequence[jax.Array], positions: jax.Array, cache: C
    ) -> tuple[jax.Array, C]:
        """The rows ``[tokens, d]`` that ``logits`` takes, and the cache with the tokens in it.

        Args:
          tokens, positions: ``[tokens]``.
          earlier: the token before each one, the one before that, and so on; zeros before the text.
        """
        ...

    def logits(self, parameters: Any, rows: jax.Array) -> jax.Array:
        """``[rows, vocabulary]`` in float32."""
        ...


@dataclasses.dataclass(frozen=True)
class Llama:
    """The sizes of a model of the Llama family; every layer sees the whole text.

    Attributes:
      rope_scaling: as in ``config.json``, in pairs of name and value.
      scanned: its layers are one body of a loop, which compiles three times as fast; but in each step XLA copies the
        matrices of its own products out of their stacks, and decoding takes half as long again.
    """

    layers: int
    d: int
    heads: int
    kv_heads: int
    head_dim: int
    ff: int
    vocabulary: int
    rope_scaling: tuple[tuple[str, Any], ...] = (("rope_type", "default"), ("rope_theta", 500000.0))
    dtype: Any = jnp.bfloat16
    scanned: bool = False

    @property
    def history(self) -> int:
        return 0

    def parameters(self, key: jax.Array) -> Parameters:
        """Random ones: normal matrices of variance 1/fan-in."""
        d, q, kv, ff = self.d, self.heads * self.head_dim, self.kv_heads * self.head_dim, self.ff
        shapes = {"qkv": (d, q + 2 * kv), "o": (q, d), "gate": (d, ff), "up": (d, ff), "down": (ff, d)}

        @functools.partial(jax.jit, static_argnums=(1, 2))
        def drawn(key: jax.Array, shape: tuple[int, ...], scale: float) -> jax.Array:
            return (scale * jax.random.normal(key, shape, jnp.float32)).astype(self.dtype)

        def layer(key: jax.Array) -> Parameters:
            keys = jax.random.split(key, len(shapes))
            found = {
                name: drawn(each, shape, shape[0] ** -0.5)
                for each, (name, shape) in zip(keys, shapes.items(), strict=True)
            }
            return found | {name: jnp.ones(d, self.dtype) for name in ("attention_norm", "mlp_norm")}

        ends, *keys = jax.random.split(key, self.layers + 1)
        each = [layer(key) for key in keys]
        first, last = jax.random.split(ends)
        return {
            "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *each) if self.scanned else each,
            "embedding": drawn(first, (self.vocabulary, d), 0.02),
            "norm": jnp.ones(d, self.dtype),
            "head": drawn(last, (d, self.vocabulary), d**-0.5),
        }

    def features[C: Cache](
        self, parameters: Parameters, tokens: jax.Array, earlier: Sequence[jax.Array], positions: jax.Array, cache: C
    ) -> tuple[jax.Array, C]:
        layers, carry = parameters["layers"], (parameters["embedding"][tokens], cache)
        if self.scanned:
            carry, _ = jax.lax.scan(self._layer, carry, (layers, jnp.arange(self.layers)))
        else:
            for each in zip(layers, range(self.layers), strict=True):
                carry, _ = self._layer(carry, each)
        x, cache = carry
        return rms_norm(x, parameters["norm"]), cache

    def _layer(self, carry: tuple[jax.Array, Any], scanned: tuple[Any, Any]) -> Any:
        (x, cache), (w, layer) = carry, scanned
        q = self.heads * self.head_dim
        rows = rms_norm(x, w["attention_norm"]) @ w["qkv"]
        query, key, value = (
            each.reshape(-1, each.shape[-1] // self.head_dim, self.head_dim)
            for each in jnp.split(rows, (q, q + self.kv_heads * self.head_dim), axis=1)
        )
        out, cache = cache.attend(layer, query, key, value, rope_scaling=dict(self.rope_scaling))
        y, x = rms_norm(out.reshape(-1, q) @ w["o"], w["mlp_norm"], residual=x)
        return (x + glu(y, w["gate"], w["up"]) @ w["down"], cache), None

    def logits(self, parameters: Parameters, rows: jax.Array) -> jax.Array:
        return jnp.dot(rows, parameters["head"], preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True)
class ByteModel:
    """The transformer of bytes of ``train_demo.py``."""

    config: byte_transformer.ModelConfig = dataclasses.field(default_factory=byte_transformer.ModelConfig)
    dtype: Any = jnp.float32

    @property
    def layers(self) -> int:
        return self.config.layers

    @property
    def kv_heads(self) -> int:
        return self.config.kv_heads

    @property
    def head_dim(self) -> int:
        return self.config.head_dim

    @property
    def vocabulary(self) -> int:
        return self.config.vocabulary

    @property
    def history(self) -> int:
        return self.config.longest_ngram - 1

    def features[C: Cache](
        self, parameters: Parameters, tokens: jax.Array, earlier: Sequence[jax.Array], positions: jax.Array, cache: C
    ) -> tuple[jax.Array, C]:
        def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            nonlocal cache
            window = self.config.sliding_window(layer)
            out, cache = cache.attend(layer, query, key, value, sliding_window=window)
            return out

        x = byte_transformer.embed(parameters, tokens, earlier, self.config)
        return byte_transformer.features(parameters, x, positions, self.config, attend), cache

    def logits(self, parameters: Parameters, rows: jax.Array) -> jax.Array:
        return rows @ parameters["embedding"].T


LLAMA_3_SCALING = (
    ("rope_type", "llama3"), ("rope_theta", 500000.0), ("factor", 8.0), ("low_freq_factor", 1.0),
    ("high_freq_factor", 4.0), ("original_max_position_embeddings", 8192),
)  # fmt: skip
LLAMAS = {
    "1b": Llama(16, 2048, 32, 8, 64, 8192, 128256, (*LLAMA_3_SCALING[:2], ("factor", 32.0), *LLAMA_3_SCALING[3:])),
    "8b": Llama(32, 4096, 32, 8, 128, 14336, 128256, LLAMA_3_SCALING),
}
"""Sizes of Llama 3.2 and 3.1, by ``config.json``; the head is a matrix of its own."""
