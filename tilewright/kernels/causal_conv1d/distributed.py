"""The causal convolution of sequences whose tokens are split over devices, by the windows at their borders."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.causal_conv1d.inputs import ConvInputs, final_state
from tilewright.kernels.op.portfolio import PortfolioKernel
from tilewright.kernels.op.sharding import AxisName, vary_over, varying_axes
from tilewright.kernels.split_sequences import SplitSequences, on_explicit_axes
from tilewright.ops.utils.promotion import default_promotion


def split_convolution(op: PortfolioKernel[Any, Any], inputs: ConvInputs, axis: AxisName, cfg: object) -> Any:
    """The results inside ``shard_map``; see ``context_parallel_causal_conv1d``."""
    length, devices = inputs.x.shape[1], lax.axis_size(axis)
    if devices > 1 and length < inputs.width - 1:
        raise ValueError(
            f"a window of {inputs.width} tokens reaches beyond the device on the left, which has {length}: each device "
            f"needs {inputs.width - 1} tokens at least"
        )
    with default_promotion():
        inputs = vary_over(varying_axes(lax.axis_index(axis)) | varying_axes(inputs), inputs)
        split = SplitSequences.of(axis, length, inputs.cum_seqlens, inputs.seq_lengths)
        part = inputs.replace(**split.parts())
        if devices > 1:
            part = part.replace(initial_state=_entering(inputs, split))
        found = op(part, cfg=cfg)
        return (found[0], split.final(found[1])) if inputs.return_state else found


def _entering(inputs: ConvInputs, split: SplitSequences) -> jax.Array:
    """The inputs before the sequences of this device, of which some are those of the device on the left."""
    first = inputs.initial_state
    # Of a sequence that comes from further left every input is among these tokens.
    sent = final_state(inputs.replace(initial_state=split.begun(first), **split.leaving_parts()))
    flow = lax.ppermute(sent, split.axis, [(i, i + 1) for i in range(split.devices - 1)])
    dtype = inputs.state.dtype
    if split.crossing is None and first is not None:
        flow = jnp.where(split.index == 0, first.astype(dtype), flow.astype(dtype))
    return split.with_entering(None if first is None else first.astype(dtype), flow.astype(dtype))


def convolution_on_explicit_axes(op: PortfolioKernel[Any, Any], inputs: ConvInputs, cfg: object) -> Any:
    """The results of a call whose types split its tokens over explicit axes."""
    states = "bcw" if inputs.cum_seqlens is None else "ncw"
    layouts = {
        "x": "btc", "weight": "cw", "bias": "c", "initial_state": states, "cum_seqlens": "n", "seq_lengths": "b"
    }  # fmt: skip

    def on_device(part: ConvInputs, axis: AxisName) -> Any:
        return split_convolution(op, part, axis, cfg)

    results = ("btc", states) if inputs.return_state else ("btc",)
    return on_explicit_axes(on_device, inputs, layouts, results, {"b": "rows", "t": "tokens", "c": "channels"})
