"""Decoding steps of models by their own names, with the arguments of the functions of whole sequences."""

from typing import Annotated, Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tilewright.kernels.linear_attention.functions import constant_decay, gate_dtype, retention_slopes
from tilewright.kernels.linear_attention.gates import delta_rule_gates, step_sizes
from tilewright.kernels.linear_attention.named import Dims, named_step
from tilewright.kernels.linear_attention.step import linear_attention_step
from tilewright.kernels.linear_attention.step_inputs import StateLayout
from tilewright.kernels.op.arguments import PlatformOption, as_array
from tilewright.kernels.op.public import Default
from tilewright.kernels.state_pools import exists


class SlotOptions(TypedDict, total=False):
    """The slots of a step, and what runs it.

    Args:
      state_indices: ``[batch]`` integers, the slot of each row's state; a row without one, such as of -1, is padding.
      write_indices: ``[batch]`` integers: where the new states are written, by default the slots that were read.
      platform: as for ``linear_attention_step``.
      cfg: a config to use instead of the selected one.
    """

    state_indices: ArrayLike | None
    write_indices: ArrayLike | None
    platform: PlatformOption
    cfg: Any


class StepOptions(SlotOptions, total=False):
    """The layout of the pool beside its slots.

    Args:
      state_layout: "vk" for a pool ``[slots, value_heads, value_dim, key_dim]``.
    """

    state_layout: Annotated[StateLayout, Default("kv")]


class DeltaStepOptions(StepOptions, total=False):
    """Options of delta rules, whose keys should have a norm of 1.

    Args:
      qk_l2norm: divide q and k by their norms along the last dimension, in float32.
      l2norm_eps: what is added to the sum of squares.
    """

    qk_l2norm: bool
    l2norm_eps: Annotated[float, Default(1e-6)]


def _tokens(name: str, array: object) -> str:
    """The names of the dimensions before the heads."""
    return "batch tokens" if as_array(name, array).ndim == 4 else "batch"


@named_step
def gated_delta_rule_step(
    dims: Dims,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    scale: float | None = None,
    *,
    state_pool: ArrayLike,
    a: ArrayLike | None = None,
    b: ArrayLike | None = None,
    A_log: ArrayLike | None = None,
    dt_bias: ArrayLike | None = None,
    allow_neg_eigval: bool = False,
    **options: Unpack[DeltaStepOptions],
) -> Any:
    """A decoding step of ``gated_delta_rule``, as in Qwen3-Next and Qwen3.5.

    Args:
      q: ``[batch, (tokens,) heads, key_dim]``, of up to 8 tokens.
      k: ``[batch, (tokens,) heads, key_dim]``; of norm 1, or with ``qk_l2norm``.
      v: ``[batch, (tokens,) value_heads, value_dim]``; ``heads`` divides ``value_heads``.
      g: ``[batch, (tokens,) value_heads]``: the natural log of the decay, 0 at most.
      beta: ``[batch, (tokens,) value_heads]``: the strength of a write.
      scale: ``key_dim ** -0.5`` by default.
      state_pool: ``[slots, value_heads, key_dim, value_dim]``, as ``linear_attention_step`` takes it.
      a: ``[batch, (tokens,) value_heads]``, in place of g.
      b: ``[batch, (tokens,) value_heads]``, in place of beta.
      A_log: ``[value_heads]``, with a.
      dt_bias: ``[value_heads]``, with a; 0 by default.
      allow_neg_eigval: beta is ``2 sigmoid(b)``.

    Returns:
      ``[batch, (tokens,) value_heads, value_dim]`` in v's dtype, and the pool with new states.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call.
    """
    tokens = _tokens("q", q)
    q, k, v = dims.rows(q, k, v, tokens=tokens)
    decay, strength = delta_rule_gates(
        dims, tokens, gate_dtype(v),
        per_channel=False, g=g, beta=beta, a=a, b=b, A_log=A_log, dt_bias=dt_bias, allow_neg_eigval=allow_neg_eigval,
    )  # fmt: skip
    return linear_attention_step(q, k, v, state_pool, log_decay=decay, beta=strength, scale=scale, **options)


@named_step
def kimi_delta_attention_step(
    dims: Dims,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    scale: float | None = None,
    *,
    state_pool: ArrayLike,
    a: ArrayLike | None = None,
    b: ArrayLike | None = None,
    A_log: ArrayLike | None = None,
    dt_bias: ArrayLike | None = None,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
    **options: Unpack[DeltaStepOptions],
) -> Any:
    """A decoding step of ``kimi_delta_attention``.

    Args:
      q: ``[batch, (tokens,) heads, key_dim]``, of up to 8 tokens.
      k: ``[batch, (tokens,) heads, key_dim]``; of norm 1, or with ``qk_l2norm``.
      v: ``[batch, (tokens,) value_heads, value_dim]``; ``heads`` divides ``value_heads``.
      g: ``[batch, (tokens,) value_heads, key_dim]``: the natural log of the decay, 0 at most.
      beta: ``[batch, (tokens,) value_heads]``: the strength of a write.
      scale: ``key_dim ** -0.5`` by default.
      state_pool: ``[slots, value_heads, key_dim, value_dim]``, as ``linear_attention_step`` takes it.
      a: ``[batch, (tokens,) value_heads, key_dim]``, in place of g.
      b: ``[batch, (tokens,) value_heads]``, in place of beta.
      A_log: ``[value_heads]``, with a.
      dt_bias: ``[value_heads, key_dim]`` or ``[value_heads · key_dim]``, with a; 0 by default.
      lower_bound: in [−5, 0), with a: the least log decay.
      allow_neg_eigval: beta is ``2 sigmoid(b)``.

    Returns:
      ``[batch, (tokens,) value_heads, value_dim]`` in v's dtype, and the pool with new states.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call.
    """
    tokens = _tokens("q", q)
    q, k, v = dims.rows(q, k, v, tokens=tokens)
    decay, strength = delta_rule_gates(
        dims, tokens, gate_dtype(v),
        per_channel=True, g=g, beta=beta, a=a, b=b, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
        allow_neg_eigval=allow_neg_eigval,
    )  # fmt: skip
    return linear_attention_step(q, k, v, state_pool, log_decay=decay, beta=strength, scale=scale, **options)


@named_step
def delta_rule_step(
    dims: Dims,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    beta: ArrayLike,
    scale: float | None = None,
    *,
    state_pool: ArrayLike,
    **options: Unpack[DeltaStepOptions],
) -> Any:
    """A decoding step of ``delta_rule``.

    Args:
      q: ``[batch, (tokens,) heads, key_dim]``, of up to 8 tokens.
      k: ``[batch, (tokens,) heads, key_dim]``; of norm 1, or with ``qk_l2norm``.
      v: ``[batch, (tokens,) value_heads, value_dim]``; ``heads`` divides ``value_heads``.
      beta: ``[batch, (tokens,) value_heads]``: the strength of a write.
      scale: ``key_dim ** -0.5`` by default.
      state_pool: ``[slots, value_heads, key_dim, value_dim]``, as ``linear_attention_step`` takes it.

    Returns:
      ``[batch, (tokens,) value_heads, value_dim]`` in v's dtype, and the pool with new states.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call.
    """
    tokens = _tokens("q", q)
    q, k, v = dims.rows(q, k, v, tokens=tokens)
    strength = dims.array("beta", beta, f"{tokens} value_heads")
    return linear_attention_step(q, k, v, state_pool, beta=strength, scale=scale, **options)


@named_step
def gated_linear_attention_step(
    dims: Dims,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike,
    scale: float | None = None,
    *,
    state_pool: ArrayLike,
    **options: Unpack[StepOptions],
) -> Any:
    """A decoding step of ``gated_linear_attention``.

    Args:
      q: ``[batch, (tokens,) heads, key_dim]``, of up to 8 tokens.
      k: ``[batch, (tokens,) heads, key_dim]``.
      v: ``[batch, (tokens,) value_heads, value_dim]``; ``heads`` divides ``value_heads``.
      g: ``[batch, (tokens,) value_heads, key_dim]``: the natural log of the decay, 0 at most.
      scale: ``key_dim ** -0.5`` by default.
      state_pool: ``[slots, value_heads, key_dim, value_dim]``, as ``linear_attention_step`` takes it.

    Returns:
      ``[batch, (tokens,) value_heads, value_dim]`` in v's dtype, and the pool with new states.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call.
    """
    tokens = _tokens("q", q)
    q, k, v = dims.rows(q, k, v, tokens=tokens)
    decay = dims.array("g", g, f"{tokens} value_heads key_dim")
    return linear_attention_step(q, k, v, state_pool, log_decay=decay, scale=scale, **options)


@named_step
def retention_step(
    dims: Dims,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    scale: float | None = None,
    *,
    state_pool: ArrayLike,
    slopes: ArrayLike | None = None,
    **options: Unpack[StepOptions],
) -> Any:
    """A decoding step of ``retention``.

    Args:
      q: ``[batch, (tokens,) heads, key_dim]``, of up to 8 tokens.
      k: ``[batch, (tokens,) heads, key_dim]``.
      v: ``[batch, (tokens,) value_heads, value_dim]``; ``heads`` divides ``value_heads``.
      scale: ``key_dim ** -0.5`` by default.
      state_pool: ``[slots, value_heads, key_dim, value_dim]``, as ``linear_attention_step`` takes it.
      slopes: ``[value_heads]``, 0 at least; by default the decay of head i is ``1 − 2^(−5 − i)``.

    Returns:
      ``[batch, (tokens,) value_heads, value_dim]`` in v's dtype, and the pool with new states.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call.
    """
    q, k, v = dims.rows(q, k, v, tokens=_tokens("q", q))
    decay = constant_decay(dims, retention_slopes(dims) if slopes is None else slopes, v)
    return linear_attention_step(q, k, v, state_pool, log_decay=decay, scale=scale, **options)


@named_step
def lightning_attention_step(
    dims: Dims,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    slopes: ArrayLike,
    scale: float = 1.0,
    *,
    state_pool: ArrayLike,
    **options: Unpack[StepOptions],
) -> Any:
    """A decoding step of ``lightning_attention``.

    Args:
      q: ``[batch, (tokens,) heads, key_dim]``, of up to 8 tokens.
      k: ``[batch, (tokens,) heads, key_dim]``.
      v: ``[batch, (tokens,) value_heads, value_dim]``; ``heads`` divides ``value_heads``.
      slopes: ``[value_heads]``, 0 at least: those of this layer.
      scale: 1, as in the models.
      state_pool: ``[slots, value_heads, key_dim, value_dim]``, as ``linear_attention_step`` takes it.

    Returns:
      ``[batch, (tokens,) value_heads, value_dim]`` in v's dtype, and the pool with new states.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call.
    """
    q, k, v = dims.rows(q, k, v, tokens=_tokens("q", q))
    decay = constant_decay(dims, slopes, v)
    return linear_attention_step(q, k, v, state_pool, log_decay=decay, scale=scale, **options)


@named_step
def rwkv6_step(
    dims: Dims,
    r: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    w: ArrayLike,
    u: ArrayLike,
    scale: float | None = None,
    *,
    state_pool: ArrayLike,
    **options: Unpack[StepOptions],
) -> Any:
    """A decoding step of ``rwkv6``, which reads before it writes.

    Args:
      r: ``[batch, (tokens,) heads, key_dim]``, of up to 8 tokens.
      k: ``[batch, (tokens,) heads, key_dim]``.
      v: ``[batch, (tokens,) value_heads, value_dim]``; ``heads`` divides ``value_heads``.
      w: ``[batch, (tokens,) value_heads, key_dim]``: the natural log of the decay, 0 at most.
      u: ``[value_heads, key_dim]``: the bonus of the token itself.
      scale: ``key_dim ** -0.5`` by default; the models have 1.
      state_pool: ``[slots, value_heads, key_dim, value_dim]``, as ``linear_attention_step`` takes it.

    Returns:
      ``[batch, (tokens,) value_heads, value_dim]`` in v's dtype, and the pool with new states.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call.
    """
    tokens = _tokens("r", r)
    r, k, v = dims.rows(r, k, v, "r k v", tokens=tokens)
    decay = dims.array("w", w, f"{tokens} value_heads key_dim")
    bonus = dims.array("u", u, "value_heads key_dim")
    return linear_attention_step(r, k, v, state_pool, log_decay=decay, bonus=bonus, scale=scale, **options)


@named_step
def rwkv7_step(
    dims: Dims,
    r: ArrayLike,
    w: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    a: ArrayLike,
    b: ArrayLike,
    scale: float = 1.0,
    *,
    state_pool: ArrayLike,
    **options: Unpack[StepOptions],
) -> Any:
    """A decoding step of ``rwkv7``.

    Args:
      r: ``[batch, (tokens,) heads, key_dim]``, of up to 8 tokens.
      w: ``[batch, (tokens,) value_heads, key_dim]``: the natural log of the decay.
      k: ``[batch, (tokens,) heads, key_dim]``.
      v: ``[batch, (tokens,) value_heads, value_dim]``; ``heads`` divides ``value_heads``.
      a: ``[batch, (tokens,) value_heads, key_dim]``: in the models −κ̂, the removal key of norm 1.
      b: ``[batch, (tokens,) value_heads, key_dim]``: in the models κ̂ times the in-context learning rate.
      scale: 1, as in the models.
      state_pool: ``[slots, value_heads, key_dim, value_dim]``, as ``linear_attention_step`` takes it.

    Returns:
      ``[batch, (tokens,) value_heads, value_dim]`` in v's dtype, and the pool with new states.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call.
    """
    tokens = _tokens("r", r)
    r, k, v = dims.rows(r, k, v, "r k v", tokens=tokens)
    decay, read, written = (
        dims.array(name, value, f"{tokens} value_heads key_dim") for name, value in (("w", w), ("a", a), ("b", b))
    )
    return linear_attention_step(r, k, v, state_pool, log_decay=decay, removal=(read, written), scale=scale, **options)


@named_step
def ssd_step(
    dims: Dims,
    x: ArrayLike,
    dt: ArrayLike,
    A: ArrayLike,
    B: ArrayLike,
    C: ArrayLike,
    *,
    state_pool: ArrayLike,
    D: ArrayLike | None = None,
    z: ArrayLike | None = None,
    dt_bias: ArrayLike | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] | None = None,
    **options: Unpack[SlotOptions],
) -> Any:
    """A decoding step of ``ssd``, the layer of Mamba-2; all between x and the output is float32.

    Args:
      x: ``[batch, (tokens,) heads, head_dim]``, of up to 8 tokens.
      dt: ``[batch, (tokens,) heads]``: step sizes.
      A: ``[heads]``: rates, below 0.
      B: ``[batch, (tokens,) groups, state_dim]``; ``groups`` divides ``heads``.
      C: ``[batch, (tokens,) groups, state_dim]``.
      state_pool: ``[slots, heads, head_dim, state_dim]``, float32 or bfloat16; donated as in ``linear_attention_step``.
      D: ``[heads]`` or ``[heads, head_dim]``: the skip.
      z: ``[batch, (tokens,) heads, head_dim]``: the gate of the output.
      dt_bias: ``[heads]``: added to dt.
      dt_softplus: step sizes are the softplus of that sum.
      dt_limit: the least and the greatest step size, which others are clipped to; ``(0, inf)`` by default.

    Returns:
      ``[batch, (tokens,) heads, head_dim]`` in x's dtype, and the pool with new states.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call.
    """
    tokens = _tokens("x", x)
    x = dims.array("x", x, f"{tokens} heads head_dim")
    key = dims.array("B", B, f"{tokens} groups state_dim")
    query = dims.array("C", C, f"{tokens} groups state_dim")
    dims.multiple("x", "heads", "B", "groups")
    dtype, pool = gate_dtype(x), dims.array("state_pool", state_pool, "slots heads head_dim state_dim")
    sizes = step_sizes(
        dims, f"{tokens} heads", dtype, dt=dt, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit
    )
    decay = sizes * dims.array("A", A, "heads").astype(dtype)
    skip = None if D is None else dims.array("D", D, "heads" if as_array("D", D).ndim == 1 else "heads head_dim")
    gate = None if z is None else dims.array("z", z, f"{tokens} heads head_dim")
    query, key, wide = (array.astype(dtype) for array in (query, key, x))
    out, pool = linear_attention_step(
        query, key, wide * sizes[..., None], pool, log_decay=decay, scale=1.0, state_layout="vk", **options
    )
    if skip is not None:
        out += (skip if skip.ndim > 1 else skip[:, None]).astype(dtype) * wide
    if gate is not None:
        out *= jax.nn.silu(gate.astype(dtype))
    rows = options.get("state_indices")
    if rows is not None:
        has_state = exists(jnp.asarray(rows), dims.sizes["slots"])
        out = jnp.where(jnp.expand_dims(has_state, range(1, out.ndim)), out, 0)
    return out.astype(x.dtype), pool
