"""The Hopper backend of the cross-entropy."""

from collections.abc import Iterable, Sequence
from typing import ClassVar

from tilewright.kernels.hopper.device import device_reasons, num_sms
from tilewright.kernels.hopper.matmul.dense import dense_plan
from tilewright.kernels.hopper.matmul.operands import operand_reasons
from tilewright.kernels.hopper.matmul.plan import plan_reasons
from tilewright.kernels.linear_cross_entropy.blocks.backend import SERVED_BY_LOOPS, BlockedCrossEntropy
from tilewright.kernels.linear_cross_entropy.blocks.kept import keeping_reasons
from tilewright.kernels.linear_cross_entropy.blocks.vocabulary import ALIGNED, aligned
from tilewright.kernels.linear_cross_entropy.hopper.logits import HopperLogits
from tilewright.kernels.linear_cross_entropy.hopper.params import (
    HopperLossBackwardParams,
    HopperLossParams,
    Params,
    listed_params,
)
from tilewright.kernels.linear_cross_entropy.inputs import LossInputs
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.op.footprint import Footprint
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.device import current_device


class HopperLinearCrossEntropy(BlockedCrossEntropy[HopperLossParams, HopperLossBackwardParams]):
    """Serves 16-bit operands of one dtype, with d a multiple of 8; gradients only in bfloat16.

    A matrix whose vocabulary is no multiple of `ALIGNED` is copied with zeros behind the last class, except by a pass
    without gradients over ``[vocab, d]``, whose rows begin at multiples of 16 bytes.

    A matmul's epilogue sums the softmax, and that of another one makes the gradients of logits; their matmuls are
    cuBLAS's.
    """

    name: ClassVar[str] = "hopper"
    platform: ClassVar[Platform] = Platform.PALLAS
    keeps_lowering: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = SERVED_BY_LOOPS | {
        "bias", "vocab_first", "label_smoothing", "logits_soft_cap", "gradient_epsilon",
    }  # fmt: skip
    forward_params: ClassVar[type] = HopperLossParams
    backward_params: ClassVar[type] = HopperLossBackwardParams

    def reasons(self, inputs: LossInputs, device: Device, direction: Direction) -> list[str]:
        reasons = device_reasons(device)
        dtypes = {"x": inputs.x.dtype, "weight": inputs.weight.dtype}
        reasons += operand_reasons(dtypes, "float32", {"d": inputs.d})
        if inputs.is_distributed:
            reasons.append("XLA may split the tokens over devices, and would gather them for its kernels")
        if (direction == "backward" or inputs.keeps_gradients) and inputs.x.dtype.name == "float16":
            reasons.append("small gradients of logits would be zeros in float16")
        if 0 in (inputs.tokens, inputs.d):
            reasons.append(f"its kernels need tokens and d, got tokens={inputs.tokens}, d={inputs.d}")
        return reasons

    def candidates(self, inputs: LossInputs, device: Device, direction: Direction) -> Iterable[Params]:
        return listed_params(inputs, direction, num_sms(device))

    def config_reasons(self, inputs: LossInputs, device: Device, direction: Direction, params: Params) -> list[str]:
        reasons = plan_reasons(lambda: self.footprints(inputs, device, direction, params))
        if isinstance(params, HopperLossParams) and params.keep and inputs.keeps_gradients:
            reasons += keeping_reasons(inputs)
        elif min(params.block_vocab, aligned(inputs.vocab)) % ALIGNED:
            reasons.append(f"TMA stores rows of multiples of {ALIGNED} classes, got {params}")
        return reasons

    def footprints(
        self, inputs: LossInputs, device: Device, direction: Direction, params: Params
    ) -> Sequence[Footprint]:
        tiles = [params.statistics, params.gradient] if isinstance(params, HopperLossParams) else [params.gradient]
        # The shape of any array: panels take as much memory as whole tiles.
        dtype, shape = inputs.x.dtype, (8, 64)
        return [dense_plan(dtype, shape, shape, 1, each, dtype).footprint(num_sms(device)) for each in tiles]

    def kernels(self, inputs: LossInputs, params: Params) -> HopperLogits:
        statistics = params.statistics if isinstance(params, HopperLossParams) else params.gradient
        return HopperLogits(
            self.aligned_head(inputs, params), inputs.needs_sum, inputs.gradient_epsilon, statistics, params.gradient,
            num_sms(current_device()),
        )  # fmt: skip
