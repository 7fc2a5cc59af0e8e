"""A byte-level transformer in plain JAX: RMSNorm, rotary positions, grouped-query attention, SwiGLU, AdamW.

The attention is an argument, so the same model runs on any implementation of it. Beside its own embedding a byte has
those of the 2-, 3- and 4-grams that it ends, by hash (arXiv 2412.09871): on a small budget they are worth more than
any other parameter.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tilewright.modules import linear_cross_entropy, rope

Parameters = dict[str, Any]

LARGE_VOCABULARY = 4096
"""From here on the loss does without its logits in memory; those of 256 bytes are smaller than the activations."""


class Attention(Protocol):
    """Causal attention; ``sliding_window`` is how many earlier positions a query sees, None for all of them."""

    def __call__(
        self,
        query: Float[Array, "batch length heads head_dim"],
        key: Float[Array, "batch length kv_heads head_dim"],
        value: Float[Array, "batch length kv_heads head_dim"],
        *,
        sliding_window: int | None,
    ) -> Float[Array, "batch length heads head_dim"]: ...


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes of the model; every second layer sees only ``window`` earlier positions."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    hidden: int = 352
    window: int = 256
    vocabulary: int = 256
    longest_ngram: int = 4
    ngram_buckets: int = 16384
    ngram_width: int = 32

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"key/value heads must divide the query heads: {self.heads=}, {self.kv_heads=}")
        if self.head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim: {self.head_dim=}")

    def sliding_window(self, layer: int) -> int | None:
        return self.window if layer % 2 else None


@dataclasses.dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter, 2019) with linear warm-up and cosine decay to a tenth."""

    steps: int
    peak: float = 3e-3
    warmup: int = 20
    beta1: float = 0.9
    beta2: float = 0.98
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0


class TrainState(NamedTuple):
    step: Int[Array, ""]
    parameters: Parameters
    mean: Parameters
    square: Parameters


def initial_parameters(config: ModelConfig, key: jax.Array) -> Parameters:
    """Normal weights of variance 1/fan-in; what writes to the residual stream is scaled by its depth."""

    def dense(key: jax.Array, fan_in: int, fan_out: int, scale: float = 1.0) -> jax.Array:
        return jax.random.normal(key, (fan_in, fan_out)) * (scale * fan_in**-0.5)

    query_width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    residual_scale = (2 * config.layers) ** -0.5
    embedding_key, ngram_key, output_key, *layer_keys = jax.random.split(key, config.layers + 3)
    layers = []
    for layer_key in layer_keys:
        keys = jax.random.split(layer_key, 7)
        layers.append(
            {
                "attention_norm": jnp.ones(config.width),
                "query": dense(keys[0], config.width, query_width),
                "key": dense(keys[1], config.width, kv_width),
                "value": dense(keys[2], config.width, kv_width),
                "output": dense(keys[3], query_width, config.width, residual_scale),
                "mlp_norm": jnp.ones(config.width),
                "gate": dense(keys[4], config.width, config.hidden),
                "up": dense(keys[5], config.width, config.hidden),
                "down": dense(keys[6], config.hidden, config.width, residual_scale),
            }
        )
    orders = config.longest_ngram - 1
    return {
        "embedding": jax.random.normal(embedding_key, (config.vocabulary, config.width)) * 0.02,
        "ngrams": jax.random.normal(ngram_key, (orders, config.ngram_buckets, config.ngram_width)) * 0.02,
        "ngram_output": dense(output_key, orders * config.ngram_width, config.width),
        "layers": layers,
        "final_norm": jnp.ones(config.width),
    }


def rms_norm(
    x: Float[Array, "*batch width"], scale: Float[Array, " width"], epsilon: float = 1e-6
) -> Float[Array, "*batch width"]:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon) * scale


def embed(
    parameters: Parameters,
    tokens: Int[Array, "*batch length"],
    earlier: Sequence[Int[Array, "*batch length"]],
    config: ModelConfig,
) -> Float[Array, "*batch length width"]:
    """Each byte's embedding plus those of the n-grams that end in it.

    Args:
      earlier: for each byte the one before it, the one before that, and so on; before the text stand zeros.
    """
    code = tokens.astype(jnp.uint32)
    found = []
    for table, before in zip(parameters["ngrams"], earlier, strict=True):
        # Knuth's multiplicative hash, whose high bits are mixed.
        code = code * jnp.uint32(0x9E3779B1) + before.astype(jnp.uint32) + 1
        found.append(table[(code >> 7) % config.ngram_buckets])
    return parameters["embedding"][tokens] + jnp.concatenate(found, axis=-1) @ parameters["ngram_output"]


class Attend(Protocol):
    """Attention of one layer, by its number; it may keep what it is given."""

    def __call__(self, layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array: ...


def features(
    parameters: Parameters,
    x: Float[Array, "*batch length width"],
    positions: Int[Array, " length"],
    config: ModelConfig,
    attend: Attend,
) -> Float[Array, "*batch length width"]:
    """The layers on embedded bytes, without the output's projection."""

    def heads(projected: jax.Array) -> jax.Array:
        return projected.reshape(*projected.shape[:-1], -1, config.head_dim)

    for index, layer in enumerate(parameters["layers"]):
        h = rms_norm(x, layer["attention_norm"])
        query, key = (rope(heads(h @ layer[name]), positions) for name in ("query", "key"))
        out = attend(index, query, key, heads(h @ layer["value"]))
        x = x + out.reshape(*out.shape[:-2], -1) @ layer["output"]
        h = rms_norm(x, layer["mlp_norm"])
        x = x + (jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"]
    return rms_norm(x, parameters["final_norm"])


def hidden(
    parameters: Parameters, tokens: Int[Array, "batch length"], config: ModelConfig, attention: Attention
) -> Float[Array, "batch length width"]:
    """What the last layer gives, before the matrix to the vocabulary."""
    length = tokens.shape[1]
    earlier = [jnp.pad(tokens, ((0, 0), (back, 0)))[:, :length] for back in range(1, config.longest_ngram)]

    def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return attention(query, key, value, sliding_window=config.sliding_window(layer))

    x = embed(parameters, tokens, earlier, config)
    return features(parameters, x, jnp.arange(length), config, attend)


def logits(
    parameters: Parameters, tokens: Int[Array, "batch length"], config: ModelConfig, attention: Attention
) -> Float[Array, "batch length vocabulary"]:
    return hidden(parameters, tokens, config, attention) @ parameters["embedding"].T


def loss(parameters: Parameters, tokens: Int[Array, "batch length+1"], config: ModelConfig, attention: Attention):
    """The mean cross-entropy of the next token, in nats."""
    if config.vocabulary >= LARGE_VOCABULARY:
        x = hidden(parameters, tokens[:, :-1], config, attention)
        return linear_cross_entropy(x, parameters["embedding"], tokens[:, 1:], vocab_first=True)
    log_probability = jax.nn.log_softmax(logits(parameters, tokens[:, :-1], config, attention))
    return -jnp.take_along_axis(log_probability, tokens[:, 1:, None], axis=-1).mean()


def initial_state(config: ModelConfig, key: jax.Array) -> TrainState:
    parameters = initial_parameters(config, key)
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    return TrainState(jnp.zeros((), jnp.int32), parameters, zeros, zeros)


def learning_rate(step: jax.Array, config: OptimizerConfig) -> jax.Array:
    rise = (step + 1) / config.warmup
    progress = jnp.clip((step - config.warmup) / max(1, config.steps - config.warmup), 0, 1)
    return config.peak * jnp.minimum(rise, 0.55 + 0.45 * jnp.cos(jnp.pi * progress))


def train_step(
    state: TrainState,
    tokens: Int[Array, "batch length+1"],
    *,
    model: ModelConfig,
    optimizer: OptimizerConfig,
    attention: Attention | None,
    objective: Callable[..., jax.Array] = loss,
) -> tuple[TrainState, Float[Array, ""]]:
    """One step of AdamW; returns the loss before the step.

    Args:
      objective: ``loss``, or a function of its arguments such as that of ``train_long``, which brings its attention.
    """
    value, gradients = jax.value_and_grad(objective)(state.parameters, tokens, model, attention)
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradients)))
    scale = jnp.minimum(1.0, optimizer.clip_norm / (norm + 1e-6))
    gradients = jax.tree.map(lambda g: g * scale, gradients)
    step = state.step + 1
    rate = learning_rate(state.step, optimizer)
    mean = jax.tree.map(lambda m, g: optimizer.beta1 * m + (1 - optimizer.beta1) * g, state.mean, gradients)
    square = jax.tree.map(lambda s, g: optimizer.beta2 * s + (1 - optimizer.beta2) * g * g, state.square, gradients)

    def update(parameter: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
        unbiased = m / (1 - optimizer.beta1**step)
        deviation = jnp.sqrt(s / (1 - optimizer.beta2**step)) + optimizer.epsilon
        decay = optimizer.weight_decay if parameter.ndim > 1 else 0.0
        return parameter - rate * (unbiased / deviation + decay * parameter)

    return TrainState(step, jax.tree.map(update, state.parameters, mean, square), mean, square), value


@partial(jax.jit, static_argnames=("count", "config", "attention"))
def generate(
    parameters: Parameters,
    prompt: Int[Array, " length"],
    key: jax.Array,
    *,
    count: int,
    config: ModelConfig,
    attention: Attention,
    temperature: float = 0.7,
) -> Int[Array, " count"]:
    """Draws ``count`` bytes after the prompt; the last ``length`` bytes are always the context."""

    def draw(context: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        last = logits(parameters, context[None], config, attention)[0, -1]
        token = jax.random.categorical(key, last / temperature).astype(context.dtype)
        return jnp.append(context[1:], token), token

    return jax.lax.scan(draw, prompt, jax.random.split(key, count))[1]
