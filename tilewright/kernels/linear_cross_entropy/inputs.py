"""The inputs and results of the backends of vocabulary losses: canonical arrays and static options."""

import dataclasses
import math
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Array, Float, Int32

from tilewright.kernels.op.inputs import OpInputs, static

IGNORED = -1
"""The label of a token that counts nowhere, after ``prepare``; a label that is wrong is the size of the vocabulary."""

type Reduction = Literal["mean", "sum", "none"]

type Summary = Literal["scalar", "none", "statistics"]


def summary_of(is_part: bool, reduction: Reduction) -> Summary:
    """The form of a call's results.

    The losses of all tokens as one sum ("scalar") or each ("none"), or statistics of a part of the vocabulary alone
    ("statistics").
    """
    if is_part:
        return "statistics"
    return "none" if reduction == "none" else "scalar"


class LossInputs(OpInputs):
    """A call after ``prepare``; shapes and dtypes hold without further checks.

    Attributes:
      x: ``[*tokens, d]``.
      weight: ``[d, vocab]``, or ``[vocab, d]`` with ``vocab_first``.
      labels: from 0 to ``vocab - 1``; ``IGNORED``; or ``vocab`` for a label that is wrong or of another part.
      gradient_epsilon: probabilities below it count as zero in gradients; ``None`` for no threshold.
      is_part: the vocabulary is a part, of which there are statistics alone; a label may be of another part and then
        has the logit 0.
      keeps_gradients: the results have gradients of the sum of the losses.
      is_distributed: tokens may be split over devices by XLA, so a loop over blocks of them would gather them.
    """

    x: Float[Array, "*tokens d"]
    weight: Float[Array, "_ _"]
    labels: Int32[Array, "*tokens"]
    bias: Float[Array, " vocab"] | None = None
    token_weights: Float[Array, "*tokens"] | None = None
    vocab_first: bool = static(default=False)
    label_smoothing: float = static(default=0.0)
    z_loss: float = static(default=0.0)
    logits_soft_cap: float | None = static(default=None)
    gradient_epsilon: float | None = static(default=None)
    is_part: bool = static(default=False)
    keeps_gradients: bool = static(default=False)
    is_distributed: bool = static(default=False, role="call")
    reduction: Reduction = static(default="mean", role="call")
    return_lse: bool = static(default=False, role="call")

    @property
    def summary(self) -> Summary:
        """The form of the results."""
        return summary_of(self.is_part, self.reduction)

    @property
    def needs_sum(self) -> bool:
        """True if the sum of a token's logits is among the results."""
        return self.label_smoothing != 0.0

    @property
    def token_shape(self) -> tuple[int, ...]:
        return self.x.shape[:-1]

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return math.prod(self.token_shape)

    @property
    def d(self) -> int:
        return self.x.shape[-1]

    @property
    def vocab_axis(self) -> int:
        """The axis of the vocabulary in ``weight``."""
        return 0 if self.vocab_first else 1

    @property
    def vocab_axes(self) -> dict[str, int]:
        """The axis of the vocabulary in each array that has one; the other arrays begin with the tokens."""
        return {"weight": self.vocab_axis, "bias": 0}

    @property
    def vocab(self) -> int:
        """The size of the vocabulary."""
        return self.weight.shape[self.vocab_axis]

    @property
    def x_dtype(self) -> np.dtype:
        return np.dtype(self.x.dtype)

    @property
    def weight_dtype(self) -> np.dtype:
        return np.dtype(self.weight.dtype)


@dataclasses.dataclass(frozen=True)
class LossResults:
    """The results of a forward pass, in float32 (float64 for float64), or their cotangents.

    The first three are the residuals that any backend makes and takes. Of ignored tokens they are zeros.

    Attributes:
      lse: ``[*tokens]``, log Σ exp(logits).
      label_logit: ``[*tokens]``; NaN for a label that is wrong.
      logit_sum: ``[*tokens]``, only with label smoothing.
      total: the sum of the weighted losses, or ``[*tokens]``; ``None`` for statistics alone.
      count: the sum of the weights of tokens that are not ignored; ``None`` unless ``total`` is a sum.
      d_x, d_weight, d_bias: gradients of ``total`` in the shapes of their arrays, if the call keeps them. They are
        computed beside the loss, or by a backend that recomputes in further kernels, which are no part of a compiled
        program that does not use them.
    """

    lse: Any
    label_logit: Any
    logit_sum: Any = None
    total: Any = None
    count: Any = None
    d_x: Any = None
    d_weight: Any = None
    d_bias: Any = None


jax.tree_util.register_dataclass(
    LossResults, data_fields=[field.name for field in dataclasses.fields(LossResults)], meta_fields=[]
)
