"""The Triton backend of the cross-entropy, on NVIDIA GPUs from Ampere on."""

from collections.abc import Iterable, Sequence
from typing import ClassVar

from tilewright.kernels.linear_cross_entropy.blocks import driver
from tilewright.kernels.linear_cross_entropy.blocks.backend import BlockedCrossEntropy
from tilewright.kernels.linear_cross_entropy.blocks.kept import keeping_reasons
from tilewright.kernels.linear_cross_entropy.inputs import LossInputs, LossProblem
from tilewright.kernels.linear_cross_entropy.triton.logits import TritonLogits
from tilewright.kernels.linear_cross_entropy.triton.params import (
    Params,
    TritonLossBackwardParams,
    TritonLossParams,
    footprints,
    listed_params,
)
from tilewright.kernels.op.backend import Platform
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

    platform: ClassVar[Platform] = Platform.TRITON
    forward_params: ClassVar[type] = TritonLossParams
    backward_params: ClassVar[type] = TritonLossBackwardParams
    late_import: ClassVar[str] = "triton"

    def not_supported_reasons(self, problem: LossProblem, device: Device, direction: Direction) -> list[str]:
        reasons = unavailable(device)
        dtypes = {"x": problem.x_dtype, "weight": problem.weight_dtype}
        reasons += [f"{name} must be one of {DTYPES}, got {x}" for name, x in dtypes.items() if x.name not in DTYPES]
        if problem.x_dtype != problem.weight_dtype:
            reasons.append(f"x and weight must have one dtype, got {problem.x_dtype} and {problem.weight_dtype}")
        if problem.options.is_distributed:
            reasons.append("XLA may split the tokens over devices, and would gather them for its kernels")
        if problem.vocab > MAX_VOCAB:
            reasons.append(f"its kernels count up to {MAX_VOCAB} classes, got {problem.vocab=}")
        return reasons

    def heuristic(self, problem: LossProblem, device: Device, direction: Direction) -> Params:
        return next(iter(self.candidates(problem, device, direction)))

    def candidates(self, problem: LossProblem, device: Device, direction: Direction) -> Iterable[Params]:
        listed = listed_params(problem, device, direction)
        fitting = [params for params in listed if not launch_reasons(footprints(problem, params), device)]
        return fitting or listed[:1]

    def config_reasons(self, problem: LossProblem, device: Device, direction: Direction, params: Params) -> list[str]:
        keeps = isinstance(params, TritonLossParams) and params.keep and problem.options.keeps_gradients
        return keeping_reasons(problem) if keeps else []

    def footprints(
        self, problem: LossProblem, device: Device, direction: Direction, params: Params
    ) -> Sequence[Footprint]:
        return footprints(problem, params)

    def kernels(self, inputs: LossInputs, params: Params) -> TritonLogits:
        statistics = params.statistics if isinstance(params, TritonLossParams) else params.gradient
        options = inputs.options
        return TritonLogits(
            driver.head_of(inputs), statistics, params.gradient, options.needs_sum, options.gradient_epsilon
        )
