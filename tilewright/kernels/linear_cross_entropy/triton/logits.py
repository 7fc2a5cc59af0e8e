"""Statistics and gradients of the logits of a block of tokens, by launches of Triton kernels."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.kernels.linear_cross_entropy.blocks.kept import KeptShares, narrow_dtype
from tilewright.kernels.linear_cross_entropy.blocks.logits import Statistics, Tokens
from tilewright.kernels.linear_cross_entropy.blocks.vocabulary import Block, Head
from tilewright.kernels.op.sharding import varying_as
from tilewright.kernels.triton import launch
from tilewright.kernels.triton.matmul import TritonTile, fitted, tl_precision

GROUP = 8
"""Tiles of rows whose programs are beside each other for the same classes."""


@dataclasses.dataclass(frozen=True)
class TritonLogits:
    """Kernels of the cross-entropy for the shared loops.

    Attributes:
      of_statistics, of_gradient: the tiles of both kernels.
      needs_sum: the sum of the logits is among the statistics.
      epsilon: probabilities below it count as zero in gradients; ``None`` for no threshold.
    """

    head: Head
    of_statistics: TritonTile
    of_gradient: TritonTile
    needs_sum: bool
    epsilon: float | None

    def statistics(self, x: jax.Array, labels: jax.Array, *, keep: bool) -> Statistics:
        """The statistics, from those of tiles of classes; with ``keep`` also each class's share of its tile."""
        tokens, vocab = labels.shape, self.head.vocab
        rows, flat = self._rows(x), labels.reshape(math.prod(tokens))
        tile = fitted(self.of_statistics, vocab, x.shape[-1])

        # One launch after another for mapped calls, which hold one element's logits at a time.
        @jax.custom_batching.sequential_vmap
        def run(x: jax.Array, weight: jax.Array, bias: jax.Array, labels: jax.Array) -> tuple[jax.Array, ...]:
            return self._launch_statistics(tile, x, weight, bias, labels, keep)

        operands = (rows, self.head.weight, self._bias(), flat)
        partial_lse, label_logit, partial_sum, shares = varying_as(run(*operands), operands)
        # Each tile of classes has a log-sum-exp of its own: XLA combines them in one order, so the result repeats.
        lse = jax.nn.logsumexp(partial_lse, 0)
        # No program writes the logit of a label that is not a class.
        label_logit = jnp.where((flat >= 0) & (flat < vocab), label_logit, 0)
        logit_sum = partial_sum.sum(0) if self.needs_sum else jnp.zeros_like(lse)
        kept = KeptShares(shares, partial_lse, tile.columns) if keep else None
        return lse.reshape(tokens), label_logit.reshape(tokens), logit_sum.reshape(tokens), kept

    def kept_gradient(self, kept: Any, tokens: Tokens, block: Block) -> jax.Array:
        """The gradient of a block in one pass over the shares, by XLA."""
        result: jax.Array = kept.gradient(
            tokens, block, soft_cap=self.head.soft_cap, epsilon=self.epsilon, dtype=self._narrow
        )
        return result

    def gradient(self, x: jax.Array, tokens: Tokens, block: Block) -> jax.Array:
        """The gradient of a block whose logits are computed again."""
        shape = tokens.labels.shape
        tile = fitted(self.of_gradient, block.size, x.shape[-1])
        # A begin that is known to be aligned lets a kernel load several classes at once.
        align = math.gcd(block.size, self.head.width - block.size, 16)

        @jax.custom_batching.sequential_vmap
        def run(*arrays: jax.Array) -> jax.Array:
            return self._launch_gradient(tile, block.size, align, arrays)

        of_lse, of_label, of_sum = tokens.cotangents
        by_token = [tokens.labels, tokens.lse, of_lse, of_label, *(() if of_sum is None else (of_sum,))]
        given = [each.reshape(math.prod(shape)) for each in by_token]
        if of_sum is None:
            # A launch has all operands; those that are not read have no elements.
            given.append(jnp.zeros((0,), jnp.float32))
        # In units of `align`, which the kernel multiplies back: the compiler then sees that addresses are aligned.
        bounds = jnp.stack([block.begin // align, block.first]).astype(jnp.int32)
        operands = (self._rows(x), self.head.weight, self._bias(), *given, bounds)
        out = varying_as(run(*operands), operands)
        return out.reshape(*shape, block.size)

    @property
    def _narrow(self) -> Any:
        return narrow_dtype(self.head.weight.dtype)

    def _rows(self, x: jax.Array) -> jax.Array:
        return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])

    def _bias(self) -> jax.Array:
        bias = self.head.bias
        return jnp.zeros((0,), jnp.float32) if bias is None else bias.astype(jnp.float32)

    def _constants(self, tile: TritonTile, d: int) -> dict[str, Any]:
        return {
            "D": d,
            "VOCAB": self.head.vocab,
            "WIDTH": self.head.width,
            "D_STRIDE": 1 if self.head.vocab_axis == 0 else self.head.width,
            "VOCAB_STRIDE": d if self.head.vocab_axis == 0 else 1,
            "BIAS": self.head.bias is not None,
            "CAP": self.head.soft_cap or 0.0,
            "SUM": self.needs_sum,
            "BLOCK_ROWS": tile.rows,
            "BLOCK_V": tile.columns,
            "BLOCK_K": tile.depth,
            "GROUP": GROUP,
            "PRECISION": tl_precision(),
        }

    def _launch_statistics(
        self, tile: TritonTile, x: jax.Array, weight: jax.Array, bias: jax.Array, labels: jax.Array, keep: bool
    ) -> tuple[jax.Array, ...]:
        from tilewright.kernels.linear_cross_entropy.triton import kernels

        rows, vocab = x.shape[0], self.head.vocab
        row_tiles, columns = -(-rows // tile.rows), -(-vocab // tile.columns)
        return launch(
            kernels.tile_statistics,
            [x, weight, bias, labels],
            [
                jax.ShapeDtypeStruct((columns, rows), jnp.float32),
                jax.ShapeDtypeStruct((rows,), jnp.float32),
                jax.ShapeDtypeStruct((columns, rows) if self.needs_sum else (0,), jnp.float32),
                jax.ShapeDtypeStruct((rows, self.head.width) if keep else (0,), self._narrow),
            ],
            grid=[row_tiles * columns],
            scalars={"rows": rows, "tiles": row_tiles},
            constants=self._constants(tile, x.shape[1]) | {"KEEP": keep},
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )

    def _launch_gradient(self, tile: TritonTile, size: int, align: int, arrays: tuple[jax.Array, ...]) -> jax.Array:
        from tilewright.kernels.linear_cross_entropy.triton import kernels

        rows, d = arrays[0].shape
        row_tiles = -(-rows // tile.rows)
        constants = {"EPSILON": self.epsilon or 0.0, "SIZE": size, "ALIGN": align}
        (out,) = launch(
            kernels.tile_gradient,
            arrays,
            [jax.ShapeDtypeStruct((rows, size), self._narrow)],
            grid=[row_tiles * -(-size // tile.columns)],
            scalars={"rows": rows, "tiles": row_tiles},
            constants=self._constants(tile, d) | constants,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        return out
