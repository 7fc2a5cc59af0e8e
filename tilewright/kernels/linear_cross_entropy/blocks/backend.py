"""The passes of every backend of the cross-entropy: loops over blocks of tokens and of the vocabulary over its kernels.

| gradients | their matmuls beside the one of the loss |
| --- | --- |
| kept: a block of tokens keeps what its forward pass made of the logits | 2, in the forward pass |
| recomputed in the backward pass | 3 |
| recomputed in the forward pass, where all tokens are one block or the backend keeps nothing | 3, if they are used |
"""

import abc
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tilewright.kernels.linear_cross_entropy.blocks.logits import LogitKernels, Tokens
from tilewright.kernels.linear_cross_entropy.blocks.tokens import TokenBlocks, rows_of, written
from tilewright.kernels.linear_cross_entropy.blocks.vocabulary import Block, Head, Totals, add_gradients, over_blocks
from tilewright.kernels.linear_cross_entropy.inputs import IGNORED, LossInputs, LossResults
from tilewright.kernels.linear_cross_entropy.losses import (
    completed,
    kept_gradients,
    of_statistics,
    token_weights_gradient,
)
from tilewright.kernels.op.backend import Backend
from tilewright.ops.kernel.arrays import is_symbolic

SERVED_BY_LOOPS = frozenset({"token_weights", "z_loss", "is_part", "keeps_gradients"})
"""The options that the loops compute whatever the kernels are."""


class Blocks(Protocol):
    """Fields of a config that the loops read.

    ``block_tokens`` is ``None`` for all tokens in place, with nothing kept.
    """

    @property
    def block_tokens(self) -> int | None: ...

    @property
    def block_vocab(self) -> int: ...


class ForwardParams(Blocks, Protocol):
    @property
    def keep(self) -> bool:
        """True if gradients that the forward pass computes come from what it keeps of a block of tokens."""
        ...


class BackwardParams(Blocks, Protocol):
    @property
    def recompute(self) -> bool: ...


class BlockedCrossEntropy[Forward: ForwardParams, Backward: BackwardParams](
    Backend[LossInputs, LossResults, Forward, Backward]
):
    """A backend whose kernels compute statistics of logits and gradients of them."""

    @abc.abstractmethod
    def kernels(self, inputs: LossInputs, params: Forward | Backward) -> LogitKernels:
        """The kernels of a pass."""

    def aligned_head(self, inputs: LossInputs, params: Forward | Backward) -> Head:
        """The matrix, padded if the pass makes gradients, or if its rows are along the vocabulary."""
        statistics_alone = isinstance(params, self.forward_params) and not inputs.keeps_gradients
        head = head_of(inputs)
        return head if statistics_alone and inputs.vocab_first else head.aligned()

    def forward(self, inputs: LossInputs, params: Forward) -> LossResults:
        """The results, with the gradients of the sum if the call keeps them."""
        kernels, size = self.kernels(inputs, params), _block_tokens(inputs, params)
        if inputs.keeps_gradients and params.keep and size is not None:
            return _forward_keeping(inputs, kernels, size, params.block_vocab)
        found: tuple[jax.Array, ...]
        if size is None:
            found = kernels.statistics(_selected(inputs), inputs.labels, keep=False)[:3]
        else:
            found = _statistics(inputs, kernels, size)
        results = completed(inputs, *found)
        if not inputs.keeps_gradients:
            return results
        # A later pass over the same logits: a compiled program whose backward pass recomputes does not have it.
        one = LossResults(total=jnp.ones((), inputs.wide))
        kept = _recomputed(inputs, results, one, kernels, params, dtype=inputs.wide)
        return completed(inputs, *found, **{f"d_{name}": each for name, each in kept.items()})

    def backward(
        self, inputs: LossInputs, results: LossResults, cotangents: LossResults, params: Backward
    ) -> dict[str, Any]:
        """Gradients of those arrays that are used; a sum's that the forward pass computed, or recomputed ones."""
        if inputs.keeps_gradients and not params.recompute:
            found = kept_gradients(results, cotangents)
        else:
            found = _recomputed(inputs, results, cotangents, self.kernels(inputs, params), params)
        # Of each token's weight the gradient is its loss, which the statistics give without logits.
        found["token_weights"] = token_weights_gradient(inputs, results, cotangents)
        return {
            name: None if each is None or not inputs.wants(name) else each.astype(inputs.arrays[name].dtype)
            for name, each in found.items()
        }


def head_of(inputs: LossInputs) -> Head:
    """The matrix, with what becomes of its logits."""
    return Head(inputs.weight, inputs.bias, inputs.vocab_axis, inputs.logits_soft_cap, inputs.wide)


def _selected(inputs: LossInputs) -> jax.Array:
    """x with zeros in place of tokens that are ignored: selected, since 0 · NaN is NaN."""
    return jnp.where(inputs.valid[..., None], inputs.x, 0)


def _block_tokens(inputs: LossInputs, params: Blocks) -> int | None:
    """Tokens of a block; ``None`` for all as they lie."""
    return None if 0 in inputs.labels.shape else params.block_tokens


def _flat(inputs: LossInputs) -> LossInputs:
    """The inputs with one axis of tokens."""
    weights = None if inputs.token_weights is None else inputs.token_weights.reshape(-1)
    x = inputs.x.reshape(inputs.tokens, inputs.x.shape[-1])
    return inputs.replace(x=x, labels=inputs.labels.reshape(-1), token_weights=weights)


def _statistics(inputs: LossInputs, kernels: LogitKernels, block_tokens: int) -> tuple[jax.Array, ...]:
    """The statistics of all tokens, block by block."""
    flat = _flat(inputs)
    blocks = TokenBlocks.of(flat.valid, block_tokens)

    def step(begin: jax.Array, rows: jax.Array, found: Any) -> Any:
        parts = kernels.statistics(rows_of(flat.x, rows), rows_of(flat.labels, rows, IGNORED), keep=False)[:3]
        return written(found, parts, begin)

    init = tuple(blocks.empty((), inputs.wide) for _ in range(3))
    found = blocks.over(step, init, (inputs.weight, inputs.bias, flat.x, flat.labels))
    statistics: tuple[jax.Array, ...] = blocks.by_token(found, inputs.token_shape)
    return statistics


def _forward_keeping(inputs: LossInputs, kernels: LogitKernels, block_tokens: int, block_vocab: int) -> LossResults:
    """Blocks of tokens, each with the gradients of its losses from what it kept."""
    head, flat = kernels.head, _flat(inputs)
    blocks = TokenBlocks.of(flat.valid, block_tokens)
    one = LossResults(total=jnp.ones((), head.wide))

    def step(begin: jax.Array, rows: jax.Array, carry: Any) -> Any:
        found, d_x, totals = carry
        x, labels = rows_of(flat.x, rows), rows_of(flat.labels, rows, IGNORED)
        *parts, kept = kernels.statistics(x, labels, keep=True)
        # These are gradients of Σ w t. The divisor of the mean and the cotangent are one factor in the backward pass.
        weights = rows_of(flat.token_weights, rows)
        cotangents = of_statistics(inputs.replace(labels=labels, token_weights=weights), parts[0], one)
        tokens = Tokens(labels, jnp.where(labels == IGNORED, jnp.inf, parts[0]), cotangents, parts[1])
        of_d_x, totals = _gradients(head, x, kernels.kept_gradient, (kept, tokens), totals, block_vocab, complete=False)
        return *written((found, d_x), (tuple(parts), of_d_x), begin), totals

    statistics = tuple(blocks.empty((), head.wide) for _ in range(3))
    d_x: Any = blocks.empty(flat.x.shape[1:], head.wide)
    totals = Totals.zeros(head, inputs.wants, head.wide)
    operands = (head.weight, head.bias, flat.x, flat.labels, flat.token_weights)
    found, d_x, totals = blocks.over(step, (statistics, d_x, totals), operands)
    found, d_x = blocks.by_token((found, d_x), inputs.token_shape)
    totals = totals.of_classes(head)
    return completed(inputs, *found, d_x=d_x, d_weight=totals.weight, d_bias=totals.bias)


def _recomputed(
    inputs: LossInputs,
    results: LossResults,
    cotangents: LossResults,
    kernels: LogitKernels,
    params: Blocks,
    dtype: DTypeLike | None = None,
) -> dict[str, Any]:
    """The gradients of x, weight and bias from recomputed logits; that of the matrix in ``dtype`` if it is given."""
    head, wants_x, block_tokens = kernels.head, inputs.wants("x"), _block_tokens(inputs, params)
    lse = results.statistics[0]
    parts = of_statistics(inputs, lse, cotangents)
    lse = jnp.where(inputs.labels == IGNORED, jnp.inf, lse)

    def gradients(x: Any, tokens: Tokens, totals: Totals, complete: bool) -> tuple[Any, Totals]:
        return _gradients(
            head, x, kernels.gradient, (x, tokens), totals, params.block_vocab, wants_x=wants_x, complete=complete
        )

    if block_tokens is None:
        # Each block of the matrix's gradient is complete at once, and is kept as it is returned.
        totals = Totals.zeros(head, inputs.wants, dtype or inputs.weight.dtype)
        d_x, totals = gradients(_selected(inputs), Tokens(inputs.labels, lse, parts), totals, True)
        totals = totals.of_classes(head)
        return {"x": d_x, "weight": totals.weight, "bias": totals.bias}
    whole = _flat(inputs)
    parts, lse = jax.tree.map(lambda x: x.reshape(-1), (parts, lse))
    blocks = TokenBlocks.of(whole.valid, block_tokens)
    # With one block of tokens a block of the matrix's gradient is complete at once, and needs no sum in float32.
    complete = not is_symbolic(whole.tokens) and whole.tokens <= block_tokens

    def step(begin: jax.Array, rows: jax.Array, carry: Any) -> Any:
        d_x, totals = carry
        of_parts = rows_of(parts, rows)
        tokens = Tokens(rows_of(whole.labels, rows, IGNORED), rows_of(lse, rows, jnp.inf), of_parts)
        of_d_x, totals = gradients(rows_of(whole.x, rows), tokens, totals, complete)
        return written(d_x, of_d_x, begin), totals

    totals = Totals.zeros(head, inputs.wants, dtype or (inputs.weight.dtype if complete else head.wide))
    d_x = blocks.empty(whole.x.shape[1:], head.wide) if wants_x else None
    operands = (head.weight, head.bias, whole.x, whole.labels, lse, parts)
    d_x, totals = blocks.over(step, (d_x, totals), operands)
    totals = totals.of_classes(head)
    return {"x": blocks.by_token(d_x, inputs.token_shape), "weight": totals.weight, "bias": totals.bias}


def _gradients(
    head: Head,
    x: jax.Array,
    function: Callable[..., jax.Array],
    operands: tuple[Any, ...],
    totals: Totals,
    size: int,
    *,
    wants_x: bool = True,
    complete: bool,
) -> tuple[Any, Totals]:
    """The gradient of x, in the wide dtype, and the other gradients with those of these tokens added.

    Args:
      function: of the operands and of a block of the vocabulary, the block's gradient of ``x · weight + bias``.
    """

    def step(block: Block, carry: Any) -> Any:
        d_x, totals = carry
        return add_gradients(head, block, x, function(*operands, block), d_x, totals, complete=complete)

    init = (jnp.zeros(x.shape, head.wide) if wants_x else None, totals)
    arrays = (head.weight, head.bias, x, operands)
    return over_blocks(head.width, size, step, init, arrays, padding=head.padding)
