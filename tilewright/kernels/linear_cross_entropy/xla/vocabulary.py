"""Statistics of the logits of some tokens, and their gradients, in a loop over blocks of the vocabulary.

The last block begins where its end is that of the vocabulary; the classes that it has in common with the block before
are masked.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.dots import dot
from tilewright.kernels.sharding import vary_over, varying_axes


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """One block of the vocabulary.

    Attributes:
      begin: its first class.
      classes: ``[block]``, the classes.
      fresh: ``[block]``, False for classes that the block before has, too.
    """

    begin: Any
    classes: Any
    fresh: Any

    def of(self, array: jax.Array, axis: int) -> jax.Array:
        """The block's part of an array along the axis of the vocabulary."""
        size = self.classes.shape[0]
        return array if size == array.shape[axis] else lax.dynamic_slice_in_dim(array, self.begin, size, axis)

    def written(self, array: jax.Array, part: jax.Array, axis: int) -> jax.Array:
        """The array with the block's part replaced."""
        if part.shape == array.shape:
            return part.astype(array.dtype)
        return lax.dynamic_update_slice_in_dim(array, part.astype(array.dtype), self.begin, axis)


def over_blocks[T](vocab: int, size: int, step: Callable[[Block, T], T], init: T, operands: object) -> T:
    """``step(block, carry)`` over all blocks, in order; ``operands`` are the arrays that it reads."""
    size = min(size, vocab)
    arange = jnp.arange(size, dtype=jnp.int32)
    if size == vocab:
        # No loop: XLA then also removes gradients that are not used from the loop over tokens around it.
        return step(Block(jnp.int32(0), arange, jnp.ones(size, bool)), init)
    # Inside shard_map the type of a carry must not change: zeros vary over no axis, what a step adds to them does.
    init = vary_over(varying_axes((init, operands)), init)

    def body(index: jax.Array, carry: T) -> T:
        index = jnp.asarray(index, jnp.int32)
        begin = jnp.minimum(index * size, vocab - size)
        classes = begin + arange
        return step(Block(begin, classes, classes >= index * size), carry)

    # Bounds of 32 bits: with jax_enable_x64 those of Python's integers have 64.
    return lax.fori_loop(jnp.int32(0), jnp.int32(-(-vocab // size)), body, init)


@dataclasses.dataclass(frozen=True)
class Head:
    """A matrix from d to the vocabulary, with what becomes of its logits.

    Attributes:
      scale: multiplied with the logits after the soft cap.
    """

    weight: jax.Array
    bias: jax.Array | None
    vocab_axis: int
    soft_cap: float | None
    wide: Any
    scale: float = 1.0

    @property
    def vocab(self) -> int:
        return self.weight.shape[self.vocab_axis]

    def logits(self, block: Block, x: jax.Array) -> jax.Array:
        """``[*tokens, block]``, the soft cap and the scale applied."""
        weight = block.of(self.weight, self.vocab_axis)
        logits = dot(x, weight, (x.ndim - 1, 1 - self.vocab_axis), None, self.wide)
        if self.bias is not None:
            logits = logits + block.of(self.bias, 0).astype(self.wide)
        if self.soft_cap is not None:
            logits = self.soft_cap * jnp.tanh(logits / self.soft_cap)
        return logits if self.scale == 1.0 else logits * self.scale

    def before_cap(self, logits: jax.Array, gradient: jax.Array) -> jax.Array:
        """The gradient of ``x · weight + bias``, from that of the logits."""
        if self.scale != 1.0:
            logits, gradient = logits / self.scale, gradient * self.scale
        return gradient if self.soft_cap is None else gradient * (1 - (logits / self.soft_cap) ** 2)


def statistics(
    head: Head, x: jax.Array, labels: jax.Array, size: int, *, keep: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """lse, the label's logit and the sum of the logits of each token, and with ``keep`` the logits."""
    shape = x.shape[:-1]

    def step(block: Block, carry: Any) -> Any:
        highest, total, label_logit, logit_sum, kept = carry
        logits = head.logits(block, x)
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
    highest, total, label_logit, logit_sum, kept = over_blocks(head.vocab, size, step, init, operands)
    return jnp.where(highest == -jnp.inf, highest, highest + jnp.log(total)), label_logit, logit_sum, kept


@dataclasses.dataclass(frozen=True)
class Totals:
    """Gradients of a matrix and its bias so far; ``None`` for one that is not used."""

    weight: jax.Array | None
    bias: jax.Array | None

    @classmethod
    def zeros(cls, head: Head, names: frozenset[str], dtype: DTypeLike) -> "Totals":
        return cls(
            jnp.zeros(head.weight.shape, dtype) if "weight" in names else None,
            jnp.zeros(head.bias.shape, head.wide) if head.bias is not None and "bias" in names else None,
        )


jax.tree_util.register_dataclass(Totals, data_fields=["weight", "bias"], meta_fields=[])


def add_gradients(
    head: Head,
    block: Block,
    x: jax.Array,
    gradient: jax.Array,
    d_x: jax.Array | None,
    totals: Totals,
    *,
    complete: bool,
) -> tuple[Any, Totals]:
    """Adds what a block's gradient of ``x · weight + bias`` gives; the gradient is zero for classes not fresh.

    Args:
      complete: these are all tokens, so that a block of the matrix's gradient is complete.
    """
    weight = block.of(head.weight, head.vocab_axis)
    # bfloat16 has the range of float32. In float16 a gradient's small elements would be zeros.
    narrow = gradient.astype(jnp.bfloat16) if x.dtype == weight.dtype == jnp.bfloat16 else gradient
    # All dimensions of the tokens are summed as they lie. One that XLA splits over devices stays split.
    tokens = tuple(range(x.ndim - 1))
    if d_x is not None:
        d_x = d_x + dot(narrow, weight, (x.ndim - 1, head.vocab_axis), None, head.wide)
    of_weight, of_bias = totals.weight, totals.bias
    if of_weight is not None:
        left, right = (narrow, x) if head.vocab_axis == 0 else (x, narrow)
        part, before = dot(left, right, (tokens, tokens), None, head.wide), block.of(of_weight, head.vocab_axis)
        if complete:
            # Classes that are not fresh have their gradients from the block before.
            fresh = block.fresh[:, None] if head.vocab_axis == 0 else block.fresh
            part = jnp.where(fresh, part.astype(before.dtype), before)
        else:
            part = part + before
        of_weight = block.written(of_weight, part, head.vocab_axis)
    if of_bias is not None:
        of_bias = block.written(of_bias, block.of(of_bias, 0) + gradient.sum(tokens), 0)
    return d_x, Totals(of_weight, of_bias)


def gradients(
    head: Head,
    x: jax.Array,
    labels: jax.Array,
    lse: jax.Array,
    cotangents: tuple[Any, Any, Any],
    totals: Totals,
    size: int,
    *,
    epsilon: float | None,
    wants_x: bool,
    complete: bool,
    kept: jax.Array | None = None,
) -> tuple[Any, Totals]:
    """The gradient of x, in the wide dtype, and the other gradients with those of these tokens added.

    Args:
      lse: infinite for a token that is ignored: its probabilities are zeros, whatever its logits.
      cotangents: those of lse, of the label's logit and of the sum of the logits or ``None``.
      kept: the logits, if they are known.
    """
    of_lse, of_label, of_sum = cotangents

    def step(block: Block, carry: Any) -> Any:
        d_x, totals = carry
        logits = head.logits(block, x) if kept is None else block.of(kept, kept.ndim - 1)
        probabilities = jnp.exp(logits - lse[..., None])
        # Of the label's class only the probability may be dropped; -1 is always there.
        if epsilon is not None:
            probabilities = jnp.where(probabilities < epsilon, 0, probabilities)
        own = block.classes == labels[..., None]
        gradient = of_lse[..., None] * probabilities + jnp.where(own, of_label[..., None], 0)
        if of_sum is not None:
            gradient = gradient + of_sum[..., None]
        gradient = jnp.where(block.fresh, head.before_cap(logits, gradient), 0)
        return add_gradients(head, block, x, gradient, d_x, totals, complete=complete)

    init = (jnp.zeros(x.shape, head.wide) if wants_x else None, totals)
    operands = (head.weight, head.bias, x, labels, lse, cotangents, kept)
    return over_blocks(head.vocab, size, step, init, operands)
