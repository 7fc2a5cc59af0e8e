"""The Triton backend of the cross-entropy, on NVIDIA GPUs from Ampere on."""

from collections.abc import Iterable, Sequence
from typing import ClassVar

from tilewright.kernels.linear_cross_entropy.blocks.backend import SERVED_BY_LOOPS, BlockedCrossEntropy
from tilewright.kernels.linear_cross_entropy.blocks.kept import keeping_reasons
from tilewright.kernels.linear_cross_entropy.inputs import LossInputs
from tilewright.kernels.linear_cross_entropy.triton.logits import TritonLogits
from tilewright.kernels.linear_cross_entropy.triton.params import (
    Params,
    TritonLossBackwardParams,
    TritonLossParams,
    footprints,
    listed_params,
)
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.op.footprint import Footprint, launch_reasons
from tilewright.kernels.triton import unavailable
from tilewright.ops.types import Device, Direction

DTYPES = ("float16", "bfloat16", "float32")

MAX_VOCAB = 1 << 22
"""Classes up to which the elements of a step along d are counted by 32 bits."""


class TritonLinearCrossEntropy(BlockedCrossEntropy[TritonLossParams, TritonLossBackwardParams]):
    """Serves x and weight of one dtype, with all options, where XLA does not split the tokens.

    With operands in bfloat16 the gradient of the logits is in bfloat16, otherwise in float32, and so are its matmuls.
    """

    name: ClassVar[str] = "triton"
    platform: ClassVar[Platform] = Platform.TRITON
    serves: ClassVar[frozenset[str]] = SERVED_BY_LOOPS | {
        "bias", "vocab_first", "label_smoothing", "logits_soft_cap", "gradient_epsilon",
    }  # fmt: skip
    forward_params: ClassVar[type] = TritonLossParams
    backward_params: ClassVar[type] = TritonLossBackwardParams
    late_import: ClassVar[str] = "triton"
    keeps_lowering: ClassVar[bool] = True

    def reasons(self, inputs: LossInputs, device: Device, direction: Direction) -> list[str]:
        reasons = unavailable(device)
        dtypes = {"x": inputs.x.dtype, "weight": inputs.weight.dtype}
        reasons += [f"{name} must be one of {DTYPES}, got {x}" for name, x in dtypes.items() if x.name not in DTYPES]
        if inputs.x.dtype != inputs.weight.dtype:
            reasons.append(f"x and weight must have one dtype, got {inputs.x.dtype} and {inputs.weight.dtype}")
        if inputs.is_distributed:
            reasons.append("XLA may split the tokens over devices, and would gather them for its kernels")
        if inputs.vocab > MAX_VOCAB:
            reasons.append(f"its kernels count up to {MAX_VOCAB} classes, got vocab={inputs.vocab}")
        return reasons

    def candidates(self, inputs: LossInputs, device: Device, direction: Direction) -> Iterable[Params]:
        listed = listed_params(inputs, device, direction)
        fitting = [params for params in listed if not launch_reasons(footprints(inputs, params), device)]
        return fitting or listed[:1]

    def config_reasons(self, inputs: LossInputs, device: Device, direction: Direction, params: Params) -> list[str]:
        keeps = isinstance(params, TritonLossParams) and params.keep and inputs.keeps_gradients
        return keeping_reasons(inputs) if keeps else []

    def footprints(
        self, inputs: LossInputs, device: Device, direction: Direction, params: Params
    ) -> Sequence[Footprint]:
        return footprints(inputs, params)

    def kernels(self, inputs: LossInputs, params: Params) -> TritonLogits:
        statistics = params.statistics if isinstance(params, TritonLossParams) else params.gradient
        return TritonLogits(
            self.aligned_head(inputs, params), statistics, params.gradient, inputs.needs_sum, inputs.gradient_epsilon
        )
