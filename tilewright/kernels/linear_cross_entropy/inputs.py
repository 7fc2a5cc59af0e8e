"""The inputs and results of the backends of vocabulary losses: canonical arrays and static options."""

import abc
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from tilewright.kernels.numerics.dots import accumulator
from tilewright.kernels.op.inputs import OpInputs, static

IGNORED = -1
"""The label of a token that counts nowhere, after ``prepare``; a label that is wrong is the size of the vocabulary."""

type Reduction = Literal["mean", "sum", "none"]


class VocabularyInputs(OpInputs, abc.ABC):
    """A call of any of the losses.

    Attributes:
      heads: the names of the tokens' vectors ``[*tokens, d]`` and of their matrix, which is ``[d, vocab]``, or
        ``[vocab, d]`` with ``vocab_first``; of each linear head.
      is_part: the vocabulary is a part of the whole one, and the results are its statistics.
      is_distributed: tokens may be split over devices by XLA, so a loop over blocks of them would gather them.
    """

    heads: ClassVar[tuple[tuple[str, str], ...]]

    vocab_first: bool = static(default=False, kw_only=True)
    logits_soft_cap: float | None = static(default=None, kw_only=True)
    is_part: bool = static(default=False, kw_only=True)
    is_distributed: bool = static(default=False, role="call", kw_only=True)
    reduction: Reduction = static(default="mean", role="call", kw_only=True)

    @property
    def summary(self) -> Literal["scalar", "none", "statistics"]:
        """The form of the results.

        The losses of all tokens as one sum ("scalar") or each ("none"), or statistics of a part of the vocabulary alone
        ("statistics").
        """
        if self.is_part:
            return "statistics"
        return "none" if self.reduction == "none" else "scalar"

    @property
    @abc.abstractmethod
    def valid(self) -> Any:
        """True for tokens that count."""

    @property
    @abc.abstractmethod
    def needs_sum(self) -> bool:
        """True if the third statistic of a token, a sum over the vocabulary, is among the results."""

    @abc.abstractmethod
    def weights(self) -> Any:
        """The weight of each token, 0 for those that do not count, whose own weights may be anything."""

    @abc.abstractmethod
    def losses(self, statistics: Sequence[Any], vocab: int) -> Any:
        """The loss of each token, without its weight; ``vocab`` is the size of the vocabulary with all its parts."""

    @property
    def splits_vocabulary(self) -> bool:
        """True if devices may have parts of the vocabulary."""
        return not self.is_part

    @property
    def keeps_gradients(self) -> bool:
        """True if the results have gradients of the sum of the losses."""
        return False

    @property
    def return_lse(self) -> bool:
        """True if lse of each token is returned, too."""
        return False

    @functools.cached_property
    def head_arrays(self) -> list[tuple[Any, Any]]:
        """The vectors and the matrix of each head."""
        return [(self.arrays[x], self.arrays[weight]) for x, weight in self.heads]

    @functools.cached_property
    def token_shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.arrays[self.heads[0][0]].shape
        return shape[:-1]

    @functools.cached_property
    def tokens(self) -> int:
        """The number of tokens."""
        return math.prod(self.token_shape)

    @functools.cached_property
    def vocab_axis(self) -> int:
        """The axis of the vocabulary in a matrix."""
        return 0 if self.vocab_first else 1

    @functools.cached_property
    def vocab_axes(self) -> dict[str, int]:
        """The axis of the vocabulary in each array that may have one; the other arrays begin with the tokens."""
        return {weight: self.vocab_axis for _, weight in self.heads} | {"bias": 0}

    @functools.cached_property
    def vocab(self) -> int:
        """The size of the vocabulary."""
        size: int = self.arrays[self.heads[0][1]].shape[self.vocab_axis]
        return size

    @functools.cached_property
    def wide(self) -> np.dtype:
        """The dtype of logits, sums and losses."""
        return accumulator(*(array.dtype for head in self.head_arrays for array in head))


class LossInputs(VocabularyInputs):
    """A call of the cross-entropy after ``prepare``; shapes and dtypes hold without further checks.

    Attributes:
      labels: from 0 to ``vocab - 1``; ``IGNORED``; or ``vocab`` for a label that is wrong or of another part, which
        has the logit 0 if the vocabulary is a part.
      gradient_epsilon: probabilities below it count as zero in gradients; ``None`` for no threshold.
      keeps_gradients: the results have gradients of the sum of the losses.
    """

    heads = (("x", "weight"),)

    x: Float[Array, "*tokens d"]
    weight: Float[Array, "_ _"]
    labels: Int32[Array, "*tokens"]
    bias: Float[Array, " vocab"] | None = None
    token_weights: Float[Array, "*tokens"] | None = None
    label_smoothing: float = static(default=0.0)
    z_loss: float = static(default=0.0)
    gradient_epsilon: float | None = static(default=None)
    keeps_gradients: bool = static(default=False)
    return_lse: bool = static(default=False, role="call")

    @property
    def valid(self) -> Any:
        return self.labels != IGNORED

    @property
    def needs_sum(self) -> bool:
        return self.label_smoothing != 0.0

    @property
    def splits_vocabulary(self) -> bool:
        # A probability below ``gradient_epsilon`` is known where the whole vocabulary is.
        return not self.is_part and self.gradient_epsilon is None

    def weights(self) -> Any:
        valid, given = self.valid, self.token_weights
        return valid.astype(self.wide) if given is None else jnp.where(valid, given.astype(self.wide), 0)

    def losses(self, statistics: Sequence[Any], vocab: int) -> Any:
        lse, label_logit, logit_sum = statistics
        # Take the difference first: the large terms cancel before a small one is added.
        loss = lse - label_logit
        if self.label_smoothing and logit_sum is not None:
            loss = loss + self.label_smoothing * (label_logit - logit_sum / vocab)
        return loss + self.z_loss * lse**2 if self.z_loss else loss

    @functools.cached_property
    def d(self) -> int:
        return self.x.shape[-1]


class KlInputs(VocabularyInputs):
    """A call of the divergence after ``prepare``.

    Attributes:
      mask: ``[*tokens]``, False for tokens that count nowhere.
    """

    heads = (("student_x", "student_weight"), ("teacher_x", "teacher_weight"))

    student_x: Float[Array, "*tokens d"]
    student_weight: Float[Array, "_ _"]
    teacher_x: Float[Array, "*tokens e"]
    teacher_weight: Float[Array, "_ _"]
    mask: Bool[Array, "*tokens"] | None = None
    token_weights: Float[Array, "*tokens"] | None = None
    temperature: float = static(default=1.0)

    @property
    def valid(self) -> Any:
        return jnp.ones(self.token_shape, bool) if self.mask is None else self.mask

    @property
    def needs_sum(self) -> bool:
        return True

    def weights(self) -> Any:
        given = jnp.ones((), self.wide) if self.token_weights is None else self.token_weights.astype(self.wide)
        return jnp.where(self.valid, given, 0)

    def losses(self, statistics: Sequence[Any], vocab: int) -> Any:
        student_lse, teacher_lse, difference = statistics
        return difference - teacher_lse + student_lse


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossResults:
    """The results of a forward pass, in float32 (float64 for float64), or their cotangents.

    Attributes:
      statistics: of the logits of each token, ``[*tokens]``, zeros where it does not count: the residuals that any
        backend makes and takes. Of the cross-entropy log Σ exp(logits), the label's logit, NaN for a label that is
        wrong, and only with label smoothing the sum of the logits; of the divergence lse of student and of teacher, and
        their difference (``losses.py``).
      total: the sum of the weighted losses, or ``[*tokens]``; ``None`` if only statistics are wanted.
      count: the sum of the weights of tokens that count; ``None`` unless ``total`` is a sum.
      d_x, d_weight, d_bias: gradients of ``total`` in the shapes of their arrays, if the call keeps them. They are
        computed beside the loss, or by a backend that recomputes in further kernels, which are no part of a compiled
        program that does not use them.
    """

    statistics: tuple[Any, Any, Any] = (None, None, None)
    total: Any = None
    count: Any = None
    d_x: Any = None
    d_weight: Any = None
    d_bias: Any = None
