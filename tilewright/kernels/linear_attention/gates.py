"""Gates from what a model's projections give, computed in float32 or wider."""

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tilewright.kernels.linear_attention.named import Dims
from tilewright.kernels.op.arguments import as_array, flag, number, reshape
from tilewright.kernels.sequences import without_padding

MIN_LOWER_BOUND = -5.0
"""The log decay of a token is bounded by it in every model that bounds it: 16 tokens then stay in float32's range."""


def delta_rule_gates(
    dims: Dims,
    tokens: str,
    dtype: DTypeLike,
    ids: jax.Array | None = None,
    *,
    per_channel: bool,
    g: object,
    beta: object,
    a: object,
    b: object,
    A_log: object,
    dt_bias: object,
    allow_neg_eigval: object,
    lower_bound: object = None,
) -> tuple[jax.Array, jax.Array]:
    """The log decay and beta of a delta rule, as given or from the raw gates ``a`` and ``b``.

    Args:
      tokens: the names of the dimensions before the heads.
      dtype: what raw gates are computed in.
      ids: of tokens without a sequence, whose gates may be anything, raw gates are computed as if they were 0: linear
        attention gives those tokens no weight, and a gradient of 0 times NaN would be NaN.
      per_channel: the decay is of ``[value_heads, key_dim]``, else of ``[value_heads]``.
    """
    if (g is None) == (a is None):
        raise ValueError(
            "the decay is given as g, its natural log, or as a, with A_log and dt_bias: "
            f"got {'neither' if g is None else 'both'}"
        )
    if (beta is None) == (b is None):
        raise ValueError(
            f"beta is given, or b, of which it is the sigmoid: got {'neither' if b is None else 'both'}",
        )
    of_heads = f"{tokens} value_heads"
    of_decay = of_heads + " key_dim" * per_channel
    if a is None:
        others = {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound}
        if any(value is not None for value in others.values()):
            found = ", ".join(name for name, value in others.items() if value is not None)
            raise ValueError(f"{found} turn a raw gate, a, into the log decay, but g is that already")
        log_decay = dims.array("g", g, of_decay)
    else:
        if A_log is None:
            raise ValueError("a raw gate, a, needs A_log")
        raw = without_padding(dims.array("a", a, of_decay), ids).astype(dtype)
        rate = dims.array("A_log", A_log, "value_heads").astype(dtype)
        if dt_bias is not None:
            bias = as_array("dt_bias", dt_bias)
            if per_channel and bias.shape == (math.prod(raw.shape[-2:]),):
                bias = reshape(bias, raw.shape[-2:])
            raw += dims.array("dt_bias", bias, of_decay.removeprefix(tokens)).astype(dtype)
        log_decay = _log_decay(raw, jnp.exp(rate[:, None] if per_channel else rate), lower_bound)
    if b is None:
        if flag("allow_neg_eigval", allow_neg_eigval):
            raise ValueError("allow_neg_eigval doubles the sigmoid of b, but beta is given: multiply it by 2 instead")
        return log_decay, dims.array("beta", beta, of_heads)
    strength = jax.nn.sigmoid(without_padding(dims.array("b", b, of_heads), ids).astype(dtype))
    return log_decay, 2 * strength if flag("allow_neg_eigval", allow_neg_eigval) else strength


def _log_decay(raw: jax.Array, rate: jax.Array, lower_bound: object) -> jax.Array:
    if lower_bound is None:
        return -rate * jax.nn.softplus(raw)
    bound = number("lower_bound", lower_bound)
    if not MIN_LOWER_BOUND <= bound < 0:
        raise ValueError(f"lower_bound must be in [{MIN_LOWER_BOUND}, 0), got {lower_bound=}")
    return bound * jax.nn.sigmoid(rate * raw)


def step_sizes(
    dims: Dims,
    of_heads: str,
    dtype: DTypeLike,
    ids: jax.Array | None = None,
    *,
    dt: object,
    dt_bias: object,
    dt_softplus: object,
    dt_limit: tuple[float, float] | None,
) -> jax.Array:
    """The step sizes of a state-space model: ``clip(softplus(dt + dt_bias))``.

    Args:
      of_heads: the names of the dimensions of dt, the last of which is that of heads.
      dtype, ids: as for ``delta_rule_gates``.
      dt_limit: where they are clipped; ``(0, inf)`` if None.
    """
    sizes = without_padding(dims.array("dt", dt, of_heads), ids).astype(dtype)
    if dt_bias is not None:
        sizes += dims.array("dt_bias", dt_bias, of_heads.split()[-1]).astype(dtype)
    if flag("dt_softplus", dt_softplus):
        sizes = jax.nn.softplus(sizes)
    limits = (0.0, math.inf) if dt_limit is None else dt_limit
    if not (isinstance(limits, tuple | list) and len(limits) == 2):
        raise TypeError(f"dt_limit must be a pair of numbers (least, greatest), got {dt_limit=}")
    low, high = limits
    if not low <= high:
        raise ValueError(f"dt_limit must be (least, greatest), got {dt_limit=}")
    return jnp.clip(sizes, low, high)
