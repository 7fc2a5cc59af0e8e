"""The cross-entropy in two loops, over blocks of tokens and over blocks of the vocabulary, with any backend's kernels.

| gradients | their matmuls beside the one of the loss |
| --- | --- |
| kept: a block of tokens keeps what its forward pass made of the logits | 2, in the forward pass |
| recomputed in the backward pass | 3 |
| recomputed in the forward pass, where all tokens are one block or the backend keeps nothing | 3, if they are used |
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tilewright.kernels.linear_cross_entropy.blocks.logits import LogitKernels
from tilewright.kernels.linear_cross_entropy.blocks.tokens import TokenBlocks, rows_of, written
from tilewright.kernels.linear_cross_entropy.blocks.vocabulary import Block, Head, Totals, add_gradients, over_blocks
from tilewright.kernels.linear_cross_entropy.inputs import IGNORED, LossInputs, LossResults
from tilewright.kernels.linear_cross_entropy.losses import (
    completed,
    of_statistics,
    token_weights_gradient,
    wide_dtype,
)
from tilewright.ops.kernel.arrays import is_symbolic


def forward(
    inputs: LossInputs, kernels: LogitKernels, *, block_tokens: int | None, block_vocab: int, keep: bool = True
) -> LossResults:
    """The results of a forward pass, with the gradients of the sum if the call keeps them.

    Args:
      block_tokens: tokens of a block; ``None`` for all as they lie, of which nothing is kept.
      block_vocab: classes of a block, of gradients.
      keep: gradients come from what the kernels keep.
    """
    keeps = inputs.keeps_gradients
    if keeps and keep and not _is_whole(inputs, block_tokens):
        assert block_tokens is not None
        return _forward_keeping(inputs, kernels, block_tokens, block_vocab)
    if _is_whole(inputs, block_tokens):
        found: tuple[jax.Array, ...] = kernels.statistics(selected(inputs.x, inputs.labels), inputs.labels, keep=False)[
            :3
        ]
    else:
        assert block_tokens is not None
        found = _statistics(inputs, kernels, block_tokens)
    results = completed(inputs, *found)
    if not keeps:
        return results
    # A later pass over the same logits: a compiled program whose backward pass recomputes does not have it.
    wide = wide_dtype(inputs)
    one = LossResults(None, None, total=jnp.ones((), wide))
    kept = _recomputed(inputs, results, one, kernels, block_tokens, block_vocab, dtype=wide)
    return completed(inputs, *found, **{f"d_{name}": each for name, each in kept.items()})


def backward(
    inputs: LossInputs,
    results: LossResults,
    cotangents: LossResults,
    kernels: LogitKernels,
    *,
    block_tokens: int | None,
    block_vocab: int,
    recompute: bool,
) -> dict[str, Any]:
    """Gradients of those arrays that are used; a sum's that the forward pass computed, or recomputed ones."""
    if inputs.keeps_gradients and not recompute:
        # In float32 until here, so that a factor such as a loss scale meets no rounded gradients.
        found = {name: getattr(results, f"d_{name}") for name in ("x", "weight", "bias")}
        found = {name: None if each is None else each * cotangents.total for name, each in found.items()}
    else:
        found = _recomputed(inputs, results, cotangents, kernels, block_tokens, block_vocab)
    # Of each token's weight the gradient is its loss, which the statistics give without logits.
    found["token_weights"] = token_weights_gradient(inputs, results, cotangents)
    arrays = {name: getattr(inputs, name) for name in found}
    return {
        name: None if each is None or not inputs.wants(name) else each.astype(arrays[name].dtype)
        for name, each in found.items()
    }


def head_of(inputs: LossInputs) -> Head:
    """The matrix, with what becomes of its logits."""
    return Head(inputs.weight, inputs.bias, inputs.vocab_axis, inputs.logits_soft_cap, wide_dtype(inputs))


def selected(x: jax.Array, labels: jax.Array) -> jax.Array:
    """x with zeros in place of tokens that are ignored: selected, since 0 · NaN is NaN."""
    return jnp.where((labels != IGNORED)[..., None], x, 0)


def _is_whole(inputs: LossInputs, block_tokens: int | None) -> bool:
    return block_tokens is None or 0 in inputs.labels.shape


def _flat(inputs: LossInputs) -> tuple[jax.Array, jax.Array, Any]:
    """x, labels and weights with one axis of tokens."""
    weights = None if inputs.token_weights is None else inputs.token_weights.reshape(-1)
    return inputs.x.reshape(-1, inputs.x.shape[-1]), inputs.labels.reshape(-1), weights


def _statistics(inputs: LossInputs, kernels: LogitKernels, block_tokens: int) -> tuple[jax.Array, ...]:
    """The statistics of all tokens, block by block."""
    wide = wide_dtype(inputs)
    x, labels, _ = _flat(inputs)
    blocks = TokenBlocks.of(labels != IGNORED, block_tokens)

    def step(begin: jax.Array, rows: jax.Array, found: Any) -> Any:
        parts = kernels.statistics(rows_of(x, rows), rows_of(labels, rows, IGNORED), keep=False)[:3]
        return tuple(written(each, part, begin) for each, part in zip(found, parts, strict=True))

    init = tuple(blocks.empty((), wide) for _ in range(3))
    found = blocks.over(step, init, (inputs.weight, inputs.bias, x, labels))
    return tuple(blocks.by_token(each).reshape(inputs.labels.shape) for each in found)


def _forward_keeping(inputs: LossInputs, kernels: LogitKernels, block_tokens: int, block_vocab: int) -> LossResults:
    """Blocks of tokens, each with the gradients of its losses from what it kept."""
    head = head_of(inputs)
    x, labels, token_weights = _flat(inputs)
    blocks = TokenBlocks.of(labels != IGNORED, block_tokens)
    one = LossResults(None, None, total=jnp.ones((), head.wide))

    def step(begin: jax.Array, rows: jax.Array, carry: Any) -> Any:
        found, d_x, totals = carry
        of_x, of_labels = rows_of(x, rows), rows_of(labels, rows, IGNORED)
        *parts, kept = kernels.statistics(of_x, of_labels, keep=True)
        # The gradients of Σ w t: what it is divided by, and its own cotangent, are one factor of the backward pass.
        weights = None if token_weights is None else rows_of(token_weights, rows)
        cotangents = of_statistics(inputs, of_labels, weights, parts[0], one)
        lse = jnp.where(of_labels == IGNORED, jnp.inf, parts[0])

        def of_block(block: Block) -> jax.Array:
            return kernels.kept_gradient(kept, of_labels, lse, cotangents, parts[1], block)

        operands = (kept, of_labels, lse, cotangents, parts[1])
        of_d_x, totals = _gradients(head, of_x, of_block, operands, totals, block_vocab, complete=False)
        found = tuple(written(each, part, begin) for each, part in zip(found, parts, strict=True))
        return found, written(d_x, of_d_x, begin), totals

    statistics = tuple(blocks.empty((), head.wide) for _ in range(3))
    d_x: Any = blocks.empty(x.shape[1:], head.wide)
    totals = Totals.zeros(head, inputs.wants, head.wide)
    operands = (head.weight, head.bias, x, labels, token_weights)
    found, d_x, totals = blocks.over(step, (statistics, d_x, totals), operands)
    parts = [blocks.by_token(each).reshape(inputs.labels.shape) for each in found]
    d_x = blocks.by_token(d_x).reshape(inputs.x.shape)
    return completed(inputs, *parts, d_x=d_x, d_weight=totals.weight, d_bias=totals.bias)


def _recomputed(
    inputs: LossInputs,
    results: LossResults,
    cotangents: LossResults,
    kernels: LogitKernels,
    block_tokens: int | None,
    block_vocab: int,
    dtype: DTypeLike | None = None,
) -> dict[str, Any]:
    """The gradients of x, weight and bias from recomputed logits; that of the matrix in ``dtype`` if it is given."""
    head, wants_x = head_of(inputs), inputs.wants("x")
    parts = of_statistics(inputs, inputs.labels, inputs.token_weights, results.lse, cotangents)
    lse = jnp.where(inputs.labels == IGNORED, jnp.inf, results.lse)

    def gradients(x: Any, labels: Any, lse: Any, parts: Any, totals: Totals, complete: bool) -> tuple[Any, Totals]:
        def of_block(block: Block) -> jax.Array:
            return kernels.gradient(x, labels, lse, parts, block)

        operands = (x, labels, lse, parts)
        return _gradients(head, x, of_block, operands, totals, block_vocab, wants_x=wants_x, complete=complete)

    if _is_whole(inputs, block_tokens):
        # Each block of the matrix's gradient is complete at once, and is kept as it is returned.
        totals = Totals.zeros(head, inputs.wants, dtype or inputs.weight.dtype)
        x = selected(inputs.x, inputs.labels)
        d_x, totals = gradients(x, inputs.labels, lse, parts, totals, True)
        return {"x": d_x, "weight": totals.weight, "bias": totals.bias}
    assert block_tokens is not None
    x, labels, _ = _flat(inputs)
    flat = [None if each is None else each.reshape(-1) for each in parts]
    lse = lse.reshape(-1)
    blocks = TokenBlocks.of(labels != IGNORED, block_tokens)
    # With one block of tokens a block of the matrix's gradient is complete at once, and needs no sum in float32.
    complete = not is_symbolic(labels.shape[0]) and labels.shape[0] <= block_tokens

    def step(begin: jax.Array, rows: jax.Array, carry: Any) -> Any:
        d_x, totals = carry
        of_parts = tuple(None if each is None else rows_of(each, rows) for each in flat)
        of_labels, of_lse = rows_of(labels, rows, IGNORED), rows_of(lse, rows, jnp.inf)
        of_d_x, totals = gradients(rows_of(x, rows), of_labels, of_lse, of_parts, totals, complete)
        return None if d_x is None else written(d_x, of_d_x, begin), totals

    totals = Totals.zeros(head, inputs.wants, dtype or (inputs.weight.dtype if complete else head.wide))
    d_x = blocks.empty(x.shape[1:], head.wide) if wants_x else None
    operands = (head.weight, head.bias, x, labels, lse, flat)
    d_x, totals = blocks.over(step, (d_x, totals), operands)
    d_x = None if d_x is None else blocks.by_token(d_x).reshape(inputs.x.shape)
    return {"x": d_x, "weight": totals.weight, "bias": totals.bias}


def _gradients(
    head: Head,
    x: jax.Array,
    of_block: Any,
    operands: object,
    totals: Totals,
    size: int,
    *,
    wants_x: bool = True,
    complete: bool,
) -> tuple[Any, Totals]:
    """The gradient of x, in the wide dtype, and the other gradients with those of these tokens added.

    Args:
      of_block: the gradient of ``x · weight + bias`` of a block of the vocabulary; ``operands`` are what it reads.
    """

    def step(block: Block, carry: Any) -> Any:
        d_x, totals = carry
        return add_gradients(head, block, x, of_block(block), d_x, totals, complete=complete)

    init = (jnp.zeros(x.shape, head.wide) if wants_x else None, totals)
    return over_blocks(head.vocab, size, step, init, (head.weight, head.bias, x, operands))
