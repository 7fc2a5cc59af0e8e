"""The cross-entropy of logits that are never in memory as a whole, in plain XLA: the backend for every device."""

from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tilewright.kernels.linear_cross_entropy.inputs import IGNORED, LossInputs, LossProblem, LossResults
from tilewright.kernels.linear_cross_entropy.losses import (
    completed,
    of_statistics,
    token_weights_gradient,
    wide_dtype,
)
from tilewright.kernels.linear_cross_entropy.xla.params import (
    Params,
    XlaLossBackwardParams,
    XlaLossParams,
    block_sizes,
    candidate_sizes,
)
from tilewright.kernels.linear_cross_entropy.xla.tokens import TokenBlocks, rows_of, written
from tilewright.kernels.linear_cross_entropy.xla.vocabulary import Head, Totals, gradients, statistics
from tilewright.kernels.registry import Implementation, Platform
from tilewright.ops.kernel.arrays import is_symbolic
from tilewright.ops.types import Device, Direction


class XlaLinearCrossEntropy(Implementation[LossInputs, LossProblem, LossResults, XlaLossParams, XlaLossBackwardParams]):
    """Serves every problem."""

    platform: ClassVar[Platform] = Platform.XLA
    forward_params: ClassVar[type] = XlaLossParams
    backward_params: ClassVar[type] = XlaLossBackwardParams
    forward_mode: ClassVar[bool] = True
    symbolic_dimensions: ClassVar[bool] = True

    def not_supported_reasons(self, problem: LossProblem, device: Device, direction: Direction) -> list[str]:
        return []

    def heuristic(self, problem: LossProblem, device: Device, direction: Direction) -> Params:
        whole = problem.options.is_distributed
        return _params(problem, direction, block_sizes(problem.tokens, problem.vocab, device, whole=whole))

    def candidates(self, problem: LossProblem, device: Device, direction: Direction) -> Iterable[Params]:
        whole = problem.options.is_distributed
        sizes = candidate_sizes(problem.tokens, problem.vocab, device, whole=whole)
        if direction == "forward" or not problem.options.keeps_gradients:
            return [_params(problem, direction, each) for each in sizes]
        # Gradients that are there have no block sizes to tune; all others are of the recomputing form.
        return [_params(problem, direction, sizes[0]), *(XlaLossBackwardParams(*each) for each in sizes)]

    def forward(self, inputs: LossInputs, params: XlaLossParams) -> LossResults:
        if _is_whole(inputs, params):
            return _forward_whole(inputs, params.block_vocab)
        return _forward_blocks(inputs, params)

    def backward(
        self, inputs: LossInputs, results: LossResults, cotangents: LossResults, params: XlaLossBackwardParams
    ) -> dict[str, Any]:
        """Gradients of those arrays that are used; a sum's that the forward pass computed, or recomputed ones."""
        if inputs.options.keeps_gradients and not params.recompute:
            # In float32 until here, so that a factor such as a loss scale meets no rounded gradients.
            found = {name: getattr(results, f"d_{name}") for name in ("x", "weight", "bias")}
            found = {name: None if each is None else each * cotangents.total for name, each in found.items()}
        else:
            found = _recomputed(inputs, results, cotangents, params)
        # Of each token's weight the gradient is its loss, which the statistics give without logits.
        found["token_weights"] = token_weights_gradient(inputs, results, cotangents)
        arrays = {name: getattr(inputs, name) for name in found}
        return {
            name: None if each is None or name not in inputs.gradients else each.astype(arrays[name].dtype)
            for name, each in found.items()
        }


def _params(problem: LossProblem, direction: Direction, sizes: tuple[int | None, int]) -> Params:
    if direction == "forward":
        return XlaLossParams(*sizes)
    return XlaLossBackwardParams(*sizes, recompute=not problem.options.keeps_gradients)


def _is_whole(inputs: LossInputs, params: Params) -> bool:
    return params.block_tokens is None or 0 in inputs.labels.shape


def head_of(inputs: LossInputs) -> Head:
    """The matrix, with what becomes of its logits."""
    return Head(inputs.weight, inputs.bias, inputs.vocab_axis, inputs.options.logits_soft_cap, wide_dtype(inputs))


def selected(x: jax.Array, labels: jax.Array) -> jax.Array:
    """x with zeros in place of tokens that are ignored: selected, since 0 · NaN is NaN."""
    return jnp.where((labels != IGNORED)[..., None], x, 0)


def _forward_whole(inputs: LossInputs, size: int) -> LossResults:
    """All tokens at once, as they lie."""
    head = head_of(inputs)
    found = statistics(head, selected(inputs.x, inputs.labels), inputs.labels, size)[:3]
    if not inputs.options.keeps_gradients:
        return completed(inputs, *found)
    results = completed(inputs, *found)
    # A later pass over the same logits: a compiled program whose backward pass recomputes does not have it.
    one = LossResults(None, None, total=jnp.ones((), head.wide))
    kept = _recomputed(inputs, results, one, XlaLossBackwardParams(None, size), dtype=head.wide)
    return completed(inputs, *found, **{f"d_{name}": each for name, each in kept.items()})


def _flat(inputs: LossInputs) -> tuple[jax.Array, jax.Array, Any]:
    """x, labels and weights with one axis of tokens."""
    weights = None if inputs.token_weights is None else inputs.token_weights.reshape(-1)
    return inputs.x.reshape(-1, inputs.x.shape[-1]), inputs.labels.reshape(-1), weights


def _forward_blocks(inputs: LossInputs, params: XlaLossParams) -> LossResults:
    """Blocks of tokens, each with the gradients of its losses if these are kept."""
    head, options = head_of(inputs), inputs.options
    x, labels, token_weights = _flat(inputs)
    assert params.block_tokens is not None
    blocks = TokenBlocks.of(labels != IGNORED, params.block_tokens)
    keeps, one = options.keeps_gradients, LossResults(None, None, total=jnp.ones((), head.wide))

    def step(begin: jax.Array, rows: jax.Array, carry: Any) -> Any:
        found, d_x, totals = carry
        of_x, of_labels = rows_of(x, rows), rows_of(labels, rows, IGNORED)
        *parts, kept = statistics(head, of_x, of_labels, params.block_vocab, keep=keeps)
        if keeps:
            # The gradients of Σ w t: what it is divided by, and its own cotangent, are one factor of the backward pass.
            weights = None if token_weights is None else rows_of(token_weights, rows)
            cotangents = of_statistics(options, head.vocab, of_labels, weights, parts[0], one)
            lse = jnp.where(of_labels == IGNORED, jnp.inf, parts[0])
            of_d_x, totals = gradients(
                head, of_x, of_labels, lse, cotangents, totals, params.block_vocab,
                epsilon=options.gradient_epsilon, wants_x=True, complete=False, kept=kept,
            )  # fmt: skip
            d_x = written(d_x, of_d_x, begin)
        return tuple(written(each, part, begin) for each, part in zip(found, parts, strict=True)), d_x, totals

    statistics_by_place = tuple(blocks.empty((), head.wide) for _ in range(3))
    d_x: Any = blocks.empty(x.shape[1:], head.wide) if keeps else None
    totals = Totals.zeros(head, inputs.gradients if keeps else frozenset(), head.wide)
    operands = (head.weight, head.bias, x, labels, token_weights)
    found, d_x, totals = blocks.over(step, (statistics_by_place, d_x, totals), operands)
    parts = [blocks.by_token(each).reshape(inputs.labels.shape) for each in found]
    if not keeps:
        return completed(inputs, *parts)
    d_x = blocks.by_token(d_x).reshape(inputs.x.shape)
    return completed(inputs, *parts, d_x=d_x, d_weight=totals.weight, d_bias=totals.bias)


def _recomputed(
    inputs: LossInputs,
    results: LossResults,
    cotangents: LossResults,
    params: XlaLossBackwardParams,
    dtype: DTypeLike | None = None,
) -> dict[str, Any]:
    """The gradients of x, weight and bias from recomputed logits; that of the matrix in ``dtype`` if it is given."""
    head, options, wanted = head_of(inputs), inputs.options, inputs.gradients
    parts = of_statistics(options, head.vocab, inputs.labels, inputs.token_weights, results.lse, cotangents)
    lse = jnp.where(inputs.labels == IGNORED, jnp.inf, results.lse)
    wants_x = "x" in wanted
    common: Any = {"size": params.block_vocab, "epsilon": options.gradient_epsilon, "wants_x": wants_x}
    if _is_whole(inputs, params):
        # Each block of the matrix's gradient is complete at once, and is kept as it is returned.
        totals = Totals.zeros(head, wanted, dtype or inputs.weight.dtype)
        x = selected(inputs.x, inputs.labels)
        d_x, totals = gradients(head, x, inputs.labels, lse, parts, totals, complete=True, **common)
        return {"x": d_x, "weight": totals.weight, "bias": totals.bias}
    x, labels, _ = _flat(inputs)
    flat = [None if each is None else each.reshape(-1) for each in parts]
    lse = lse.reshape(-1)
    assert params.block_tokens is not None
    blocks = TokenBlocks.of(labels != IGNORED, params.block_tokens)
    # With one block of tokens a block of the matrix's gradient is complete at once, and needs no sum in float32.
    complete = not is_symbolic(labels.shape[0]) and labels.shape[0] <= params.block_tokens

    def step(begin: jax.Array, rows: jax.Array, carry: Any) -> Any:
        d_x, totals = carry
        of_lse, of_label, of_sum = (None if each is None else rows_of(each, rows) for each in flat)
        of_labels = rows_of(labels, rows, IGNORED)
        of_d_x, totals = gradients(
            head, rows_of(x, rows), of_labels, rows_of(lse, rows, jnp.inf), (of_lse, of_label, of_sum), totals,
            complete=complete, **common,
        )  # fmt: skip
        return None if d_x is None else written(d_x, of_d_x, begin), totals

    totals = Totals.zeros(head, wanted, dtype or (inputs.weight.dtype if complete else head.wide))
    d_x = blocks.empty(x.shape[1:], head.wide) if wants_x else None
    operands = (head.weight, head.bias, x, labels, lse, flat)
    d_x, totals = blocks.over(step, (d_x, totals), operands)
    d_x = None if d_x is None else blocks.by_token(d_x).reshape(inputs.x.shape)
    return {"x": d_x, "weight": totals.weight, "bias": totals.bias}
