"""The divergence between two linear heads in plain XLA: the backend for every device."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tilewright.kernels.linear_cross_entropy.blocks.tokens import TokenBlocks, rows_of, written
from tilewright.kernels.linear_cross_entropy.blocks.vocabulary import (
    Block,
    Head,
    Totals,
    add_gradients,
    block_logits,
    over_blocks,
)
from tilewright.kernels.linear_cross_entropy.inputs import KlInputs, LossResults
from tilewright.kernels.linear_cross_entropy.losses import completed_kl, of_kl_statistics, token_weights_gradient
from tilewright.kernels.linear_cross_entropy.xla.logits import before_cap
from tilewright.kernels.linear_cross_entropy.xla.params import (
    Params,
    XlaLossBackwardParams,
    XlaLossParams,
    candidate_sizes,
)
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import Platform
from tilewright.ops.kernel.arrays import is_symbolic
from tilewright.ops.types import Device, Direction


class XlaLinearKlDivergence(Backend[KlInputs, LossResults, XlaLossParams, XlaLossBackwardParams]):
    """Serves every call."""

    name: ClassVar[str] = "xla"
    platform: ClassVar[Platform] = Platform.XLA
    serves: ClassVar[frozenset[str]] = frozenset(
        {"mask", "token_weights", "temperature", "vocab_first", "logits_soft_cap", "is_part"}
    )
    forward_params: ClassVar[type] = XlaLossParams
    backward_params: ClassVar[type] = XlaLossBackwardParams
    forward_mode: ClassVar[bool] = True
    symbolic_dimensions: ClassVar[bool] = True

    def reasons(self, inputs: KlInputs, device: Device, direction: Direction) -> list[str]:
        return []

    def candidates(self, inputs: KlInputs, device: Device, direction: Direction) -> Iterable[Params]:
        sizes = candidate_sizes(inputs.tokens, inputs.vocab, device, whole=inputs.is_distributed)
        return [XlaLossParams(*each) if direction == "forward" else XlaLossBackwardParams(*each) for each in sizes]

    def forward(self, inputs: KlInputs, params: XlaLossParams) -> LossResults:
        heads = heads_of(inputs)
        if params.block_tokens is None or 0 in inputs.token_shape:
            rows = [jnp.where(inputs.valid[..., None], x, 0) for x in (inputs.student_x, inputs.teacher_x)]
            return completed_kl(inputs, *_statistics(heads, rows[0], rows[1], params.block_vocab))
        flat, valid = _flat(inputs)
        blocks = TokenBlocks.of(valid, params.block_tokens)

        def step(begin: jax.Array, rows: jax.Array, found: Any) -> Any:
            parts = _statistics(heads, rows_of(flat[0], rows), rows_of(flat[1], rows), params.block_vocab)
            return written(found, parts, begin)

        init = tuple(blocks.empty((), inputs.wide) for _ in range(3))
        found = blocks.over(step, init, (heads[0].weight, heads[1].weight, *flat))
        return completed_kl(inputs, *blocks.by_token(found, inputs.token_shape))

    def backward(
        self, inputs: KlInputs, results: LossResults, cotangents: LossResults, params: XlaLossBackwardParams
    ) -> dict[str, Any]:
        """Gradients of those arrays that are used, from recomputed logits."""
        heads = heads_of(inputs)
        wants = tuple(inputs.wants(f"{side}_x") for side in _SIDES)
        # A token that does not count has probabilities of zero, whatever its logits.
        student_lse, teacher_lse, difference = results.statistics
        lses = [jnp.where(inputs.valid, x, jnp.inf) for x in (student_lse, teacher_lse)]
        by_token = [*lses, difference, *of_kl_statistics(inputs, cotangents)]
        count = inputs.valid.size
        if params.block_tokens is None or 0 in inputs.token_shape:
            rows = [jnp.where(inputs.valid[..., None], x, 0) for x in (inputs.student_x, inputs.teacher_x)]
            totals = _zeros(inputs, heads, complete=True)
            d_xs, totals = _gradients(heads, rows, by_token, totals, params.block_vocab, wants=wants, complete=True)
        else:
            flat, valid = _flat(inputs)
            blocks = TokenBlocks.of(valid, params.block_tokens)
            complete = not is_symbolic(count) and count <= params.block_tokens
            totals = _zeros(inputs, heads, complete=complete)
            given = [each.reshape(-1) for each in by_token]

            def step(begin: jax.Array, rows: jax.Array, carry: Any) -> Any:
                d_xs, totals = carry
                parts = [rows_of(each, rows, jnp.inf if i < 2 else 0) for i, each in enumerate(given)]
                of_xs = [rows_of(x, rows) for x in flat]
                parts_of_d_x, totals = _gradients(
                    heads, of_xs, parts, totals, params.block_vocab, wants=wants, complete=complete
                )
                return written(d_xs, parts_of_d_x, begin), totals

            init = tuple(
                blocks.empty(x.shape[1:], inputs.wide) if want else None for x, want in zip(flat, wants, strict=True)
            )
            operands = (heads[0].weight, heads[1].weight, *flat, *given)
            d_xs, totals = blocks.over(step, (init, totals), operands)
            d_xs = blocks.by_token(d_xs, inputs.token_shape)
        found = {
            "student_x": d_xs[0],
            "student_weight": totals[0].weight,
            "teacher_x": d_xs[1],
            "teacher_weight": totals[1].weight,
            "token_weights": token_weights_gradient(inputs, results, cotangents),
        }
        return {
            name: None if each is None else each.astype(getattr(inputs, name).dtype) for name, each in found.items()
        }


def heads_of(inputs: KlInputs) -> tuple[Head, Head]:
    """Student and teacher."""
    student, teacher = (
        Head(weight, None, inputs.vocab_axis, inputs.logits_soft_cap, inputs.wide, 1 / inputs.temperature)
        for weight in (inputs.student_weight, inputs.teacher_weight)
    )
    return student, teacher


_SIDES = ("student", "teacher")


def _zeros(inputs: KlInputs, heads: tuple[Head, Head], *, complete: bool) -> tuple[Totals, ...]:
    """Gradients of both matrices so far; if they are complete with one block of tokens, in the dtypes of these."""

    def of(side: str, head: Head) -> Totals:
        dtype = head.weight.dtype if complete else head.wide
        return Totals.zeros(head, lambda name: inputs.wants(f"{side}_{name}"), dtype)

    return tuple(of(side, head) for side, head in zip(_SIDES, heads, strict=True))


def _flat(inputs: KlInputs) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    student, teacher = (x.reshape(inputs.tokens, x.shape[-1]) for x in (inputs.student_x, inputs.teacher_x))
    return (student, teacher), inputs.valid.reshape(-1)


def _statistics(
    heads: tuple[Head, Head], student_x: jax.Array, teacher_x: jax.Array, size: int
) -> tuple[Any, Any, Any]:
    """lse of student and teacher, and the difference of the logits in the mean of the teacher."""
    shape, wide = student_x.shape[:-1], heads[0].wide

    def rescaled(highest: jax.Array, logits: jax.Array) -> tuple[Any, Any, Any]:
        new = jnp.maximum(highest, logits.max(-1))
        finite = jnp.where(new == -jnp.inf, 0, new)
        return new, jnp.exp(highest - finite), jnp.exp(logits - finite[..., None])

    def step(block: Block, carry: Any) -> Any:
        (high_u, sum_u), (high_v, sum_v, difference) = carry
        u, v = (block_logits(head, block, x) for head, x in zip(heads, (student_x, teacher_x), strict=True))
        high_u, before_u, of_u = rescaled(high_u, jnp.where(block.fresh, u, -jnp.inf))
        high_v, before_v, of_v = rescaled(high_v, jnp.where(block.fresh, v, -jnp.inf))
        # A class that the teacher rules out counts nothing, even where the student does, too: 0 · inf is NaN.
        of_difference = jnp.where(of_v > 0, of_v * (v - u), 0).sum(-1)
        # The difference is rescaled like the sum that it will be divided by.
        student = high_u, sum_u * before_u + of_u.sum(-1)
        return student, (high_v, sum_v * before_v + of_v.sum(-1), difference * before_v + of_difference)

    low, zeros = jnp.full(shape, -jnp.inf, wide), jnp.zeros(shape, wide)
    operands = (heads[0].weight, heads[1].weight, student_x, teacher_x)
    init = ((low, zeros), (low, zeros, zeros))
    (high_u, sum_u), (high_v, sum_v, difference) = over_blocks(heads[0].vocab, size, step, init, operands)
    return high_u + jnp.log(sum_u), high_v + jnp.log(sum_v), difference / sum_v


def _gradients(
    heads: tuple[Head, Head],
    xs: Sequence[jax.Array],
    by_token: Sequence[jax.Array],
    totals: tuple[Totals, ...],
    size: int,
    *,
    wants: tuple[bool, ...],
    complete: bool,
) -> tuple[tuple[Any, ...], tuple[Totals, ...]]:
    """The gradients of both x, and those of both matrices with these tokens' added."""
    lse_u, lse_v, difference, of_u, of_v, of_difference = (each[..., None] for each in by_token)
    needed = [want or each.weight is not None for want, each in zip(wants, totals, strict=True)]

    def step(block: Block, carry: Any) -> Any:
        d_xs, totals = carry
        u, v = (block_logits(head, block, x) for head, x in zip(heads, xs, strict=True))
        p, q = jnp.exp(u - lse_u), jnp.exp(v - lse_v)
        of_student = of_u * p - of_difference * q
        of_teacher = q * (of_difference * (v - u - difference + 1) + of_v)
        found = []
        for i, (logits, gradient) in enumerate(((u, of_student), (v, of_teacher))):
            if not needed[i]:
                found.append((d_xs[i], totals[i]))
                continue
            gradient = jnp.where(block.fresh, before_cap(heads[i], logits, gradient), 0)
            found.append(add_gradients(heads[i], block, xs[i], gradient, d_xs[i], totals[i], complete=complete))
        return tuple(x for x, _ in found), tuple(each for _, each in found)

    init = tuple(jnp.zeros(x.shape, heads[0].wide) if want else None for x, want in zip(xs, wants, strict=True))
    operands = (heads[0].weight, heads[1].weight, *xs, *by_token)
    return over_blocks(heads[0].vocab, size, step, (init, totals), operands)
