"""The Triton backend of linear attention, on NVIDIA GPUs from Ampere on."""

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, ClassVar

from tilewright.kernels.linear_attention.chunks import chunk_reasons
from tilewright.kernels.linear_attention.inputs import (
    LinearAttentionInputs,
    LinearAttentionResults,
    with_identity,
)
from tilewright.kernels.linear_attention.triton import calls, channel_calls, removal_calls
from tilewright.kernels.linear_attention.triton.params import (
    TritonLinearAttentionParams,
    footprints,
    listed_params,
)
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.op.footprint import Footprint, launch_reasons
from tilewright.kernels.sequential import run_with_sequential_vmap
from tilewright.kernels.triton import unavailable
from tilewright.ops.types import Device, Direction

DTYPES = ("float16", "bfloat16", "float32")

MAX_DIM = 256
"""Channels of keys and of values: a state's block of rows is in registers."""


class TritonLinearAttention(
    Backend[
        LinearAttentionInputs, LinearAttentionResults, TritonLinearAttentionParams, TritonLinearAttentionParams
    ]
):  # fmt: skip
    """Serves sums and delta rules with decays of heads or of channels, or none; repeats bit for bit.

    A bonus and a removal need decays of channels, which their models have.

    Operands of matmuls are bfloat16 for bfloat16 values, else float32 in TensorFloat-32; sums are float32.
    """

    name: ClassVar[str] = "triton"
    platform: ClassVar[Platform] = Platform.TRITON
    forward_params: ClassVar[type] = TritonLinearAttentionParams
    backward_params: ClassVar[type] = TritonLinearAttentionParams
    late_import: ClassVar[str] = "triton"
    keeps_lowering: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset(
        {
            "log_decay",
            "beta",
            "removal_read",
            "removal_write",
            "bonus",
            "initial_state",
            "cum_seqlens",
            "seq_lengths",
            "qk_l2norm",
            "l2norm_eps",
            "only_maps",
        }
    )

    def reasons(self, inputs: LinearAttentionInputs, device: Device, direction: Direction) -> list[str]:
        reasons = unavailable(device)
        for name in ("value", "log_decay", "beta", "removal_read", "removal_write", "bonus"):
            array = inputs.arrays[name]
            if array is not None and array.dtype.name not in DTYPES:
                reasons.append(f"{name} must be one of {DTYPES}, got {array.dtype}")
        if inputs.gate != "channel" and (inputs.bonus is not None or inputs.removal is not None):
            reasons.append("with a bonus or a removal it needs a decay of each channel of the keys")
        if inputs.only_maps and direction == "backward":
            reasons.append("it has no gradients of what tokens make of states")
        if inputs.only_maps and inputs.gate == "channel" and inputs.map_shape[-1] > MAX_DIM:
            columns = f"{inputs.value_dim} + {inputs.key_dim}"
            reasons.append(f"with decays of channels it has states and matrices of {MAX_DIM} columns, got {columns}")
        for name in ("key_dim", "value_dim"):
            if getattr(inputs, name) > MAX_DIM:
                reasons.append(f"{name} must be at most {MAX_DIM}, got {getattr(inputs, name)}")
        reasons += chunk_reasons(inputs)
        return reasons

    def candidates(
        self, inputs: LinearAttentionInputs, device: Device, direction: Direction
    ) -> Iterable[TritonLinearAttentionParams]:
        return listed_params(inputs, device, direction)

    def config_reasons(
        self,
        inputs: LinearAttentionInputs,
        device: Device,
        direction: Direction,
        params: TritonLinearAttentionParams,
    ) -> list[str]:
        return launch_reasons(footprints(inputs, device, direction, params), device)

    def footprints(
        self,
        inputs: LinearAttentionInputs,
        device: Device,
        direction: Direction,
        params: TritonLinearAttentionParams,
    ) -> Sequence[Footprint]:
        return footprints(inputs, device, direction, params)

    def forward(self, inputs: LinearAttentionInputs, params: TritonLinearAttentionParams) -> LinearAttentionResults:
        passes = passes_of(inputs)
        if inputs.only_maps and passes is not calls:
            # Its results are not used, so XLA leaves out the kernels that compute these.
            found = self.forward(with_identity(inputs), params)
            return LinearAttentionResults(None, found.state)
        return run_with_sequential_vmap(lambda inputs: passes.forward(inputs, params), inputs)

    def backward(
        self,
        inputs: LinearAttentionInputs,
        results: Any,
        cotangents: LinearAttentionResults,
        params: TritonLinearAttentionParams,
    ) -> dict[str, Any]:
        passes = passes_of(inputs)
        return run_with_sequential_vmap(lambda given: passes.backward(*given, params), (inputs, cotangents))


def passes_of(inputs: LinearAttentionInputs) -> ModuleType:
    """The module whose ``forward`` and ``backward`` serve a call."""
    if inputs.removal is not None:
        return removal_calls
    return channel_calls if inputs.gate == "channel" else calls
