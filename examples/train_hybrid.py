"""Trains a small hybrid model, three layers of the gated delta rule for each of attention, to recall what it has read.

Layers are those of Qwen3-Next: a short convolution, the gated delta rule with raw gates, a gated norm. The task is
associative recall: a row has pairs of a key and a value, then keys again, and the model says their values. Afterwards
it reads the pairs of new rows at once, and the questions token by token from its states:

    python examples/train_hybrid.py
"""

import argparse
import dataclasses
import functools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tilewright.modules import (
    decode_attention,
    flash_attention,
    gated_delta_rule,
    gated_delta_rule_step,
    glu,
    linear_cross_entropy,
    rms_norm,
    rope,
)

type Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Model:
    """The sizes of the model; a period has three layers of the gated delta rule and one of attention."""

    periods: int = 1
    width: int = 64
    key_heads: int = 2
    value_heads: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    hidden: int = 128
    taps: int = 4
    vocabulary: int = 32


class DeltaState(NamedTuple):
    """What a layer of the gated delta rule keeps of each row, whatever its length is.

    Attributes:
      inputs: the last of the convolution, ``[rows, taps - 1, channels]``.
      memory: ``[rows, value_heads, head_dim, head_dim]`` float32.
    """

    inputs: jax.Array
    memory: jax.Array


class Cache(NamedTuple):
    """The keys and values that a layer of attention keeps, ``[rows, length, kv_heads, head_dim]``."""

    keys: jax.Array
    values: jax.Array


def parameters(key: jax.Array, model: Model) -> Arrays:
    """Arrays of ``[periods, 3, ...]`` of the delta layers, ``[periods, ...]`` of attention, and those around them."""
    d, head, values = model.width, model.head_dim, model.value_heads
    channels = (2 * model.key_heads + values) * head
    mlp = {"gate": (d, model.hidden), "up": (d, model.hidden), "down": (model.hidden, d)}
    delta = {"qkv": (d, channels), "a": (d, values), "b": (d, values), "z": (d, values * head), "o": (values * head, d)}
    attention = {"qkv": (d, (model.heads + 2 * model.kv_heads) * head), "o": (model.heads * head, d)}

    def matrices(key: jax.Array, shapes: dict[str, tuple[int, int]], *layers: int) -> Arrays:
        keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
        found = {name: jax.random.normal(keys[name], layers + s) * s[0] ** -0.5 for name, s in shapes.items()}
        return found | {"norm": jnp.ones((*layers, d)), "norm_mlp": jnp.ones((*layers, d))}

    keys = jax.random.split(key, 6)
    layers = (model.periods, 3)
    times = jnp.exp(jax.random.uniform(keys[4], (*layers, values), minval=-7.0, maxval=-2.0))
    gates = {
        "taps": jax.random.normal(keys[2], (*layers, channels, model.taps)) * model.taps**-0.5,
        "A_log": jnp.log(jax.random.uniform(keys[3], (*layers, values), minval=0.1, maxval=8.0)),
        "dt_bias": jnp.log(jnp.expm1(times)),
        "norm_out": jnp.ones((*layers, head)),
    }
    return {
        "delta": matrices(keys[0], delta | mlp, *layers) | gates,
        "attention": matrices(keys[1], attention | mlp, model.periods),
        "embedding": jax.random.normal(keys[5], (model.vocabulary, d)) * d**-0.5,
        "norm": jnp.ones(d),
    }


def heads_of(x: jax.Array, head_dim: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], -1, head_dim)


def convolved(x: jax.Array, taps: jax.Array, before: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``silu`` of sums of the last inputs of each channel, the newest by the last tap; and the inputs for what follows.

    ``before`` are the inputs before x, ``[rows, taps - 1, channels]``.
    """
    inputs = jnp.concatenate([before, x], axis=1)
    sums = sum(inputs[:, n : n + x.shape[1]] * taps[:, n] for n in range(taps.shape[1]))
    return jax.nn.silu(sums), inputs[:, x.shape[1] :]


def delta_layer(x: jax.Array, w: Arrays, model: Model, state: DeltaState | None) -> tuple[jax.Array, DeltaState]:
    """Rows from their first token on, ``[rows, length, width]``; or, with a state, a few tokens more of each."""
    mixed = x @ w["qkv"]
    before = jnp.zeros((x.shape[0], model.taps - 1, mixed.shape[-1])) if state is None else state.inputs
    mixed, inputs = convolved(mixed, w["taps"], before)
    keys = model.key_heads * model.head_dim
    q, k, v = (heads_of(each, model.head_dim) for each in jnp.split(mixed, (keys, 2 * keys), axis=-1))
    a, b = x @ w["a"], x @ w["b"]
    if state is None:
        out, memory = gated_delta_rule(
            q, k, v, a=a, b=b, A_log=w["A_log"], dt_bias=w["dt_bias"], qk_l2norm=True, return_state=True
        )
    else:
        out, memory = gated_delta_rule_step(
            q, k, v, a=a, b=b, A_log=w["A_log"], dt_bias=w["dt_bias"], qk_l2norm=True, state_pool=state.memory
        )
    gate = heads_of(x @ w["z"], model.head_dim)
    out = (rms_norm(out, w["norm_out"]) * jax.nn.silu(gate)).reshape(*x.shape[:2], -1)
    return out @ w["o"], DeltaState(inputs, memory)


def attention_layer(
    x: jax.Array, w: Arrays, model: Model, cache: Cache | None, lengths: jax.Array | None
) -> tuple[jax.Array, Cache]:
    """Rows from their first token on; or, with a cache of ``lengths`` tokens that has room, one token more of each."""
    positions = jnp.arange(x.shape[1]) if lengths is None else lengths[:, None]
    heads = heads_of(x @ w["qkv"], model.head_dim)
    q, k, v = jnp.split(heads, (model.heads, model.heads + model.kv_heads), axis=-2)
    q, k = rope(q, positions, fraction=0.25), rope(k, positions, fraction=0.25)
    if cache is None or lengths is None:
        out, cache = flash_attention(q, k, v, causal=True), Cache(k, v)
    else:
        rows = jnp.arange(x.shape[0])
        cache = Cache(*(old.at[rows, lengths].set(new[:, 0]) for old, new in zip(cache, (k, v), strict=True)))
        out = decode_attention(q[:, 0], *cache, lengths + 1)
    return out.reshape(*x.shape[:2], -1) @ w["o"], cache


def mlp(x: jax.Array, w: Arrays) -> jax.Array:
    return x + glu(rms_norm(x, w["norm_mlp"]), w["gate"], w["up"]) @ w["down"]


def features(
    w: Arrays, tokens: jax.Array, model: Model, states: Any = (None, None), lengths: jax.Array | None = None
) -> tuple[jax.Array, Any]:
    """The rows that the embedding multiplies to logits, ``[rows, length, width]``, and the states of all layers.

    With states, and the lengths ``[rows]`` of what was read, it goes on with one token of each row.
    """

    def delta(x: jax.Array, each: Any) -> Any:
        w, state = each
        out, state = delta_layer(rms_norm(x, w["norm"]), w, model, state)
        return mlp(x + out, w), state

    def period(x: jax.Array, each: Any) -> Any:
        inner, w, memories, cache = each
        x, memories = jax.lax.scan(delta, x, (inner, memories))
        out, cache = attention_layer(rms_norm(x, w["norm"]), w, model, cache, lengths)
        return mlp(x + out, w), (memories, cache)

    x, states = jax.lax.scan(period, w["embedding"][tokens], (w["delta"], w["attention"], *states))
    return rms_norm(x, w["norm"]), states


def recall(random: np.random.Generator, rows: int, pairs: int, model: Model) -> tuple[np.ndarray, np.ndarray]:
    """Tokens ``[rows, 8 · pairs]`` and their labels, which are −100 but where a value is asked for.

    A row begins with its own pairs of a key and a value; then all keys come three times more, in other orders, each
    before its value. Keys are the first half of the vocabulary, values the second.
    """
    half = model.vocabulary // 2
    keys = random.permuted(np.broadcast_to(np.arange(half), (rows, half)), axis=1)[:, :pairs]
    said = np.stack([keys, random.integers(half, model.vocabulary, keys.shape)], axis=-1)
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
        w, moments, value = step(w, moments, *recall(random, rows, pairs, model))
        losses.append(value)
        if number % 50 == 0 or number == steps:
            print(f"step {number}/{steps}  loss {float(value):.4f}  {time.perf_counter() - start:.0f} s", flush=True)
    return w, [float(each) for each in losses]


def decoded(w: Arrays, tokens: np.ndarray, prompt: int, model: Model) -> np.ndarray:
    """Logits of the tokens behind a prompt, ``[rows, length - prompt, vocabulary]``, which are read one by one.

    The state of the delta layers stays as large as it is after the prompt; the caches of attention get room first.
    """
    rows, length = tokens.shape
    _, (memories, cache) = jax.jit(features, static_argnums=2)(w, tokens[:, :prompt], model)
    room = [(0, 0), (0, 0), (0, length - prompt), (0, 0), (0, 0)]
    states = (memories, Cache(*(jnp.pad(each, room) for each in cache)))

    @functools.partial(jax.jit, donate_argnums=1)
    def step(w: Arrays, states: Any, token: jax.Array, lengths: jax.Array) -> Any:
        x, states = features(w, token[:, None], model, states, lengths)
        return x[:, 0] @ w["embedding"].T, states

    found = []
    for place in range(prompt, length):
        logits, states = step(w, states, tokens[:, place], jnp.full(rows, place))
        found.append(np.asarray(logits))
    return np.stack(found, axis=1)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    add = functools.partial(parser.add_argument, type=int)
    add("--steps", default=300)
    add("--rows", default=64)
    add("--pairs", default=4, help="of a row, whose length is eight times that")
    parser.add_argument("--rate", type=float, default=8e-3)
    arguments = parser.parse_args(given)
    model = Model()
    w, _ = train(model, arguments.steps, arguments.rows, arguments.pairs, arguments.rate)
    tokens, labels = recall(np.random.default_rng(1), 64, arguments.pairs, model)
    said = decoded(w, tokens, 2 * arguments.pairs, model)[:, ::2].argmax(axis=-1)
    print(f"{np.mean(said == labels[:, 2 * arguments.pairs :: 2]):.1%} of the values are recalled, token by token")


if __name__ == "__main__":
    main()
