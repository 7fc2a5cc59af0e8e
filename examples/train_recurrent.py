"""Trains a small model with the recurrent layers of a family to recall what it has read, and decodes with it.

The families are Qwen3-Next and Kimi Linear (three of their layers, then one of attention, each before an MLP), Mamba-2
(its layers alone) and RWKV-7 (time mixing and channel mixing). The task is associative recall: a row has pairs of a key
and a value, then keys again, and the model says their values. Afterwards the model reads the pairs of new rows at once,
and the questions token by token from pools of states:

    python examples/train_recurrent.py --family rwkv7
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from recurrent_layers import RWKV7, GatedDeltaNet, KimiDeltaAttention, Mamba2, RWKV7ChannelMix, matrices, pool_of

from tilewright.modules import decode_attention, flash_attention, glu, linear_cross_entropy, rms_norm, rope

type Arrays = dict[str, Any]


class Cache(NamedTuple):
    """The keys and values that a layer of attention keeps, ``[sequences or slots, length, kv_heads, head_dim]``."""

    keys: jax.Array
    values: jax.Array


@dataclasses.dataclass(frozen=True)
class Attention:
    """Grouped-query attention.

    Attributes:
      rotated: the part of a head that is rotated by positions, a quarter in Qwen3-Next and nothing in Kimi Linear.
    """

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    rotated: float

    def parameters(self, key: jax.Array) -> Arrays:
        d, heads = self.hidden_size, self.heads + 2 * self.kv_heads
        return matrices(key, qkv=(heads * self.head_dim, d), o=(d, self.heads * self.head_dim))

    def __call__(
        self, w: Arrays, x: jax.Array, cache: Cache | None, slots: jax.Array | None, lengths: jax.Array | None
    ) -> tuple[jax.Array, Cache]:
        """Rows from their first token on; or a token more of each slot, whose cache has ``lengths`` tokens and room."""
        heads = (x @ w["qkv.weight"].T).reshape(*x.shape[:2], -1, self.head_dim)
        q, k, v = jnp.split(heads, (self.heads, self.heads + self.kv_heads), axis=-2)
        if self.rotated:
            positions = jnp.arange(x.shape[1]) if lengths is None else lengths[:, None]
            q, k = (rope(each, positions, fraction=self.rotated) for each in (q, k))
        if cache is None or slots is None or lengths is None:
            out, cache = flash_attention(q, k, v, causal=True), Cache(k, v)
        else:
            cache = Cache(*(old.at[slots, lengths].set(new[:, 0]) for old, new in zip(cache, (k, v), strict=True)))
            out = decode_attention(q[:, 0], cache.keys[slots], cache.values[slots], lengths + 1)  # A server has pages.
        return out.reshape(*x.shape[:2], -1) @ w["o.weight"].T, cache


@dataclasses.dataclass(frozen=True)
class MLP:
    """SwiGLU, which keeps nothing of a sequence."""

    hidden_size: int
    intermediate_size: int

    def parameters(self, key: jax.Array) -> Arrays:
        d, hidden = self.hidden_size, self.intermediate_size
        return matrices(key, gate=(hidden, d), up=(hidden, d), down=(d, hidden))

    def __call__(self, w: Arrays, x: jax.Array) -> jax.Array:
        return glu(x, w["gate.weight"].T, w["up.weight"].T) @ w["down.weight"].T


type Layer = GatedDeltaNet | KimiDeltaAttention | Mamba2 | RWKV7 | RWKV7ChannelMix | Attention | MLP


@dataclasses.dataclass(frozen=True)
class Model:
    """Layers of one width, each behind a norm and added to what it reads, between an embedding and its transpose."""

    layers: tuple[Layer, ...]
    vocabulary: int = 32

    @property
    def width(self) -> int:
        return self.layers[0].hidden_size


def hybrid(recurrent: Layer, rotated: float) -> Model:
    """Three recurrent layers, then one of attention, each before an MLP."""
    d = recurrent.hidden_size
    attention, mlp = Attention(d, heads=4, kv_heads=2, head_dim=16, rotated=rotated), MLP(d, 2 * d)
    return Model((recurrent, mlp) * 3 + (attention, mlp))


MODELS: Mapping[str, Model] = MappingProxyType(
    {
        "qwen3_next": hybrid(
            GatedDeltaNet(
                hidden_size=64,
                linear_num_key_heads=2,
                linear_num_value_heads=4,
                linear_key_head_dim=16,
                linear_value_head_dim=16,
            ),
            rotated=0.25,
        ),
        "kimi_linear": hybrid(KimiDeltaAttention(hidden_size=64, num_heads=4, head_dim=16), rotated=0.0),
        "mamba2": Model((Mamba2(hidden_size=64, num_heads=8, head_dim=16, state_size=32, n_groups=2),) * 4),
        "rwkv7": Model(
            (
                RWKV7(
                    hidden_size=64,
                    head_dim=16,
                    decay_low_rank_dim=16,
                    a_low_rank_dim=16,
                    v_low_rank_dim=16,
                    gate_low_rank_dim=32,
                ),
                RWKV7ChannelMix(hidden_size=64, intermediate_size=128),
            )
            * 2
        ),
    }
)
"""The model of each family."""


def parameters(key: jax.Array, model: Model) -> Arrays:
    keys = jax.random.split(key, len(model.layers) + 1)
    return {
        "layers": [layer_parameters(each, model, n) for n, each in enumerate(keys[1:])],
        "embedding": jax.random.normal(keys[0], (model.vocabulary, model.width)) * model.width**-0.5,
        "norm": jnp.ones(model.width),
    }


def layer_parameters(key: jax.Array, model: Model, number: int) -> Arrays:
    layer = model.layers[number]
    found = layer.parameters(key, first=number == 0) if isinstance(layer, RWKV7) else layer.parameters(key)
    return {"norm": jnp.ones(model.width), "layer": found}


def features(
    w: Arrays,
    tokens: jax.Array,
    model: Model,
    states: Any = None,
    slots: jax.Array | None = None,
    lengths: jax.Array | None = None,
) -> tuple[jax.Array, list[Any]]:
    """The rows that the embedding multiplies to logits, ``[rows, length, width]``, and the states of all layers.

    With pools of states it goes on with one token of each of these slots, of which ``lengths`` tokens were read.
    """
    x, found, value_first = w["embedding"][tokens], [], None
    for number, (layer, of_layer) in enumerate(zip(model.layers, w["layers"], strict=True)):
        weights, normed = of_layer["layer"], rms_norm(x, of_layer["norm"])
        state = None if states is None else states[number]
        if isinstance(layer, MLP):
            out, state = layer(weights, normed), None
        elif isinstance(layer, Attention):
            out, state = layer(weights, normed, state, slots, lengths)
        elif isinstance(layer, RWKV7):
            out, state, value_first = layer(weights, normed, state, slots, value_first=value_first)
        else:
            out, state = layer(weights, normed, state, slots)
        x += out
        found.append(state)
    return rms_norm(x, w["norm"]), found


def recall(random: np.random.Generator, rows: int, pairs: int, vocabulary: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Tokens ``[rows, 8 · pairs]`` and their labels, which are −100 but where a value is asked for.

    A row begins with its own pairs of a key and a value; then all keys come three times more, in other orders, each
    before its value. Keys are the first half of the vocabulary, values the second.
    """
    half = vocabulary // 2
    keys = random.permuted(np.broadcast_to(np.arange(half), (rows, half)), axis=1)[:, :pairs]
    said = np.stack([keys, random.integers(half, vocabulary, keys.shape)], axis=-1)
    orders = random.permuted(np.broadcast_to(np.arange(pairs), (3, rows, pairs)), axis=2)
    asked = [np.take_along_axis(said, order[..., None], axis=1) for order in orders]
    tokens = np.concatenate([said, *asked], axis=1).reshape(rows, -1).astype(np.int32)
    labels = np.full_like(tokens, -100)
    labels[:, 2 * pairs :: 2] = tokens[:, 2 * pairs + 1 :: 2]
    return tokens, labels


def loss(w: Arrays, tokens: jax.Array, labels: jax.Array, model: Model) -> jax.Array:
    return linear_cross_entropy(features(w, tokens, model)[0], w["embedding"], labels, vocab_first=True)


def train(model: Model, steps: int, rows: int, pairs: int, rate: float, seed: int = 0) -> tuple[Arrays, list[float]]:
    """The parameters after training, and the loss of each step."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 10 + 1, steps + 1)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.0))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(w: Arrays, moments: Any, tokens: jax.Array, labels: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(w, tokens, labels, model)
        updates, moments = optimizer.update(gradients, moments, w)
        return optax.apply_updates(w, updates), moments, value

    w = parameters(jax.random.key(seed), model)
    moments, random, losses = optimizer.init(w), np.random.default_rng(seed), []
    start = time.perf_counter()
    for number in range(1, steps + 1):
        w, moments, value = step(w, moments, *recall(random, rows, pairs, model.vocabulary))
        losses.append(value)
        if number % 50 == 0 or number == steps:
            print(f"step {number}/{steps}  loss {float(value):.4f}  {time.perf_counter() - start:.0f} s", flush=True)
    return w, [float(each) for each in losses]


def whole(w: Arrays, tokens: np.ndarray, model: Model) -> jax.Array:
    """Logits of all tokens, which are read at once."""
    return jax.jit(features, static_argnums=2)(w, tokens, model)[0] @ w["embedding"].T


def decoded(w: Arrays, tokens: np.ndarray, prompt: int, model: Model) -> np.ndarray:
    """Logits of the tokens behind a prompt, ``[rows, length - prompt, vocabulary]``, which are read one by one.

    The prompts are read at once, and their states go into pools with more slots than there are rows. The states of
    recurrent layers stay as large as they are; the caches of attention get room first.
    """
    rows, length = tokens.shape
    _, states = jax.jit(features, static_argnums=2)(w, tokens[:, :prompt], model)
    room = [(0, 0), (0, length - prompt), (0, 0), (0, 0)]
    states = [Cache(*(jnp.pad(a, room) for a in each)) if isinstance(each, Cache) else each for each in states]
    slots = jax.random.permutation(jax.random.key(0), rows + 3)[:rows]
    pools = pool_of(states, slots, rows + 3)

    @functools.partial(jax.jit, donate_argnums=1)
    def step(w: Arrays, pools: Any, token: jax.Array, lengths: jax.Array) -> Any:
        x, pools = features(w, token[:, None], model, pools, slots, lengths)
        return x[:, 0] @ w["embedding"].T, pools

    found = []
    for place in range(prompt, length):
        logits, pools = step(w, pools, tokens[:, place], jnp.full(rows, place))
        found.append(np.asarray(logits))
    return np.stack(found, axis=1)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--family", choices=MODELS, default="qwen3_next")
    add = functools.partial(parser.add_argument, type=int)
    add("--steps", default=300)
    add("--rows", default=64)
    add("--pairs", default=4, help="of a row, whose length is eight times that")
    parser.add_argument("--rate", type=float, default=8e-3)
    arguments = parser.parse_args(given)
    model, prompt = MODELS[arguments.family], 2 * arguments.pairs
    w, _ = train(model, arguments.steps, arguments.rows, arguments.pairs, arguments.rate)
    tokens, labels = recall(np.random.default_rng(1), 64, arguments.pairs, model.vocabulary)
    logits = decoded(w, tokens, prompt, model)
    right = np.mean(logits[:, ::2].argmax(axis=-1) == labels[:, prompt::2])
    apart = np.abs(logits - whole(w, tokens, model)[:, prompt:]).max()
    print(f"{right:.1%} of the values are recalled, token by token")
    print(f"their logits, of up to {np.abs(logits).max():.1f}, differ by {apart:.1e} at most from those of whole rows")


if __name__ == "__main__":
    main()
