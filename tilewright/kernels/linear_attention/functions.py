"""Linear attention and state-space models by their own names, with the arguments of the libraries they come from."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tilewright.kernels.linear_attention.gates import delta_rule_gates, step_sizes
from tilewright.kernels.linear_attention.named import TOKENS, DeltaOptions, Dims, SequenceOptions, named_function
from tilewright.kernels.linear_attention.op import linear_attention
from tilewright.kernels.op.arguments import as_array, flag
from tilewright.kernels.sequences import without_padding


@named_function
def gated_delta_rule(
    dims: Dims,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    scale: float | None = None,
    initial_state: ArrayLike | None = None,
    *,
    return_state: bool = False,
    a: ArrayLike | None = None,
    b: ArrayLike | None = None,
    A_log: ArrayLike | None = None,
    dt_bias: ArrayLike | None = None,
    allow_neg_eigval: bool = False,
    **options: Unpack[DeltaOptions],
) -> Any:
    """The gated delta rule (Yang et al., "Gated Delta Networks", arXiv 2412.06464), as in Qwen3-Next and Qwen3.5.

    For each token ``S ← e^g (I − beta k kᵀ) S + beta k vᵀ``, then ``out = scale Sᵀ q``.

    The gates are given, or computed in float32 from what the projections of a layer give:
    ``g = −exp(A_log) softplus(a + dt_bias)`` and ``beta = sigmoid(b)``.

    Args:
      q: ``[batch, length, heads, key_dim]``.
      k: ``[batch, length, heads, key_dim]``; of norm 1, or with ``qk_l2norm``.
      v: ``[batch, length, value_heads, value_dim]``; ``heads`` divides ``value_heads``, and value head i has key head
        ``i // (value_heads / heads)``.
      g: ``[batch, length, value_heads]``: the natural log of the decay, 0 at most.
      beta: ``[batch, length, value_heads]``: the strength of a write.
      scale: ``key_dim ** -0.5`` by default.
      initial_state: ``[sequences, value_heads, key_dim, value_dim]`` float32, zeros by default.
      return_state: also return the state after the last token of each sequence.
      a: ``[batch, length, value_heads]``, in place of g.
      b: ``[batch, length, value_heads]``, in place of beta.
      A_log: ``[value_heads]``, with a.
      dt_bias: ``[value_heads]``, with a; 0 by default.
      allow_neg_eigval: beta is ``2 sigmoid(b)``.

    Returns:
      ``[batch, length, value_heads, value_dim]`` in v's dtype, with the state, as ``initial_state``, if asked for.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call.
    """
    q, k, v = dims.rows(q, k, v)
    decay, strength = delta_rule_gates(
        dims, TOKENS, gate_dtype(v), dims.sequence_ids(options),
        per_channel=False, g=g, beta=beta, a=a, b=b, A_log=A_log, dt_bias=dt_bias, allow_neg_eigval=allow_neg_eigval,
    )  # fmt: skip
    return linear_attention(
        q, k, v, log_decay=decay, beta=strength, scale=scale, initial_state=initial_state, return_state=return_state,
        **options,
    )  # fmt: skip


@named_function
def kimi_delta_attention(
    dims: Dims,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    scale: float | None = None,
    initial_state: ArrayLike | None = None,
    *,
    return_state: bool = False,
    a: ArrayLike | None = None,
    b: ArrayLike | None = None,
    A_log: ArrayLike | None = None,
    dt_bias: ArrayLike | None = None,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
    **options: Unpack[DeltaOptions],
) -> Any:
    """Kimi delta attention ("Kimi Linear", arXiv 2510.26692): the gated delta rule with a decay for each key channel.

    For each token ``S ← (I − beta k kᵀ) Diag(e^g) S + beta k vᵀ``, then ``out = scale Sᵀ q``.

    The gates are given, or computed in float32 from what the projections of a layer give:
    ``g = −exp(A_log) softplus(a + dt_bias)``, or ``lower_bound sigmoid(exp(A_log) (a + dt_bias))``, and
    ``beta = sigmoid(b)``.

    Args:
      q: ``[batch, length, heads, key_dim]``.
      k: ``[batch, length, heads, key_dim]``; of norm 1, or with ``qk_l2norm``.
      v: ``[batch, length, value_heads, value_dim]``; ``heads`` divides ``value_heads``, as for ``gated_delta_rule``.
      g: ``[batch, length, value_heads, key_dim]``: the natural log of the decay, 0 at most.
      beta: ``[batch, length, value_heads]``: the strength of a write.
      scale: ``key_dim ** -0.5`` by default.
      initial_state: ``[sequences, value_heads, key_dim, value_dim]`` float32, zeros by default.
      return_state: also return the state after the last token of each sequence.
      a: ``[batch, length, value_heads, key_dim]``, in place of g.
      b: ``[batch, length, value_heads]``, in place of beta.
      A_log: ``[value_heads]``, with a.
      dt_bias: ``[value_heads, key_dim]`` or ``[value_heads · key_dim]``, with a; 0 by default.
      lower_bound: in [−5, 0), with a: the least log decay.
      allow_neg_eigval: beta is ``2 sigmoid(b)``.

    Returns:
      ``[batch, length, value_heads, value_dim]`` in v's dtype, with the state, as ``initial_state``, if asked for.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call.
    """
    q, k, v = dims.rows(q, k, v)
    decay, strength = delta_rule_gates(
        dims, TOKENS, gate_dtype(v), dims.sequence_ids(options),
        per_channel=True, g=g, beta=beta, a=a, b=b, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
        allow_neg_eigval=allow_neg_eigval,
    )  # fmt: skip
    return linear_attention(
        q, k, v, log_decay=decay, beta=strength, scale=scale, initial_state=initial_state, return_state=return_state,
        **options,
    )  # fmt: skip


@named_function
def delta_rule(
    dims: Dims,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    beta: ArrayLike,
    scale: float | None = None,
    initial_state: ArrayLike | None = None,
    *,
    return_state: bool = False,
    **options: Unpack[DeltaOptions],
) -> Any:
    """The delta rule without a decay (DeltaNet, arXiv 2406.06484): ``S ← (I − beta k kᵀ) S + beta k vᵀ``.

    Args:
      q: ``[batch, length, heads, key_dim]``.
      k: ``[batch, length, heads, key_dim]``; of norm 1, or with ``qk_l2norm``.
      v: ``[batch, length, value_heads, value_dim]``; ``heads`` divides ``value_heads``, as for ``gated_delta_rule``.
      beta: ``[batch, length, value_heads]``: the strength of a write, in (0, 1), or (0, 2) where a model says so.
      scale: ``key_dim ** -0.5`` by default.
      initial_state: ``[sequences, value_heads, key_dim, value_dim]`` float32, zeros by default.
      return_state: also return the state after the last token of each sequence.

    Returns:
      ``[batch, length, value_heads, value_dim]`` in v's dtype, with the state, as ``initial_state``, if asked for.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call.
    """
    q, k, v = dims.rows(q, k, v)
    strength = dims.array("beta", beta, f"{TOKENS} value_heads")
    return linear_attention(
        q, k, v, beta=strength, scale=scale, initial_state=initial_state, return_state=return_state, **options
    )


@named_function
def gated_linear_attention(
    dims: Dims,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike,
    scale: float | None = None,
    initial_state: ArrayLike | None = None,
    *,
    return_state: bool = False,
    **options: Unpack[SequenceOptions],
) -> Any:
    """Gated linear attention (GLA, arXiv 2312.06635): ``S ← Diag(e^g) S + k vᵀ``, then ``out = scale Sᵀ q``.

    HGRN-2 is this with ``k = 1 − e^g``.

    Args:
      q: ``[batch, length, heads, key_dim]``.
      k: ``[batch, length, heads, key_dim]``.
      v: ``[batch, length, value_heads, value_dim]``; ``heads`` divides ``value_heads``, as for ``gated_delta_rule``.
      g: ``[batch, length, value_heads, key_dim]``: the natural log of the decay, 0 at most.
      scale: ``key_dim ** -0.5`` by default.
      initial_state: ``[sequences, value_heads, key_dim, value_dim]`` float32, zeros by default.
      return_state: also return the state after the last token of each sequence.

    Returns:
      ``[batch, length, value_heads, value_dim]`` in v's dtype, with the state, as ``initial_state``, if asked for.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call.
    """
    q, k, v = dims.rows(q, k, v)
    decay = dims.array("g", g, f"{TOKENS} value_heads key_dim")
    return linear_attention(
        q, k, v, log_decay=decay, scale=scale, initial_state=initial_state, return_state=return_state, **options
    )


@named_function
def retention(
    dims: Dims,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    scale: float | None = None,
    initial_state: ArrayLike | None = None,
    *,
    return_state: bool = False,
    slopes: ArrayLike | None = None,
    **options: Unpack[SequenceOptions],
) -> Any:
    """Retention (RetNet, arXiv 2307.08621): ``S ← e^−slope S + k vᵀ``, then ``out = scale Sᵀ q``.

    Args:
      q: ``[batch, length, heads, key_dim]``.
      k: ``[batch, length, heads, key_dim]``.
      v: ``[batch, length, value_heads, value_dim]``; ``heads`` divides ``value_heads``, as for ``gated_delta_rule``.
      scale: ``key_dim ** -0.5`` by default.
      initial_state: ``[sequences, value_heads, key_dim, value_dim]`` float32, zeros by default.
      return_state: also return the state after the last token of each sequence.
      slopes: ``[value_heads]``, 0 at least; by default the decay of head i is ``1 − 2^(−5 − i)``, as in the paper.

    Returns:
      ``[batch, length, value_heads, value_dim]`` in v's dtype, with the state, as ``initial_state``, if asked for.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call.
    """
    q, k, v = dims.rows(q, k, v)
    decay = constant_decay(dims, retention_slopes(dims) if slopes is None else slopes, v)
    return linear_attention(
        q, k, v, log_decay=decay, scale=scale, initial_state=initial_state, return_state=return_state, **options
    )


@named_function
def lightning_attention(
    dims: Dims,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    slopes: ArrayLike,
    scale: float = 1.0,
    initial_state: ArrayLike | None = None,
    *,
    return_state: bool = False,
    **options: Unpack[SequenceOptions],
) -> Any:
    """Lightning attention (arXiv 2405.17381), as in MiniMax-Text-01: ``S ← e^−slope S + k vᵀ``, ``out = scale Sᵀ q``.

    Args:
      q: ``[batch, length, heads, key_dim]``.
      k: ``[batch, length, heads, key_dim]``.
      v: ``[batch, length, value_heads, value_dim]``; ``heads`` divides ``value_heads``, as for ``gated_delta_rule``.
      slopes: ``[value_heads]``, 0 at least: those of this layer.
      scale: 1, as in the models.
      initial_state: ``[sequences, value_heads, key_dim, value_dim]`` float32, zeros by default.
      return_state: also return the state after the last token of each sequence.

    Returns:
      ``[batch, length, value_heads, value_dim]`` in v's dtype, with the state, as ``initial_state``, if asked for.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call.
    """
    q, k, v = dims.rows(q, k, v)
    decay = constant_decay(dims, slopes, v)
    return linear_attention(
        q, k, v, log_decay=decay, scale=scale, initial_state=initial_state, return_state=return_state, **options
    )


@named_function
def rwkv6(
    dims: Dims,
    r: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    w: ArrayLike,
    u: ArrayLike,
    scale: float | None = None,
    initial_state: ArrayLike | None = None,
    *,
    return_state: bool = False,
    **options: Unpack[SequenceOptions],
) -> Any:
    """The time mixing of RWKV-6 (arXiv 2404.05892), which reads before it writes.

    For each token ``out = scale (S + Diag(u) k vᵀ)ᵀ r``, then ``S ← Diag(e^w) S + k vᵀ``.

    Args:
      r: ``[batch, length, heads, key_dim]``.
      k: ``[batch, length, heads, key_dim]``.
      v: ``[batch, length, value_heads, value_dim]``; ``heads`` divides ``value_heads``, as for ``gated_delta_rule``.
      w: ``[batch, length, value_heads, key_dim]``: the natural log of the decay, 0 at most. Where a model's code has
        ``exp(−exp(w))`` this is ``−exp(w)``.
      u: ``[value_heads, key_dim]``: the bonus of the token itself.
      scale: ``key_dim ** -0.5`` by default, as in flash-linear-attention; the models have 1.
      initial_state: ``[sequences, value_heads, key_dim, value_dim]`` float32, zeros by default.
      return_state: also return the state after the last token of each sequence.

    Returns:
      ``[batch, length, value_heads, value_dim]`` in v's dtype, with the state, as ``initial_state``, if asked for.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call.
    """
    r, k, v = dims.rows(r, k, v, "r k v")
    decay = dims.array("w", w, f"{TOKENS} value_heads key_dim")
    bonus = dims.array("u", u, "value_heads key_dim")
    return linear_attention(
        r, k, v, log_decay=decay, bonus=bonus, scale=scale, initial_state=initial_state, return_state=return_state,
        **options,
    )  # fmt: skip


@named_function
def rwkv7(
    dims: Dims,
    r: ArrayLike,
    w: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    a: ArrayLike,
    b: ArrayLike,
    scale: float = 1.0,
    initial_state: ArrayLike | None = None,
    *,
    return_state: bool = False,
    **options: Unpack[SequenceOptions],
) -> Any:
    """The time mixing of RWKV-7 (arXiv 2503.14456): ``S ← Diag(e^w) S + b (aᵀ S) + k vᵀ``, then ``out = scale Sᵀ r``.

    Args:
      r: ``[batch, length, heads, key_dim]``.
      w: ``[batch, length, value_heads, key_dim]``: the natural log of the decay, which the models keep above −0.6065.
      k: ``[batch, length, heads, key_dim]``.
      v: ``[batch, length, value_heads, value_dim]``; ``heads`` divides ``value_heads``, as for ``gated_delta_rule``.
      a: ``[batch, length, value_heads, key_dim]``: in the models −κ̂, the removal key of norm 1.
      b: ``[batch, length, value_heads, key_dim]``: in the models κ̂ times the in-context learning rate.
      scale: 1, as in the models.
      initial_state: ``[sequences, value_heads, key_dim, value_dim]`` float32, zeros by default.
      return_state: also return the state after the last token of each sequence.

    Returns:
      ``[batch, length, value_heads, value_dim]`` in v's dtype, with the state, as ``initial_state``, if asked for.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call.
    """
    r, k, v = dims.rows(r, k, v, "r k v")
    decay, read, written = (
        dims.array(name, value, f"{TOKENS} value_heads key_dim") for name, value in (("w", w), ("a", a), ("b", b))
    )
    return linear_attention(
        r, k, v, log_decay=decay, removal=(read, written), scale=scale, initial_state=initial_state,
        return_state=return_state, **options,
    )  # fmt: skip


@named_function
def ssd(
    dims: Dims,
    x: ArrayLike,
    dt: ArrayLike,
    A: ArrayLike,
    B: ArrayLike,
    C: ArrayLike,
    *,
    D: ArrayLike | None = None,
    z: ArrayLike | None = None,
    dt_bias: ArrayLike | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] | None = None,
    initial_state: ArrayLike | None = None,
    return_state: bool = False,
    **options: Unpack[SequenceOptions],
) -> Any:
    """The state-space layer of Mamba-2 (SSD, arXiv 2405.21060), with the arguments and the state of mamba-ssm.

    With ``Δ = clip(softplus(dt + dt_bias))``, for each token ``h ← e^(Δ A) h + Δ x Bᵀ``, then ``y = h C + D x``, and
    ``y · silu(z)`` if z is given. The product Δ x is rounded to x's dtype once.

    Args:
      x: ``[batch, length, heads, head_dim]``.
      dt: ``[batch, length, heads]``: step sizes.
      A: ``[heads]``: rates, below 0.
      B: ``[batch, length, groups, state_dim]``; ``groups`` divides ``heads``.
      C: ``[batch, length, groups, state_dim]``.
      D: ``[heads]`` or ``[heads, head_dim]``: the skip.
      z: ``[batch, length, heads, head_dim]``: the gate of the output.
      dt_bias: ``[heads]``: added to dt.
      dt_softplus: step sizes are the softplus of that sum.
      dt_limit: the least and the greatest step size, which others are clipped to; ``(0, inf)`` by default.
      initial_state: ``[sequences, heads, head_dim, state_dim]`` float32, zeros by default.
      return_state: also return the state after the last token of each sequence.

    Returns:
      ``[batch, length, heads, head_dim]`` in x's dtype, with the state, as ``initial_state``, if asked for.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call.
    """
    x = dims.array("x", x, f"{TOKENS} heads head_dim")
    key = dims.array("B", B, f"{TOKENS} groups state_dim")
    query = dims.array("C", C, f"{TOKENS} groups state_dim")
    dims.multiple("x", "heads", "B", "groups")
    dims.same_dtype(x=x, B=key, C=query)
    dtype, ids = gate_dtype(x), dims.sequence_ids(options)
    sizes = step_sizes(
        dims, f"{TOKENS} heads", dtype, ids, dt=dt, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit
    )
    decay = sizes * dims.array("A", A, "heads").astype(dtype)
    skip = None if D is None else dims.array("D", D, "heads" if as_array("D", D).ndim == 1 else "heads head_dim")
    gate = None if z is None else without_padding(dims.array("z", z, f"{TOKENS} heads head_dim"), ids)
    if initial_state is not None:
        state = dims.array("initial_state", initial_state, "sequences heads head_dim state_dim")
        initial_state = jnp.swapaxes(state, 2, 3)
    wide = without_padding(x, ids).astype(dtype)
    found = linear_attention(
        query, key, (wide * sizes[..., None]).astype(x.dtype), log_decay=decay, scale=1.0,
        initial_state=initial_state, return_state=return_state, **options,
    )  # fmt: skip
    out, *states = found if flag("return_state", return_state) else (found,)
    if skip is not None or gate is not None:
        out = out.astype(dtype)
        if skip is not None:
            out += (skip if skip.ndim > 1 else skip[:, None]).astype(dtype) * wide
        if gate is not None:
            out *= jax.nn.silu(gate.astype(dtype))
        out = out.astype(x.dtype)
    return (out, jnp.swapaxes(states[0], 2, 3)) if states else out


def gate_dtype(value: jax.Array) -> Any:
    """The dtype in which gates are computed: float32, or float64 for float64 values."""
    return jnp.promote_types(value.dtype, jnp.float32)


def retention_slopes(dims: Dims) -> Any:
    """The slopes of the paper: the decay of head i is ``1 − 2^(−5 − i)``."""
    return -np.log1p(-np.exp2(-5.0 - np.arange(dims.sizes["value_heads"])))


def constant_decay(dims: Dims, slopes: ArrayLike, value: jax.Array) -> jax.Array:
    """The log decay of heads, ``[value_heads]``, by their slopes."""
    return -dims.array("slopes", slopes, "value_heads").astype(gate_dtype(value))
