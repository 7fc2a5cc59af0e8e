"""The causal convolution over sequences that are split over a mesh axis: the function for use inside ``shard_map``."""

from typing import Any

import jax
from jax.typing import ArrayLike

from tilewright.kernels.causal_conv1d.distributed import split_convolution
from tilewright.kernels.causal_conv1d.inputs import ConvActivation, ConvInputs
from tilewright.kernels.causal_conv1d.op import CAUSAL_CONV1D, CausalConv1d
from tilewright.kernels.op.arguments import PlatformOption
from tilewright.kernels.op.public import public_function
from tilewright.kernels.op.sharding import AxisName, axis_of, devices_along
from tilewright.kernels.op.signatures import results
from tilewright.ops.kernel.kernel import errors_naming_function


def _prepared(
    op: CausalConv1d,
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    axis_name: AxisName,
    activation: ConvActivation | None = None,
    initial_state: ArrayLike | None = None,
    return_state: bool = False,
    cum_seqlens: ArrayLike | None = None,
    seq_lengths: ArrayLike | None = None,
    platform: PlatformOption = None,
    cfg: object = None,
) -> tuple[ConvInputs, AxisName]:
    axis = axis_of(axis_name)
    devices_along(axis, "tokens")
    inputs = op.prepare(
        x, weight, bias, activation=activation, initial_state=initial_state, return_state=return_state,
        cum_seqlens=cum_seqlens, seq_lengths=seq_lengths, platform=platform,
    )  # fmt: skip
    return inputs, axis


@public_function(_prepared)
@results({"": jax.Array, "return_state": tuple[jax.Array, jax.Array]})
def context_parallel_causal_conv1d(*args: Any, cfg: Any = None, **kwargs: Any) -> Any:
    """``causal_conv1d`` over sequences whose tokens are split over a mesh axis, inside ``jax.shard_map``.

    Device i of n passes the i-th of n parts of every row, as a sharding splits them, and gets the results of its
    tokens: those of one device with the whole rows, but for rounding. What it needs beside its tokens, the last
    ``width - 1`` of each row, comes from the device on its left.

    Args:
      x: ``[batch, length / n, channels]``, this device's tokens, ``width - 1`` of them at least.
      weight: ``[channels, width]``, the same on every device.
      bias: ``[channels]``, the same on every device.
      axis_name: the axis of the surrounding ``shard_map`` over which tokens are split, or several.
      activation: as for ``causal_conv1d``.
      initial_state: ``[sequences, channels, width - 1]``, the same on every device: the inputs before whole rows, or
        before the sequences of ``cum_seqlens``.
      return_state: also return the last inputs of each sequence, the same on every device.
      cum_seqlens: ``[sequences + 1]`` boundaries in the whole row (batch 1), the same on every device. Sequences may
        cross any number of devices. For segment ids, pass the boundaries of the segments.
      seq_lengths: ``[batch]``: the tokens of each whole row, the same on every device.
      platform: as for ``causal_conv1d``, of each device's call.
      cfg: a config to use instead of the selected one.

    Returns:
      An array like x; with ``return_state`` a pair of it and the states, as ``causal_conv1d`` returns them.

    Raises:
      ValueError, TypeError: a wrong argument, or a call outside of ``shard_map``; the message holds its value.
      UnsupportedError: no allowed platform can serve the call.
    """
    with errors_naming_function("context_parallel_causal_conv1d"):
        inputs, axis = _prepared(CAUSAL_CONV1D, *args, **kwargs)
        return split_convolution(CAUSAL_CONV1D, inputs, axis, cfg)
