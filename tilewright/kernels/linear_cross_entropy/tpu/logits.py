"""Statistics and gradients of the logits of a block of tokens, by launches of kernels for TPUs."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.kernels.linear_cross_entropy.blocks.kept import narrow_dtype
from tilewright.kernels.linear_cross_entropy.blocks.logits import Statistics, Tokens
from tilewright.kernels.linear_cross_entropy.blocks.vocabulary import Block, Head
from tilewright.kernels.linear_cross_entropy.tpu.kernels import logit_gradients, softmax_sums
from tilewright.kernels.linear_cross_entropy.tpu.params import TpuTile
from tilewright.kernels.op.sharding import varying_as


@dataclasses.dataclass(frozen=True)
class TpuLogits:
    """``LogitKernels`` by two kernels for TPUs; nothing is kept.

    Attributes:
      needs_sum: the sum of the logits is among the statistics.
      epsilon: probabilities below it count as zero in gradients; ``None`` for no threshold.
      statistics_tile, gradient_tile: the tiles of both kernels.
    """

    head: Head
    needs_sum: bool
    epsilon: float | None
    statistics_tile: TpuTile
    gradient_tile: TpuTile

    def statistics(self, x: jax.Array, labels: jax.Array, *, keep: bool) -> Statistics:
        """The statistics."""

        # One launch after another for mapped calls: a mapped kernel has a grid axis more, and blocks of it.
        @jax.custom_batching.sequential_vmap
        def run(x: jax.Array, weight: jax.Array, bias: Any, labels: jax.Array) -> Any:
            return softmax_sums(
                dataclasses.replace(self.head, weight=weight, bias=bias), x, labels,
                sums_logits=self.needs_sum, tile=self.statistics_tile,
            )  # fmt: skip

        operands = (_rows(x), self.head.weight, self.head.bias, labels.reshape(-1))
        lse, label_logit, logit_sum = (each.reshape(labels.shape) for each in varying_as(run(*operands), operands))
        return lse, label_logit, logit_sum, None

    def kept_gradient(self, kept: Any, tokens: Tokens, block: Block) -> jax.Array:
        raise NotImplementedError("kernels for TPUs keep nothing of logits")

    def gradient(self, x: jax.Array, tokens: Tokens, block: Block) -> jax.Array:
        """The gradient of a block from recomputed logits."""

        @jax.custom_batching.sequential_vmap
        def run(
            x: jax.Array, weight: jax.Array, bias: Any, labels: jax.Array, numbers: jax.Array, bounds: jax.Array
        ) -> jax.Array:
            return logit_gradients(
                dataclasses.replace(self.head, weight=weight, bias=bias), x, labels, numbers, bounds,
                size=block.size, sums_logits=self.needs_sum, epsilon=self.epsilon, tile=self.gradient_tile,
                dtype=narrow_dtype(x.dtype, weight.dtype),
            )  # fmt: skip

        given = [jnp.zeros_like(tokens.lse) if each is None else each for each in (tokens.lse, *tokens.cotangents)]
        numbers = jnp.stack([each.astype(jnp.float32).reshape(-1) for each in given], axis=1)
        bounds = jnp.stack([block.begin, block.first]).astype(jnp.int32)
        operands = (_rows(x), self.head.weight, self.head.bias, tokens.labels.reshape(-1), numbers, bounds)
        found: jax.Array = varying_as(run(*operands), operands)
        return found.reshape(*tokens.labels.shape, block.size)


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
