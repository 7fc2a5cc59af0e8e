"""A loop over blocks of the vocabulary, and the sums of gradients that go through it.

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

from tilewright.kernels.numerics.dots import dot
from tilewright.kernels.op.arguments import padded
from tilewright.kernels.op.sharding import vary_over, varying_axes

MULTIPLE = 256
"""Classes that blocks of the vocabulary are multiples of on GPUs: those of a kernel's tile."""

ALIGNED = 8
"""Classes of 16 bits from which on the rows of a matrix ``[d, vocab]``, and of gradients of logits, begin at multiples
of 16 bytes. TMA wants them so, and cuBLAS is slow otherwise (docs/notes/odd_sizes.md)."""


def aligned(vocab: int) -> int:
    """Columns of a matrix that is padded to `ALIGNED` classes."""
    return -(-vocab // ALIGNED) * ALIGNED


def even_blocks(size: int, limit: int, multiple: int) -> int:
    """A size of blocks up to a limit, such that the last block is about as large as the others."""
    count = max(-(-size // max(limit, 1)), 1)
    return max(min(size, -(-size // (multiple * count)) * multiple), 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """One block of the vocabulary.

    Attributes:
      begin: its first class.
      first: its first class that the block before does not have.
      classes: ``[block]``, the classes.
      fresh: ``[block]``, False for classes that the block before has, too, and for columns behind the last class.
    """

    begin: Any
    first: Any
    classes: Any
    fresh: Any

    @property
    def size(self) -> int:
        return self.classes.shape[0]

    def of(self, array: jax.Array, axis: int) -> jax.Array:
        """The block's part of an array along the axis of the vocabulary."""
        if self.size == array.shape[axis]:
            return array
        return lax.dynamic_slice_in_dim(array, self.begin, self.size, axis)

    def written(self, array: jax.Array, part: jax.Array, axis: int) -> jax.Array:
        """The array with the block's part replaced."""
        if part.shape == array.shape:
            return part.astype(array.dtype)
        return lax.dynamic_update_slice_in_dim(array, part.astype(array.dtype), self.begin, axis)


def over_blocks[T](
    vocab: int, size: int, step: Callable[[Block, T], T], init: T, operands: object, *, padding: int = 0
) -> T:
    """``step(block, carry)`` over all blocks, in order; ``operands`` are the arrays that it reads.

    Args:
      vocab: classes, with the ``padding`` columns behind the last one.
    """
    size = min(size, vocab)
    arange = jnp.arange(size, dtype=jnp.int32)
    if size == vocab:
        # No loop: XLA then also removes gradients that are not used from the loop over tokens around it.
        fresh = arange < vocab - padding if padding else jnp.ones(size, bool)
        return step(Block(jnp.int32(0), jnp.int32(0), arange, fresh), init)
    # Inside shard_map the type of a carry must not change: zeros vary over no axis, what a step adds to them does.
    init = vary_over(varying_axes((init, operands)), init)

    def body(index: jax.Array, carry: T) -> T:
        index = jnp.asarray(index, jnp.int32)
        begin, first = jnp.minimum(index * size, vocab - size), index * size
        classes = begin + arange
        fresh = classes >= first
        if padding:
            fresh &= classes < vocab - padding
        return step(Block(begin, first, classes, fresh), carry)

    # Bounds of 32 bits: with jax_enable_x64 those of Python's integers have 64.
    return lax.fori_loop(jnp.int32(0), jnp.int32(-(-vocab // size)), body, init)


@dataclasses.dataclass(frozen=True)
class Head:
    """A matrix from d to the vocabulary, with what becomes of its logits.

    The logits of tokens x are ``cap · tanh((x · weight + bias) / cap) · scale``.

    Attributes:
      scale: multiplied with the logits after the soft cap.
      padding: columns of the matrix behind the last class, which are zeros.
    """

    weight: jax.Array
    bias: jax.Array | None
    vocab_axis: int
    soft_cap: float | None
    wide: Any
    scale: float = 1.0
    padding: int = 0

    @property
    def width(self) -> int:
        """Classes, with the padding."""
        return self.weight.shape[self.vocab_axis]

    @property
    def vocab(self) -> int:
        return self.width - self.padding

    def aligned(self, multiple: int = ALIGNED) -> "Head":
        """The same with a matrix of a multiple of so many columns, a padded copy if it has others."""
        weight = padded(self.weight, multiple, self.vocab_axis)
        bias = None if self.bias is None else padded(self.bias, multiple, 0)
        padding = weight.shape[self.vocab_axis] - self.vocab
        return dataclasses.replace(self, weight=weight, bias=bias, padding=padding)


def block_logits(head: Head, block: Block, x: jax.Array) -> jax.Array:
    """The logits of a block, ``[*tokens, block]``, the soft cap and the scale applied."""
    weight = block.of(head.weight, head.vocab_axis)
    logits = dot(x, weight, (x.ndim - 1, 1 - head.vocab_axis), None, head.wide)
    if head.bias is not None:
        logits = logits + block.of(head.bias, 0).astype(head.wide)
    if head.soft_cap is not None:
        logits = head.soft_cap * jnp.tanh(logits / head.soft_cap)
    return logits if head.scale == 1.0 else logits * head.scale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Totals:
    """Gradients of a matrix and its bias so far; ``None`` for one that is not used."""

    weight: jax.Array | None
    bias: jax.Array | None

    @classmethod
    def zeros(cls, head: Head, wants: Callable[[str], bool], dtype: DTypeLike) -> "Totals":
        """Totals of no tokens; ``wants`` says whether the gradient of "weight" or "bias" is used."""
        return cls(
            jnp.zeros(head.weight.shape, dtype) if wants("weight") else None,
            jnp.zeros(head.bias.shape, head.wide) if head.bias is not None and wants("bias") else None,
        )

    def of_classes(self, head: Head) -> "Totals":
        """Without what belongs to the padding of a head."""
        if not head.padding:
            return self
        weight = None if self.weight is None else lax.slice_in_dim(self.weight, 0, head.vocab, axis=head.vocab_axis)
        return Totals(weight, None if self.bias is None else self.bias[: head.vocab])


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
      gradient: ``[*tokens, block]``, in the dtype of sums, or in that in which it is multiplied.
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
        if not complete:
            part = part + before
        elif head.width % block.size:
            # Classes that are not fresh have their gradients from the block before.
            fresh = block.fresh[:, None] if head.vocab_axis == 0 else block.fresh
            part = jnp.where(fresh, part.astype(before.dtype), before)
        of_weight = block.written(of_weight, part, head.vocab_axis)
    if of_bias is not None:
        of_bias = block.written(of_bias, block.of(of_bias, 0) + gradient.astype(head.wide).sum(tokens), 0)
    return d_x, Totals(of_weight, of_bias)
