"""The passes of every backend of the cross-entropy: the shared loops over the backend's kernels."""

import abc
from typing import Any, Protocol

from tilewright.kernels.linear_cross_entropy.blocks import driver
from tilewright.kernels.linear_cross_entropy.blocks.logits import LogitKernels
from tilewright.kernels.linear_cross_entropy.inputs import LossInputs, LossResults
from tilewright.kernels.op.backend import Implementation

SERVED_BY_LOOPS = frozenset({"token_weights", "z_loss", "is_part", "keeps_gradients"})
"""The options that the loops compute whatever the kernels are."""


class ForwardParams(Protocol):
    """Fields of a forward config that the loops read."""

    @property
    def block_tokens(self) -> int | None: ...

    @property
    def block_vocab(self) -> int: ...

    @property
    def keep(self) -> bool:
        """True if gradients that the forward pass computes come from what it keeps of a block of tokens."""
        ...


class BackwardParams(Protocol):
    """Fields of a backward config that the loops read."""

    @property
    def block_tokens(self) -> int | None: ...

    @property
    def block_vocab(self) -> int: ...

    @property
    def recompute(self) -> bool: ...


class BlockedCrossEntropy[Forward: ForwardParams, Backward: BackwardParams](
    Implementation[LossInputs, LossResults, Forward, Backward]
):
    """A backend whose kernels compute statistics of logits and gradients of them."""

    @abc.abstractmethod
    def kernels(self, inputs: LossInputs, params: Forward | Backward) -> LogitKernels:
        """The kernels of a pass."""

    def forward(self, inputs: LossInputs, params: Forward) -> LossResults:
        return driver.forward(
            inputs, self.kernels(inputs, params),
            block_tokens=params.block_tokens, block_vocab=params.block_vocab, keep=params.keep,
        )  # fmt: skip

    def backward(
        self, inputs: LossInputs, results: LossResults, cotangents: LossResults, params: Backward
    ) -> dict[str, Any]:
        """Gradients of those arrays that are used; a sum's that the forward pass computed, or recomputed ones."""
        return driver.backward(
            inputs, results, cotangents, self.kernels(inputs, params),
            block_tokens=params.block_tokens, block_vocab=params.block_vocab, recompute=params.recompute,
        )  # fmt: skip
