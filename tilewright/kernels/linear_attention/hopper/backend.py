"""The Hopper backend of linear attention with one decay per head."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import jax

from tilewright.kernels.hopper.device import device_reasons, num_sms
from tilewright.kernels.linear_attention.chunks import chunk_reasons, chunk_table
from tilewright.kernels.linear_attention.hopper import tokens
from tilewright.kernels.linear_attention.hopper.call import Params, backward, forward, pass_call, token_call
from tilewright.kernels.linear_attention.hopper.params import (
    HopperLinearAttentionGradientParams,
    HopperLinearAttentionParams,
    listed_gradient_params,
    listed_params,
)
from tilewright.kernels.linear_attention.hopper.plan import PassCall, Task, footprint
from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs, LinearAttentionResults
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.op.footprint import Footprint, launch_reasons
from tilewright.kernels.sequential import run_with_sequential_vmap
from tilewright.kernels.triton import unavailable
from tilewright.ops.types import Device, Direction

KEY_DIMS = (64, 128)


class HopperLinearAttention(
    Backend[
        LinearAttentionInputs,
        LinearAttentionResults,
        HopperLinearAttentionParams,
        HopperLinearAttentionGradientParams,
    ]
):
    """Serves sums and delta rules with a decay for each head, or none, in bfloat16; repeats bit for bit.

    States are float32 accumulators, which matmuls read rounded. Norms of queries and keys are not rounded.
    """

    name: ClassVar[str] = "hopper"
    platform: ClassVar[Platform] = Platform.PALLAS
    forward_params: ClassVar[type] = HopperLinearAttentionParams
    backward_params: ClassVar[type] = HopperLinearAttentionGradientParams
    late_import: ClassVar[str] = "triton"
    keeps_lowering: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset(
        {"log_decay", "beta", "initial_state", "cum_seqlens", "seq_lengths", "qk_l2norm", "l2norm_eps"}
    )

    def reasons(self, inputs: LinearAttentionInputs, device: Device, direction: Direction) -> list[str]:
        reasons = device_reasons(device) or unavailable(device)
        for name in ("query", "key", "value"):
            if (dtype := inputs.arrays[name].dtype.name) != "bfloat16":
                reasons.append(f"{name} must be bfloat16, got {dtype}")
        for name in ("log_decay", "beta"):
            array = inputs.arrays[name]
            if array is not None and array.dtype.name not in ("float32", "bfloat16", "float16"):
                reasons.append(f"{name} must have at most 32 bits, got {array.dtype}")
        if inputs.gate == "channel":
            reasons.append("its decays are those of heads, got one for each channel of the keys")
        if inputs.key_dim not in KEY_DIMS:
            reasons.append(f"key_dim must be one of {KEY_DIMS}, got {inputs.key_dim}")
        if inputs.value_dim % 64:
            reasons.append(f"value_dim must be a multiple of 64, got {inputs.value_dim}")
        reasons += chunk_reasons(inputs)
        return reasons

    def candidates(self, inputs: LinearAttentionInputs, device: Device, direction: Direction) -> Iterable[Params]:
        listed = listed_params if direction == "forward" else listed_gradient_params
        every: list[Params] = [*listed(inputs, num_sms(device))]
        return [each for each in every if not self.config_reasons(inputs, device, direction, each)]

    def config_reasons(
        self, inputs: LinearAttentionInputs, device: Device, direction: Direction, params: Params
    ) -> list[str]:
        maps = inputs.key_dim if params.segment and inputs.beta is not None else 0
        if inputs.value_dim % (64 * params.consumers) or maps % (64 * params.consumers):
            return [f"each consumer has 64 channels of a CTA, got {inputs.value_dim=}, {inputs.key_dim=}, {params}"]
        return launch_reasons(self.footprints(inputs, device, direction, params), device)

    def footprints(
        self, inputs: LinearAttentionInputs, device: Device, direction: Direction, params: Params
    ) -> Sequence[Footprint]:
        found = [footprint(call, inputs.value.dtype) for call in _calls(inputs, direction, params)]
        if isinstance(params, HopperLinearAttentionGradientParams) and params.ctas and inputs.beta is not None:
            table = jax.eval_shape(
                lambda inputs: chunk_table(inputs.batch, inputs.length, cum_seqlens=inputs.cum_seqlens), inputs
            )
            call = token_call(inputs, table.num_chunks, params.ctas)
            found.append(tokens.footprint(call, inputs.value.dtype))
        return found

    def forward(self, inputs: LinearAttentionInputs, params: HopperLinearAttentionParams) -> LinearAttentionResults:
        return run_with_sequential_vmap(lambda inputs: forward(inputs, params), inputs)

    def backward(
        self,
        inputs: LinearAttentionInputs,
        results: Any,
        cotangents: LinearAttentionResults,
        params: HopperLinearAttentionGradientParams,
    ) -> dict[str, Any]:
        return run_with_sequential_vmap(lambda given: backward(*given, params), (inputs, cotangents))


def _calls(inputs: LinearAttentionInputs, direction: Direction, params: Params) -> list[PassCall]:
    """The kernels with states of a call."""
    tasks: list[Task] = ["out"] if direction == "forward" else ["states", "gradients"]
    found = [pass_call(inputs, params, inputs.sequences, task) for task in tasks]
    maps = [pass_call(inputs, params, inputs.sequences, "states", stored=False)] if params.segment else []
    return [*found, *maps]
