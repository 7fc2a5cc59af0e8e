"""The cross-entropy of logits that are never in memory as a whole, in plain XLA: the backend for every device."""

from collections.abc import Iterable
from typing import ClassVar

from tilewright.kernels.linear_cross_entropy.blocks.backend import SERVED_BY_LOOPS, BlockedCrossEntropy, head_of
from tilewright.kernels.linear_cross_entropy.inputs import LossInputs
from tilewright.kernels.linear_cross_entropy.xla.logits import XlaLogits
from tilewright.kernels.linear_cross_entropy.xla.params import (
    Params,
    XlaLossBackwardParams,
    XlaLossParams,
    candidate_sizes,
)
from tilewright.kernels.op.choice import Platform
from tilewright.ops.types import Device, Direction


class XlaLinearCrossEntropy(BlockedCrossEntropy[XlaLossParams, XlaLossBackwardParams]):
    """Serves every call."""

    name: ClassVar[str] = "xla"
    platform: ClassVar[Platform] = Platform.XLA
    serves: ClassVar[frozenset[str]] = SERVED_BY_LOOPS | {
        "bias", "vocab_first", "label_smoothing", "logits_soft_cap", "gradient_epsilon",
    }  # fmt: skip
    forward_params: ClassVar[type] = XlaLossParams
    backward_params: ClassVar[type] = XlaLossBackwardParams
    forward_mode: ClassVar[bool] = True
    symbolic_dimensions: ClassVar[bool] = True

    def reasons(self, inputs: LossInputs, device: Device, direction: Direction) -> list[str]:
        return []

    def candidates(self, inputs: LossInputs, device: Device, direction: Direction) -> Iterable[Params]:
        sizes = candidate_sizes(inputs.tokens, inputs.vocab, device, whole=inputs.is_distributed)
        if direction == "forward" or not inputs.keeps_gradients:
            return [_params(inputs, direction, each) for each in sizes]
        # Gradients that are there have no block sizes to tune; all others are of the recomputing form.
        return [_params(inputs, direction, sizes[0]), *(XlaLossBackwardParams(*each) for each in sizes)]

    def kernels(self, inputs: LossInputs, params: Params) -> XlaLogits:
        return XlaLogits(head_of(inputs), params.block_vocab, inputs.gradient_epsilon)


def _params(inputs: LossInputs, direction: Direction, sizes: tuple[int | None, int]) -> Params:
    if direction == "forward":
        return XlaLossParams(*sizes)
    return XlaLossBackwardParams(*sizes, recompute=not inputs.keeps_gradients)
