"""Gradients from what a kernel keeps of the logits of a block of tokens, instead of the logits.

Of a 16-bit matmul's logits a kernel keeps each class's share of the exponentials of its tile of classes, in the 16 bits
in which the gradient is multiplied: half of the memory, and no overflow, whatever the logits are.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tilewright.kernels.linear_cross_entropy.blocks.logits import Tokens
from tilewright.kernels.linear_cross_entropy.blocks.vocabulary import Block
from tilewright.kernels.linear_cross_entropy.inputs import LossInputs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeptShares:
    """The shares that are kept of the logits z of a block of tokens.

    Attributes:
      shares: ``[n, vocab]``, ``exp(z - reference) · derivative of the soft cap``, in any floating-point dtype.
      references: ``[tiles, n]``, such as the highest logit or lse of a token in each tile of classes.
      width: classes of a tile; the last may have fewer.
    """

    shares: jax.Array
    references: jax.Array
    width: int = dataclasses.field(metadata={"static": True})

    def gradient(
        self, tokens: Tokens, block: Block, *, soft_cap: float | None, epsilon: float | None, dtype: DTypeLike
    ) -> jax.Array:
        """The gradient of ``x · weight + bias`` of a block of classes, in ``dtype``; see ``LogitKernels``."""
        labels, lse, (of_lse, of_label, of_sum), label_logit = tokens
        assert label_logit is not None
        vocab = self.shares.shape[1]
        factors = jnp.exp(self.references - lse).T
        if block.size == vocab:
            # A broadcast, which is one operation with what follows.
            factors = jnp.repeat(factors, self.width, axis=1)[:, :vocab]
        else:
            factors = factors[:, block.classes // self.width]
        probabilities = block.of(self.shares, 1).astype(lse.dtype) * factors
        # Of the label's class the probability and -1 may cancel, so that one is not taken from rounded shares.
        of_own = jnp.exp(label_logit - lse)
        if epsilon is not None:
            probabilities, of_own = (jnp.where(p < epsilon, 0, p) for p in (probabilities, of_own))
        of_own = of_lse * of_own + of_label
        if soft_cap is not None:
            of_own = of_own * (1 - (label_logit / soft_cap) ** 2)
        own = block.classes == labels[:, None]
        gradient = jnp.where(own, of_own[:, None], of_lse[:, None] * probabilities)
        if of_sum is not None:
            gradient = gradient + of_sum[:, None]
        return jnp.where(block.fresh, gradient, 0).astype(dtype)


def narrow_dtype(*operands: Any) -> Any:
    """The dtype in which the gradient of logits is multiplied: bfloat16, which has the range of float32, or float32.

    In float16 small elements would be zeros, also of a loss that is scaled later.
    """
    return jnp.bfloat16 if all(dtype == jnp.bfloat16 for dtype in operands) else jnp.float32


def keeping_reasons(inputs: LossInputs) -> list[str]:
    """Reasons why shares do not give the gradients of a call."""
    if inputs.logits_soft_cap is None:
        return []
    also = {"label_smoothing": inputs.needs_sum, "gradient_epsilon": inputs.gradient_epsilon is not None}
    return [
        f"gradients with logits_soft_cap and {name} are not made from what the forward pass keeps"
        for name, is_given in also.items()
        if is_given
    ]
