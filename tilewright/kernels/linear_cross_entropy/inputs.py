"""The inputs and results of the backends of vocabulary losses: canonical arrays and static options."""

import dataclasses
import math
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Array, Float, Int32

IGNORED = -1
"""The label of a token that counts nowhere, after ``prepare``; a label that is wrong is the size of the vocabulary."""

GRADIENTS = frozenset({"x", "weight", "bias", "token_weights"})

type Summary = Literal["scalar", "none", "statistics"]


@dataclasses.dataclass(frozen=True, slots=True)
class LossOptions:
    """The options of a call that are static values, not arrays.

    A backend that does not read a field computes without it: each declines what it cannot do, by name.

    Attributes:
      summary: the losses of all tokens as one sum ("scalar") or each ("none"), or statistics of a part of the
        vocabulary alone ("statistics"), in which a label may be of another part and then has the logit 0.
      keeps_gradients: the results have gradients of the sum of the losses.
      is_distributed: tokens may be split over devices by XLA, so a loop over blocks of them would gather them.
      gradient_epsilon: probabilities below it count as zero in gradients; ``None`` for no threshold.
    """

    summary: Summary = "scalar"
    vocab_first: bool = False
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    logits_soft_cap: float | None = None
    gradient_epsilon: float | None = None
    keeps_gradients: bool = False
    is_distributed: bool = False

    @property
    def needs_sum(self) -> bool:
        """True if the sum of a token's logits is among the results."""
        return self.label_smoothing != 0.0


@dataclasses.dataclass(frozen=True)
class LossInputs:
    """A call after ``prepare``; shapes and dtypes hold without further checks.

    Attributes:
      x: ``[*tokens, d]``.
      weight: ``[d, vocab]``, or ``[vocab, d]`` if the options say so.
      labels: from 0 to ``vocab - 1``; ``IGNORED``; or ``vocab`` for a label that is wrong or of another part.
      gradients: to a backward pass, the names of the arrays whose gradients are used.
    """

    x: Float[Array, "*tokens d"]
    weight: Float[Array, "_ _"]
    labels: Int32[Array, "*tokens"]
    bias: Float[Array, " vocab"] | None
    token_weights: Float[Array, "*tokens"] | None
    options: LossOptions
    gradients: frozenset[str] = GRADIENTS

    @property
    def vocab_axis(self) -> int:
        """The axis of the vocabulary in ``weight``."""
        return 0 if self.options.vocab_first else 1

    @property
    def vocab(self) -> int:
        """The size of the vocabulary."""
        return self.weight.shape[self.vocab_axis]


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
      d_x, d_weight, d_bias: gradients of ``total`` in the shapes of their arrays, if the options say so. They are
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
    LossInputs,
    data_fields=["x", "weight", "labels", "bias", "token_weights"],
    meta_fields=["options", "gradients"],
)
jax.tree_util.register_dataclass(
    LossResults, data_fields=[field.name for field in dataclasses.fields(LossResults)], meta_fields=[]
)


@dataclasses.dataclass(frozen=True)
class LossProblem:
    """The sizes and dtypes of a call, for selection."""

    tokens: int
    d: int
    vocab: int
    x_dtype: np.dtype
    weight_dtype: np.dtype
    has_bias: bool
    has_token_weights: bool
    options: LossOptions

    @classmethod
    def of(cls, inputs: LossInputs) -> "LossProblem":
        """The problem of ``inputs``, whose leaves may be arrays, tracers or ``ShapeDtypeStruct``."""
        return cls(
            tokens=math.prod(inputs.x.shape[:-1]),
            d=inputs.x.shape[-1],
            vocab=inputs.vocab,
            x_dtype=np.dtype(inputs.x.dtype),
            weight_dtype=np.dtype(inputs.weight.dtype),
            has_bias=inputs.bias is not None,
            has_token_weights=inputs.token_weights is not None,
            options=inputs.options,
        )
