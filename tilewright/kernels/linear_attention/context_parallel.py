"""Linear attention over a sequence that is split over a mesh axis: the function for use inside ``shard_map``.

It calls ``linear_attention`` and shares its configs and tables; it has no kernels of its own, because a kernel is
selected and tuned on one device, which has no axis to communicate over.
"""

from typing import Any

import jax
from jax.typing import ArrayLike

from tilewright.kernels.linear_attention.distributed import split_attention
from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs
from tilewright.kernels.linear_attention.op import LINEAR_ATTENTION, LinearAttention
from tilewright.kernels.op.arguments import PlatformOption
from tilewright.kernels.op.public import public_function
from tilewright.kernels.op.sharding import AxisName, axis_of, devices_along
from tilewright.kernels.op.signatures import results
from tilewright.ops.kernel.kernel import errors_naming_function


def _prepared(
    op: LinearAttention,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    axis_name: AxisName,
    log_decay: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    removal: tuple[ArrayLike, ArrayLike] | None = None,
    bonus: ArrayLike | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    l2norm_eps: float = LinearAttentionInputs.l2norm_eps,
    initial_state: ArrayLike | None = None,
    return_state: bool = False,
    cum_seqlens: ArrayLike | None = None,
    seq_lengths: ArrayLike | None = None,
    platform: PlatformOption = None,
    cfg: object = None,
) -> tuple[LinearAttentionInputs, AxisName]:
    axis = axis_of(axis_name)
    devices_along(axis, "tokens")
    inputs = op.prepare(
        query, key, value, log_decay=log_decay, beta=beta, removal=removal, bonus=bonus, scale=scale,
        qk_l2norm=qk_l2norm, l2norm_eps=l2norm_eps, initial_state=initial_state, return_state=return_state,
        cum_seqlens=cum_seqlens, seq_lengths=seq_lengths, platform=platform,
    )  # fmt: skip
    return inputs, axis


@public_function(_prepared)
@results({"": jax.Array, "return_state": tuple[jax.Array, jax.Array]})
def context_parallel_linear_attention(*args: Any, cfg: Any = None, **kwargs: Any) -> Any:
    """``linear_attention`` over sequences whose tokens are split over a mesh axis, inside ``jax.shard_map``.

    Device i of n passes the i-th of n parts of every row, as a sharding splits them, and gets the results of its
    tokens: those of one device with the whole rows, but for rounding. Each device computes what its tokens do to a
    state; these maps are gathered, float32, and every device folds those on its left into the state before its first
    token, with which it runs its tokens. What is sent depends neither on the length nor on the number of packed
    sequences, unless the last states are returned. Gradients are exact, in reverse mode.

    Args:
      query, key: ``[batch, length / n, heads, key_dim]``, this device's tokens.
      value: ``[batch, length / n, value_heads, value_dim]``.
      axis_name: the axis of the surrounding ``shard_map`` over which tokens are split, or several.
      log_decay: as for ``linear_attention``, of this device's tokens, or ``[value_heads]``, the same on every device.
      beta: ``[batch, length / n, value_heads]``.
      removal: ``(a, b)``, each ``[batch, length / n, value_heads, key_dim]``.
      bonus: ``[value_heads, key_dim]``, the same on every device.
      scale: ``key_dim ** -0.5`` by default.
      qk_l2norm: as for ``linear_attention``.
      l2norm_eps: as for ``linear_attention``.
      initial_state: ``[sequences, value_heads, key_dim, value_dim]``, float32: the states before the first tokens of
        whole rows, or of the sequences of ``cum_seqlens``; the same on every device.
      return_state: return the states behind the last tokens as well, the same on every device.
      cum_seqlens: ``[sequences + 1]`` boundaries in the whole row (batch 1), the same on every device. Sequences may
        cross any number of devices. For segment ids, pass the boundaries of the segments.
      seq_lengths: ``[batch]``: the tokens of each whole row, the same on every device.
      platform: as for ``linear_attention``, of each device's calls.
      cfg: a config to use instead of the selected ones of each device's calls.

    Returns:
      The results ``[batch, length / n, value_heads, value_dim]`` of this device's tokens in the dtype of the value;
      with ``return_state`` a pair of these and the states, float32.

    Raises:
      ValueError, TypeError: a wrong argument, or a call outside of ``shard_map``; the message holds its value.
      UnsupportedError: no allowed platform can serve a call.
    """
    with errors_naming_function("context_parallel_linear_attention"):
        inputs, axis = _prepared(LINEAR_ATTENTION, *args, **kwargs)
    return split_attention(LINEAR_ATTENTION, inputs, axis, cfg)
