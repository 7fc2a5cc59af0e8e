"""The backend of the cross-entropy for TPUs."""

from collections.abc import Iterable, Sequence
from typing import ClassVar

from tilewright.kernels.linear_cross_entropy.blocks.backend import SERVED_BY_LOOPS, BlockedCrossEntropy, head_of
from tilewright.kernels.linear_cross_entropy.inputs import LossInputs
from tilewright.kernels.linear_cross_entropy.tpu.logits import TpuLogits
from tilewright.kernels.linear_cross_entropy.tpu.params import (
    MAX_D,
    Params,
    TpuLossBackwardParams,
    TpuLossParams,
    TpuTile,
    listed_params,
)
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.op.footprint import Footprint
from tilewright.kernels.tpu.device import LANES, device_reasons, vmem_bytes
from tilewright.ops.types import Device, Direction

DTYPES = ("bfloat16", "float32")


class TpuLinearCrossEntropy(BlockedCrossEntropy[TpuLossParams, TpuLossBackwardParams]):
    """Serves x and weight of one dtype, with all options, where d is a multiple of the lanes of a register.

    One kernel reduces the logits to their statistics, and another makes their gradients, of all tokens and a block of
    the vocabulary; the matmuls of these are XLA's. A matrix whose vocabulary is no multiple of the lanes is copied with
    zeros behind the last class by passes that make gradients.
    """

    name: ClassVar[str] = "tpu"
    platform: ClassVar[Platform] = Platform.PALLAS
    serves: ClassVar[frozenset[str]] = SERVED_BY_LOOPS | {
        "bias", "vocab_first", "label_smoothing", "logits_soft_cap", "gradient_epsilon",
    }  # fmt: skip
    forward_params: ClassVar[type] = TpuLossParams
    backward_params: ClassVar[type] = TpuLossBackwardParams

    def reasons(self, inputs: LossInputs, device: Device, direction: Direction) -> list[str]:
        reasons = device_reasons(device)
        dtypes = {"x": inputs.x.dtype, "weight": inputs.weight.dtype}
        reasons += [f"{name} must be one of {DTYPES}, got {x}" for name, x in dtypes.items() if x.name not in DTYPES]
        if inputs.x.dtype != inputs.weight.dtype:
            reasons.append(f"x and weight must have one dtype, got {inputs.x.dtype} and {inputs.weight.dtype}")
        if inputs.is_distributed:
            reasons.append("XLA may split the tokens over devices, and would gather them for its kernels")
        if inputs.d % LANES or not 0 < inputs.d <= MAX_D:
            reasons.append(f"d must be a multiple of {LANES} up to {MAX_D}, got d={inputs.d}")
        if inputs.tokens == 0:
            reasons.append("its kernels need tokens")
        return reasons

    def candidates(self, inputs: LossInputs, device: Device, direction: Direction) -> Iterable[Params]:
        return listed_params(inputs, direction, vmem_bytes(device))

    def footprints(
        self, inputs: LossInputs, device: Device, direction: Direction, params: Params
    ) -> Sequence[Footprint]:
        tiles = [params.gradient] if isinstance(params, TpuLossBackwardParams) else [params.statistics, params.gradient]
        return [
            Footprint(
                blocks=-(-inputs.tokens // each.rows(inputs.tokens)),
                vmem_bytes=each.vmem_bytes(inputs.tokens, inputs.d, inputs.x.dtype.itemsize),
            )
            for each in tiles
        ]

    def kernels(self, inputs: LossInputs, params: Params) -> TpuLogits:
        makes_gradients = not isinstance(params, TpuLossParams) or inputs.keeps_gradients
        head = head_of(inputs).aligned(LANES) if makes_gradients else head_of(inputs)
        statistics: TpuTile = params.statistics if isinstance(params, TpuLossParams) else params.gradient
        return TpuLogits(head, inputs.needs_sum, inputs.gradient_epsilon, statistics, params.gradient)
