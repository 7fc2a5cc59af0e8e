"""The logits of a block of tokens and of the vocabulary in plain XLA, their statistics, and their gradients."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.kernels.linear_cross_entropy.blocks.logits import Statistics, Tokens
from tilewright.kernels.linear_cross_entropy.blocks.vocabulary import Block, Head, block_logits, over_blocks


def before_cap(head: Head, logits: jax.Array, gradient: jax.Array) -> jax.Array:
    """The gradient of ``x · weight + bias``, from that of the logits."""
    if head.scale != 1.0:
        logits, gradient = logits / head.scale, gradient * head.scale
    return gradient if head.soft_cap is None else gradient * (1 - (logits / head.soft_cap) ** 2)


@dataclasses.dataclass(frozen=True)
class XlaLogits:
    """Kernels of the cross-entropy for the shared loops; they keep the logits of tokens.

    Attributes:
      size: classes of a block of the statistics.
      epsilon: probabilities below it count as zero in gradients; ``None`` for no threshold.
    """

    head: Head
    size: int
    epsilon: float | None

    def statistics(self, x: jax.Array, labels: jax.Array, *, keep: bool) -> Statistics:
        """lse, the label's logit and the sum of the logits of each token, and with ``keep`` the logits."""
        head, shape = self.head, x.shape[:-1]

        def step(block: Block, carry: Any) -> Any:
            highest, total, label_logit, logit_sum, kept = carry
            logits = block_logits(head, block, x)
            if kept is not None:
                kept = block.written(kept, logits, kept.ndim - 1)
            masked = jnp.where(block.fresh, logits, -jnp.inf)
            new = jnp.maximum(highest, masked.max(-1))
            # A bias may rule classes out with -inf; as long as a token has no other class, -inf - -inf would be NaN.
            finite = jnp.where(new == -jnp.inf, 0, new)
            total = total * jnp.exp(highest - finite) + jnp.exp(masked - finite[..., None]).sum(-1)
            # A comparison and a sum instead of a gather: the label may be of any block, and XLA fuses it with the sums.
            own = (block.classes == labels[..., None]) & block.fresh
            label_logit = label_logit + jnp.where(own, logits, 0).sum(-1)
            logit_sum = logit_sum + jnp.where(block.fresh, logits, 0).sum(-1)
            return new, total, label_logit, logit_sum, kept

        zeros = jnp.zeros(shape, head.wide)
        kept = jnp.zeros((*shape, head.vocab), head.wide) if keep else None
        init = (jnp.full(shape, -jnp.inf, head.wide), zeros, zeros, zeros, kept)
        operands = (head.weight, head.bias, x, labels)
        highest, total, label_logit, logit_sum, kept = over_blocks(head.vocab, self.size, step, init, operands)
        return jnp.where(highest == -jnp.inf, highest, highest + jnp.log(total)), label_logit, logit_sum, kept

    def kept_gradient(self, kept: Any, tokens: Tokens, block: Block) -> jax.Array:
        """The gradient of a block from the logits."""
        return self._gradient(block.of(kept, kept.ndim - 1), tokens, block)

    def gradient(self, x: jax.Array, tokens: Tokens, block: Block) -> jax.Array:
        """The gradient of a block whose logits are computed again."""
        return self._gradient(block_logits(self.head, block, x), tokens, block)

    def _gradient(self, logits: jax.Array, tokens: Tokens, block: Block) -> jax.Array:
        of_lse, of_label, of_sum = tokens.cotangents
        probabilities = jnp.exp(logits - tokens.lse[..., None])
        # Of the label's class only the probability may be dropped; -1 is always there.
        if self.epsilon is not None:
            probabilities = jnp.where(probabilities < self.epsilon, 0, probabilities)
        own = block.classes == tokens.labels[..., None]
        gradient = of_lse[..., None] * probabilities + jnp.where(own, of_label[..., None], 0)
        if of_sum is not None:
            gradient = gradient + of_sum[..., None]
        return jnp.where(block.fresh, before_cap(self.head, logits, gradient), 0)
