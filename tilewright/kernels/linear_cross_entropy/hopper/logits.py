"""The kernels of logits of the Hopper backend, as the shared loops call them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.kernels.hopper.matmul.params import MatmulParams
from tilewright.kernels.linear_cross_entropy.blocks.kept import KeptShares
from tilewright.kernels.linear_cross_entropy.blocks.logits import Statistics, Tokens
from tilewright.kernels.linear_cross_entropy.blocks.vocabulary import Block, Head
from tilewright.kernels.linear_cross_entropy.hopper.kernels import logit_gradients, softmax_sums


@dataclasses.dataclass(frozen=True)
class HopperLogits:
    """``LogitKernels`` by two Hopper kernels.

    Attributes:
      statistics_tile, gradient_tile: the configs of both kernels.
    """

    head: Head
    needs_sum: bool
    epsilon: float | None
    statistics_tile: MatmulParams
    gradient_tile: MatmulParams
    sms: int

    def statistics(self, x: jax.Array, labels: jax.Array, *, keep: bool) -> Statistics:
        """The statistics; and with ``keep`` the exponentials of the logits."""
        shape, head = x.shape[:-1], self.head

        # One launch after another for mapped calls, which hold one element's exponentials at a time.
        @jax.custom_batching.sequential_vmap
        def run(x: jax.Array, weight: jax.Array, bias: Any, labels: jax.Array) -> Any:
            return softmax_sums(
                dataclasses.replace(head, weight=weight, bias=bias), x, labels,
                sums_logits=self.needs_sum, keep=keep, tile=self.statistics_tile, sms=self.sms,
            )  # fmt: skip

        sums, shares = run(x.reshape(-1, x.shape[-1]), head.weight, head.bias, labels.reshape(-1))
        # A pass over one number for each token and tile, by XLA.
        lse, label_logit, logit_sum = sums.combined()
        kept = None if shares is None else KeptShares(shares, sums.highest, self.statistics_tile.block_n)
        # The label of no class may be that of a column behind the last class.
        flat = labels.reshape(-1)
        label_logit = jnp.where((flat >= 0) & (flat < self.head.vocab), label_logit, 0)
        logit_sum = jnp.zeros_like(lse) if logit_sum is None else logit_sum
        return lse.reshape(shape), label_logit.reshape(shape), logit_sum.reshape(shape), kept

    def kept_gradient(self, kept: KeptShares, tokens: Tokens, block: Block) -> jax.Array:
        """The gradient of a block of the vocabulary, from its exponentials."""
        return kept.gradient(
            tokens, block, soft_cap=self.head.soft_cap, epsilon=self.epsilon, dtype=self.head.weight.dtype
        )

    def gradient(self, x: jax.Array, tokens: Tokens, block: Block) -> jax.Array:
        """The same from recomputed logits."""
        shape, head = x.shape[:-1], self.head

        @jax.custom_batching.sequential_vmap
        def run(x: jax.Array, weight: jax.Array, bias: Any, labels: jax.Array, *rest: Any) -> jax.Array:
            return logit_gradients(
                dataclasses.replace(head, weight=weight, bias=bias), x, labels, *rest,
                size=block.size, epsilon=self.epsilon, tile=self.gradient_tile, sms=self.sms,
            )  # fmt: skip

        vectors = [None if each is None else each.reshape(-1) for each in tokens.cotangents]
        rows = x.reshape(-1, x.shape[-1])
        found: jax.Array = run(
            rows,
            head.weight,
            head.bias,
            tokens.labels.reshape(-1),
            tokens.lse.reshape(-1),
            vectors,
            block.begin,
            block.first,
        )
        return found.reshape(*shape, block.size)
