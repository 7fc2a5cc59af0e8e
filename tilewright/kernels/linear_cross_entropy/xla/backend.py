"""The cross-entropy of logits that are never in memory as a whole, in plain XLA: the backend for every device."""

from collections.abc import Iterable
from typing import ClassVar

from tilewright.kernels.linear_cross_entropy.blocks import driver
from tilewright.kernels.linear_cross_entropy.blocks.backend import BlockedCrossEntropy
from tilewright.kernels.linear_cross_entropy.inputs import LossInputs, LossProblem
from tilewright.kernels.linear_cross_entropy.xla.logits import XlaLogits
from tilewright.kernels.linear_cross_entropy.xla.params import (
    Params,
    XlaLossBackwardParams,
    XlaLossParams,
    block_sizes,
    candidate_sizes,
)
from tilewright.kernels.op.backend import Platform
from tilewright.ops.types import Device, Direction


class XlaLinearCrossEntropy(BlockedCrossEntropy[XlaLossParams, XlaLossBackwardParams]):
    """Serves every problem."""

    platform: ClassVar[Platform] = Platform.XLA
    forward_params: ClassVar[type] = XlaLossParams
    backward_params: ClassVar[type] = XlaLossBackwardParams
    forward_mode: ClassVar[bool] = True
    symbolic_dimensions: ClassVar[bool] = True

    def not_supported_reasons(self, problem: LossProblem, device: Device, direction: Direction) -> list[str]:
        return []

    def heuristic(self, problem: LossProblem, device: Device, direction: Direction) -> Params:
        whole = problem.options.is_distributed
        return _params(problem, direction, block_sizes(problem.tokens, problem.vocab, device, whole=whole))

    def candidates(self, problem: LossProblem, device: Device, direction: Direction) -> Iterable[Params]:
        whole = problem.options.is_distributed
        sizes = candidate_sizes(problem.tokens, problem.vocab, device, whole=whole)
        if direction == "forward" or not problem.options.keeps_gradients:
            return [_params(problem, direction, each) for each in sizes]
        # Gradients that are there have no block sizes to tune; all others are of the recomputing form.
        return [_params(problem, direction, sizes[0]), *(XlaLossBackwardParams(*each) for each in sizes)]

    def kernels(self, inputs: LossInputs, params: Params) -> XlaLogits:
        return XlaLogits(driver.head_of(inputs), params.block_vocab, inputs.options.gradient_epsilon)


def _params(problem: LossProblem, direction: Direction, sizes: tuple[int | None, int]) -> Params:
    if direction == "forward":
        return XlaLossParams(*sizes)
    return XlaLossBackwardParams(*sizes, recompute=not problem.options.keeps_gradients)
