"""The interface between a backend's kernels, which compute from logits, and the loops that all backends share."""

from typing import Any, NamedTuple, Protocol

import jax

from tilewright.kernels.linear_cross_entropy.blocks.vocabulary import Block, Head

type Statistics = tuple[jax.Array, jax.Array, jax.Array, Any]
"""lse, the label's logit and the sum of the logits of each token, which is anything without label smoothing; and what
gradients are made from, or ``None``."""


class Tokens(NamedTuple):
    """The operands of the gradients of some tokens' logits, beside these or what was kept of them.

    Attributes:
      lse: infinite for a token that is ignored, whose gradient is then 0.
      cotangents: of a token's statistics; the last is ``None`` without label smoothing.
      label_logit: only where gradients are made from what was kept.
    """

    labels: jax.Array
    lse: jax.Array
    cotangents: tuple[jax.Array, jax.Array, jax.Array | None]
    label_logit: jax.Array | None = None


class LogitKernels(Protocol):
    """The logits of some tokens: their statistics, and their gradients, without all logits in memory.

    An instance has the matrix and the bias as a ``Head``, the options and the config. Tokens are those of a block,
    ``[n, d]``, or all as they lie, ``[*tokens, d]``. Arrays by token are in the dtype of sums. A label is a class; or
    none of the vocabulary, such as ``IGNORED``, and its logit is then 0. Of ignored tokens x is zeros, and statistics
    may be any numbers.

    A gradient is that of ``x · weight + bias``: from the gradient of the logits by the derivative of the soft cap.
    It is in the dtype of sums, or in bfloat16 if x and weight are; and 0 for classes of the block that are not
    ``fresh``.
    """

    @property
    def head(self) -> Head: ...

    def statistics(self, x: jax.Array, labels: jax.Array, *, keep: bool) -> Statistics:
        """The statistics; and with ``keep``, which only blocks of tokens have, what ``kept_gradient`` needs."""
        ...

    def kept_gradient(self, kept: Any, tokens: Tokens, block: Block) -> jax.Array:
        """The gradient of a block of the vocabulary, ``[n, block]``, without a matmul."""
        ...

    def gradient(self, x: jax.Array, tokens: Tokens, block: Block) -> jax.Array:
        """The same from recomputed logits, ``[*tokens, block]``; the block's begin may be traced."""
        ...
