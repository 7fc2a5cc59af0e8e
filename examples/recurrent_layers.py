"""The recurrent layers of Qwen3-Next, Kimi Linear, Mamba-2 and RWKV-7, for training, prefill and decoding.

A layer is a frozen dataclass with the fields of its model's configuration. Its weights are a dict with the names and
shapes that the model's checkpoints have, matrices ``[out, in]``, so that a checkpoint's arrays go in as they are:

    layer = GatedDeltaNet(hidden_size=2048, ...)
    out, state = layer(weights, x)  # rows of whole sequences
    out, states = layer(weights, x, cum_seqlens=boundaries)  # prompts packed into one row
    out, pool = layer(weights, x, pool, slots)  # up to eight tokens more of the sequences in these slots

The states that a call returns go into the slots of a pool as they are.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tilewright.modules import (
    causal_conv1d,
    causal_conv1d_step,
    gated_delta_rule,
    gated_delta_rule_step,
    kimi_delta_attention,
    kimi_delta_attention_step,
    layer_norm,
    rms_norm,
    rwkv7,
    rwkv7_step,
    ssd,
    ssd_step,
)

type Arrays = dict[str, jax.Array]


class State(NamedTuple):
    """What a layer keeps of each sequence, whatever its length; as a pool, of each slot. None where it keeps nothing.

    Attributes:
      inputs: the last ones of the convolution or of the token shift, ``[sequences, channels, width - 1]``.
      memory: of the recurrence, ``[sequences, heads, key_dim, value_dim]`` float32; of Mamba-2
        ``[sequences, heads, head_dim, state_dim]``.
    """

    inputs: jax.Array | None
    memory: jax.Array | None


def pool_of(states: Any, slots: jax.Array, size: int) -> Any:
    """Pools of ``size`` slots, zeros but for these states, which a prefill returned."""
    return jax.tree.map(lambda each: jnp.zeros((size, *each.shape[1:]), each.dtype).at[slots].set(each), states)


def linear(w: Arrays, name: str, x: jax.Array) -> jax.Array:
    return x @ w[f"{name}.weight"].T.astype(x.dtype)


def heads_of(x: jax.Array, head_dim: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], -1, head_dim)


def flat(x: jax.Array) -> jax.Array:
    """``[batch, length, heads, head_dim]`` with the heads beside each other."""
    return x.reshape(*x.shape[:2], -1)


def matrices(random: jax.Array, **shapes: tuple[int, int]) -> Arrays:
    """Normal matrices ``[out, in]`` with variances of ``1 / in``."""
    keys = jax.random.split(random, len(shapes))
    drawn = zip(keys, shapes.items(), strict=True)
    return {f"{name}.weight": jax.random.normal(each, shape) * shape[1] ** -0.5 for each, (name, shape) in drawn}


def step_biases(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Of which the softplus is a step between 0.001 and 0.1, evenly in its logarithm."""
    steps = jnp.exp(jax.random.uniform(key, shape, minval=jnp.log(0.001), maxval=jnp.log(0.1)))
    return jnp.log(jnp.expm1(steps))


def run(
    whole: Callable[..., Any],
    step: Callable[..., Any],
    kept: Any,
    slots: jax.Array | None,
    sequences: Any,
    **arguments: Any,
) -> tuple[jax.Array, Any]:
    """An op over whole sequences, or its step over a few tokens more; and what the next tokens need of these."""
    if slots is not None:
        return step(**arguments, state_pool=kept, state_indices=slots)
    if "segment_ids" in sequences:  # Any number of sequences: they have no states.
        return whole(**arguments, **sequences), None
    return whole(**arguments, initial_state=kept, return_state=True, **sequences)


def convolved(
    x: jax.Array, weight: jax.Array, state: State | None, slots: jax.Array | None, sequences: Any, **options: Any
) -> tuple[jax.Array, Any]:
    """The convolution by a checkpoint's weight, ``[channels, 1, width]``, as ``run`` does it."""

    def step(state_pool: Any, **arguments: Any) -> tuple[jax.Array, jax.Array]:
        return causal_conv1d_step(conv_pool=state_pool, **arguments)

    kept = None if state is None else state.inputs
    return run(causal_conv1d, step, kept, slots, sequences, x=x, weight=weight[:, 0], **options)


def recurrence(
    whole: Callable[..., Any],
    step: Callable[..., Any],
    state: State | None,
    slots: jax.Array | None,
    sequences: Any,
    **arguments: Any,
) -> tuple[jax.Array, Any]:
    return run(whole, step, None if state is None else state.memory, slots, sequences, **arguments)


@dataclasses.dataclass(frozen=True)
class GatedDeltaNet:
    """The gated delta rule as in Qwen3-Next, ``linear_attn`` in its checkpoints.

    One projection gives each key head its query, its key, and the values and output gates of its value heads; another
    the raw gates of these value heads. The fields are those of the model's configuration.
    """

    hidden_size: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-6

    def parameters(self, key: jax.Array) -> Arrays:
        keys = jax.random.split(key, 4)
        value_heads, value_dim = self.linear_num_value_heads, self.linear_value_head_dim
        of_keys, of_values = self.linear_num_key_heads * self.linear_key_head_dim, value_heads * value_dim
        channels, d = 2 * of_keys + of_values, self.hidden_size
        taps = jax.random.normal(keys[1], (channels, 1, self.linear_conv_kernel_dim))
        return {
            **matrices(
                keys[0],
                in_proj_qkvz=(channels + of_values, d),
                in_proj_ba=(2 * value_heads, d),
                out_proj=(d, of_values),
            ),
            "conv1d.weight": taps * self.linear_conv_kernel_dim**-0.5,
            "A_log": jnp.log(jax.random.uniform(keys[2], (value_heads,), minval=0.1, maxval=16.0)),
            "dt_bias": step_biases(keys[3], (value_heads,)),
            "norm.weight": jnp.ones(value_dim),
        }

    def __call__(
        self, w: Arrays, x: jax.Array, state: State | None = None, slots: jax.Array | None = None, **sequences: Any
    ) -> tuple[jax.Array, State]:
        heads, key_dim, value_dim = self.linear_num_key_heads, self.linear_key_head_dim, self.linear_value_head_dim
        group = self.linear_num_value_heads // heads
        projected = linear(w, "in_proj_qkvz", x).reshape(*x.shape[:2], heads, -1)
        *mixed, z = jnp.split(projected, (key_dim, 2 * key_dim, 2 * key_dim + group * value_dim), axis=-1)
        b, a = jnp.split(linear(w, "in_proj_ba", x).reshape(*x.shape[:2], heads, -1), 2, axis=-1)
        channels = jnp.concatenate([flat(each) for each in mixed], axis=-1)
        channels, inputs = convolved(channels, w["conv1d.weight"], state, slots, sequences, activation="silu")
        q, k, v = jnp.split(channels, (heads * key_dim, 2 * heads * key_dim), axis=-1)
        out, memory = recurrence(
            gated_delta_rule, gated_delta_rule_step, state, slots, sequences,
            q=heads_of(q, key_dim), k=heads_of(k, key_dim), v=heads_of(v, value_dim), a=flat(a), b=flat(b),
            A_log=w["A_log"], dt_bias=w["dt_bias"], qk_l2norm=True,
        )  # fmt: skip
        gate = jax.nn.silu(z.reshape(out.shape).astype(jnp.float32))
        out = (rms_norm(out, w["norm.weight"], eps=self.rms_norm_eps) * gate).astype(x.dtype)
        return linear(w, "out_proj", flat(out)), State(inputs, memory)


@dataclasses.dataclass(frozen=True)
class KimiDeltaAttention:
    """Kimi delta attention, ``self_attn`` of its layers in the checkpoints of Kimi Linear.

    The decays of the channels and the output gate are of low rank. The fields are those of ``linear_attn_config``.

    Attributes:
      lower_bound: of the log decay, as in fla's layer with ``safe_gate``; none in Kimi Linear 48B.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    short_conv_kernel_size: int = 4
    rms_norm_eps: float = 1e-5
    lower_bound: float | None = None

    def parameters(self, key: jax.Array) -> Arrays:
        keys = jax.random.split(key, 4)
        d, head, channels = self.hidden_size, self.head_dim, self.num_heads * self.head_dim
        taps = jax.random.normal(keys[1], (3, channels, 1, self.short_conv_kernel_size))
        names = ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")
        return {
            **matrices(
                keys[0],
                q_proj=(channels, d), k_proj=(channels, d), v_proj=(channels, d), o_proj=(d, channels),
                b_proj=(self.num_heads, d),
                f_a_proj=(head, d), f_b_proj=(channels, head), g_a_proj=(head, d), g_b_proj=(channels, head),
            ),
            **dict(zip(names, taps * self.short_conv_kernel_size**-0.5, strict=True)),
            "A_log": jnp.log(jax.random.uniform(keys[2], (1, 1, self.num_heads, 1), minval=1.0, maxval=16.0)),
            "dt_bias": step_biases(keys[3], (channels,)),
            "o_norm.weight": jnp.ones(head),
        }  # fmt: skip

    def __call__(
        self, w: Arrays, x: jax.Array, state: State | None = None, slots: jax.Array | None = None, **sequences: Any
    ) -> tuple[jax.Array, State]:
        split = functools.partial(heads_of, head_dim=self.head_dim)
        channels = jnp.concatenate([linear(w, f"{name}_proj", x) for name in "qkv"], axis=-1)
        taps = jnp.concatenate([w[f"{name}_conv1d.weight"] for name in "qkv"])
        channels, inputs = convolved(channels, taps, state, slots, sequences, activation="silu")
        q, k, v = (split(each) for each in jnp.split(channels, 3, axis=-1))
        out, memory = recurrence(
            kimi_delta_attention, kimi_delta_attention_step, state, slots, sequences,
            q=q, k=k, v=v, a=split(linear(w, "f_b_proj", linear(w, "f_a_proj", x))), b=linear(w, "b_proj", x),
            A_log=w["A_log"].reshape(-1), dt_bias=w["dt_bias"], lower_bound=self.lower_bound, qk_l2norm=True,
        )  # fmt: skip
        gate = jax.nn.sigmoid(split(linear(w, "g_b_proj", linear(w, "g_a_proj", x))).astype(jnp.float32))
        out = (rms_norm(out, w["o_norm.weight"], eps=self.rms_norm_eps) * gate).astype(x.dtype)
        return linear(w, "o_proj", flat(out)), State(inputs, memory)


@dataclasses.dataclass(frozen=True)
class Mamba2:
    """The layer of Mamba-2, ``mixer`` in its checkpoints of Hugging Face.

    One projection gives the output gate, the channels that are convolved (x, and B and C of each group) and the step
    sizes of the heads. The fields are those of the model's configuration.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    state_size: int
    n_groups: int = 1
    conv_kernel: int = 4
    layer_norm_epsilon: float = 1e-5
    time_step_limit: tuple[float, float] = (0.0, float("inf"))

    def parameters(self, key: jax.Array) -> Arrays:
        keys = jax.random.split(key, 4)
        d, inner = self.hidden_size, self.num_heads * self.head_dim
        channels = inner + 2 * self.n_groups * self.state_size
        taps = jax.random.normal(keys[1], (channels, 1, self.conv_kernel))
        return {
            **matrices(keys[0], in_proj=(inner + channels + self.num_heads, d), out_proj=(d, inner)),
            "conv1d.weight": taps * self.conv_kernel**-0.5,
            "conv1d.bias": jnp.zeros(channels),
            "A_log": jnp.log(jax.random.uniform(keys[2], (self.num_heads,), minval=1.0, maxval=16.0)),
            "dt_bias": step_biases(keys[3], (self.num_heads,)),
            "D": jnp.ones(self.num_heads),
            "norm.weight": jnp.ones(inner),
        }

    def __call__(
        self, w: Arrays, x: jax.Array, state: State | None = None, slots: jax.Array | None = None, **sequences: Any
    ) -> tuple[jax.Array, State]:
        inner, of_groups = self.num_heads * self.head_dim, self.n_groups * self.state_size
        z, channels, dt = jnp.split(linear(w, "in_proj", x), (inner, 2 * (inner + of_groups)), axis=-1)
        channels, inputs = convolved(
            channels, w["conv1d.weight"], state, slots, sequences, bias=w["conv1d.bias"], activation="silu"
        )
        values, B, C = jnp.split(channels, (inner, inner + of_groups), axis=-1)
        out, memory = recurrence(
            ssd, ssd_step, state, slots, sequences,
            x=heads_of(values, self.head_dim), dt=dt, A=-jnp.exp(w["A_log"].astype(jnp.float32)),
            B=heads_of(B, self.state_size), C=heads_of(C, self.state_size), D=w["D"], z=heads_of(z, self.head_dim),
            dt_bias=w["dt_bias"], dt_softplus=True, dt_limit=self.time_step_limit,
        )  # fmt: skip
        normed = flat(rms_norm(flat(out).reshape(*x.shape[:2], self.n_groups, -1), eps=self.layer_norm_epsilon))
        return linear(w, "out_proj", normed * w["norm.weight"].astype(x.dtype)), State(inputs, memory)


def shifted(x: jax.Array, state: State | None, slots: jax.Array | None, sequences: Any) -> tuple[jax.Array, Any]:
    """The token before each, less the token: a convolution with two taps, so that it knows packed rows and pools."""
    taps = jnp.broadcast_to(jnp.array([1.0, -1.0], x.dtype), (x.shape[-1], 1, 2))
    return convolved(x, taps, state, slots, sequences)


@dataclasses.dataclass(frozen=True)
class RWKV7:
    """The time mixing of RWKV-7, ``attn`` in its checkpoints of Hugging Face.

    Decays, learning rates, output gates, and the share of the first layer's values are each of low rank. In the first
    layer of a model ``value_first`` is None and there is no ``v_lora``. The fields are those of the configuration.
    """

    hidden_size: int
    head_dim: int = 64
    decay_low_rank_dim: int = 64
    a_low_rank_dim: int = 64
    v_low_rank_dim: int = 32
    gate_low_rank_dim: int = 128
    norm_eps: float = 1e-5

    def parameters(self, key: jax.Array, first: bool = False) -> Arrays:
        keys = jax.random.split(key, 3)
        d, at = self.hidden_size, jnp.arange(self.hidden_size) / max(self.hidden_size - 1, 1)
        ranks = {"w": self.decay_low_rank_dim, "a": self.a_low_rank_dim, "g": self.gate_low_rank_dim}
        ranks |= {} if first else {"v": self.v_low_rank_dim}
        down = {f"{name}_lora.lora.0": (rank, d) for name, rank in ranks.items()}
        up = {f"{name}_lora.lora.2": (d, rank) for name, rank in ranks.items()}
        biases = {"w": -6.0 + 6.0 * at**1.5 + 0.5, "a": jnp.full(d, -0.19), "v": jnp.full(d, 0.73)}
        projections = dict.fromkeys(("r_proj", "k_proj", "v_proj", "o_proj"), (d, d))
        return {
            **matrices(keys[0], **projections, **up),
            **{name: 0.1 * each for name, each in matrices(keys[1], **down).items()},
            **{f"{name}_lora.lora.2.bias": biases[name] for name in ranks if name != "g"},
            **{f"x_{name}": (1 - at ** (0.2 if name in "rg" else 0.8))[None, None] for name in "rwkvag"},
            "k_k": jnp.full(d, 0.71),
            "k_a": jnp.full(d, 1.02),
            "r_k": jnp.full((d // self.head_dim, self.head_dim), -0.04),
            "g_norm.weight": jnp.ones(d),
            "g_norm.bias": jnp.zeros(d),
        }

    def __call__(
        self,
        w: Arrays,
        x: jax.Array,
        state: State | None = None,
        slots: jax.Array | None = None,
        *,
        value_first: jax.Array | None = None,
        **sequences: Any,
    ) -> tuple[jax.Array, State, jax.Array]:
        """Also returns the ``value_first`` of the layers above."""
        split = functools.partial(heads_of, head_dim=self.head_dim)
        delta, inputs = shifted(x, state, slots, sequences)
        of_r, of_w, of_k, of_v, of_a, of_g = (x + delta * w[f"x_{name}"].astype(x.dtype) for name in "rwkvag")

        def low_rank(name: str, x: jax.Array, inside: Callable[[jax.Array], jax.Array] = lambda x: x) -> jax.Array:
            """In float32 behind the second matrix, where it gets its bias."""
            found = linear(w, f"{name}_lora.lora.2", inside(linear(w, f"{name}_lora.lora.0", x))).astype(jnp.float32)
            return found if name == "g" else found + w[f"{name}_lora.lora.2.bias"].astype(jnp.float32)

        r, k, v = linear(w, "r_proj", of_r), linear(w, "k_proj", of_k), linear(w, "v_proj", of_v)
        log_decay = -jnp.exp(-0.5) * jax.nn.sigmoid(low_rank("w", of_w, jnp.tanh))
        rate = jax.nn.sigmoid(low_rank("a", of_a))
        gate = low_rank("g", of_g, jax.nn.sigmoid)
        if value_first is None:
            value_first = v
        else:
            v = (v + (value_first - v) * jax.nn.sigmoid(low_rank("v", of_v))).astype(x.dtype)
        removed = split((k * w["k_k"]).astype(jnp.float32))
        removed *= jax.lax.rsqrt(jnp.sum(removed**2, axis=-1, keepdims=True) + 1e-12)
        k = (k * (1 + (rate - 1) * w["k_a"])).astype(x.dtype)
        r, k, v = split(r), split(k), split(v)
        out, memory = recurrence(
            rwkv7, rwkv7_step, state, slots, sequences,
            r=r, w=split(log_decay), k=k, v=v, a=-removed, b=removed * split(rate),
        )  # fmt: skip
        normed = flat(layer_norm(out.astype(jnp.float32), eps=self.head_dim * self.norm_eps))
        bonus = jnp.sum(r * k * w["r_k"], axis=-1, keepdims=True) * v
        found = (normed * w["g_norm.weight"] + w["g_norm.bias"] + flat(bonus)) * gate
        return linear(w, "o_proj", found.astype(x.dtype)), State(inputs, memory), value_first


@dataclasses.dataclass(frozen=True)
class RWKV7ChannelMix:
    """The layer between the time mixings of RWKV-7, ``ffn`` in its checkpoints; its state is the last token."""

    hidden_size: int
    intermediate_size: int

    def parameters(self, key: jax.Array) -> Arrays:
        d, hidden = self.hidden_size, self.intermediate_size
        return {**matrices(key, key=(hidden, d), value=(d, hidden)), "x_k": 1 - jnp.arange(d) / d}

    def __call__(
        self, w: Arrays, x: jax.Array, state: State | None = None, slots: jax.Array | None = None, **sequences: Any
    ) -> tuple[jax.Array, State]:
        delta, inputs = shifted(x, state, slots, sequences)
        hidden = jax.nn.relu(linear(w, "key", x + delta * w["x_k"].astype(x.dtype))) ** 2
        return linear(w, "value", hidden), State(inputs, None)
