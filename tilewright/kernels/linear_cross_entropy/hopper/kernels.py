"""The two kernels of a vocabulary loss on Hopper, and how they are called."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.hopper.matmul.dense import dense_plan
from tilewright.kernels.hopper.matmul.epilogue import Epilogue
from tilewright.kernels.hopper.matmul.kernel import Factors, matmul_kernel
from tilewright.kernels.hopper.matmul.params import MatmulParams
from tilewright.kernels.hopper.matmul.schedule import DenseSchedule
from tilewright.kernels.linear_cross_entropy.blocks.vocabulary import Head
from tilewright.kernels.linear_cross_entropy.hopper.epilogues import LogitGradients, LogitTiles, SoftmaxSums


class TileSums(NamedTuple):
    """Sums over a token's logits in each tile of columns: float32 ``[tiles, tokens]``.

    Attributes:
      highest: the highest logit.
      total: the sum of ``exp(logit - highest)``.
      label_logit: the label's logit in its own tile, and 0 in all others.
      logit_sum: the sum of the logits, or None.
    """

    highest: jax.Array
    total: jax.Array
    label_logit: jax.Array
    logit_sum: jax.Array | None

    def combined(self) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """lse, the label's logit, and the sum of the logits, each ``[tokens]``."""
        # Not of a tile whose logits are all -inf, which has the lowest number for its highest logit and a total of 0.
        highest = jnp.where(self.total > 0, self.highest, -jnp.inf)
        lse = jax.nn.logsumexp(highest, axis=0, b=jnp.maximum(self.total, jnp.finfo(jnp.float32).tiny))
        return lse, self.label_logit.sum(0), None if self.logit_sum is None else self.logit_sum.sum(0)


def softmax_sums(
    head: Head, x: jax.Array, labels: jax.Array, *, sums_logits: bool, keep: bool, tile: MatmulParams, sms: int
) -> tuple[TileSums, jax.Array | None]:
    """The sums of the logits ``x · weight`` of ``[tokens, d]``, and with ``keep`` their exponentials.

    These are ``exp(logit - highest)``, times the slope of the soft cap, ``[tokens, width]`` in the dtype of x.
    """
    tokens, columns = len(x), head.width
    # Columns of zeros, of the padding or by TMA, have logits of 0, which count unless they are masked.
    column_tiles = -(-columns // tile.block_n)
    tail = head.vocab if head.padding or columns % (tile.block_n * tile.cluster_n) else None
    padding, padded = _padding(tokens, tile)
    # Whole tiles of whole clusters: each CTA stores its sums, also those beyond the last class or token.
    vector = jax.ShapeDtypeStruct((-(-column_tiles // tile.cluster_n) * tile.cluster_n, padded), jnp.float32)
    results = [vector] * (4 if sums_logits else 3)
    if keep:
        results = [jax.ShapeDtypeStruct((tokens, columns), x.dtype), *results]
    epilogue = SoftmaxSums(
        _tiles(head, None, columns, tail, tile), jnp.pad(labels, padding, constant_values=-1), sums_logits, keep
    )
    found = _call(head, x, columns, None, results, epilogue, tile, sms)
    # Tiles of a cluster behind the last one, and rows behind the last token, hold anything.
    kept = found.pop(0) if keep else None
    sums = [each[:column_tiles, :tokens] for each in found]
    return TileSums(*sums, *([] if sums_logits else [None])), kept


def logit_gradients(
    head: Head,
    x: jax.Array,
    labels: jax.Array,
    lse: jax.Array,
    cotangents: tuple[jax.Array, jax.Array, jax.Array | None],
    begin: Any,
    first: Any,
    *,
    size: int,
    epsilon: float | None,
    tile: MatmulParams,
    sms: int,
) -> jax.Array:
    """The gradients of ``x · weight`` for ``size`` classes from ``begin`` on, ``[tokens, size]`` in the dtype of x.

    Args:
      lse: inf for a token that is ignored.
      cotangents: of lse, of the label's logit, and of the sum of the logits or None.
      first: the class before which the gradients are 0.
    """
    padding, _ = _padding(x.shape[0], tile)
    of_lse, of_label, of_sum = cotangents

    def padded(vector: jax.Array) -> jax.Array:
        return jnp.pad(vector.astype(jnp.float32), padding)

    begin = None if size == head.width else jnp.asarray(begin, jnp.int32).reshape(1)
    epilogue = LogitGradients(
        _tiles(head, begin, size, None, tile),
        jnp.pad(labels, padding, constant_values=-1),
        padded(lse),
        padded(of_lse),
        padded(of_label),
        None if of_sum is None else padded(of_sum),
        # A whole number of blocks have no classes in common.
        jnp.asarray(first, jnp.int32).reshape(1) if head.width % size else None,
        head.vocab if head.padding else None,
        epsilon,
    )
    result = jax.ShapeDtypeStruct((x.shape[0], size), x.dtype)
    (found,) = _call(head, x, size, begin, [result], epilogue, tile, sms)
    return found


def _padding(tokens: int, tile: MatmulParams) -> tuple[tuple[int, int], int]:
    """The padding of vectors of tokens, so that they have the rows of all tiles, and their length then."""
    rows = tile.block_m * tile.cluster_m
    padded = -(-tokens // rows) * rows
    return (0, padded - tokens), padded


def _tiles(head: Head, begin: jax.Array | None, size: int, tail: int | None, tile: MatmulParams) -> LogitTiles:
    bias = head.bias
    if bias is not None:
        if begin is not None:
            # By XLA: a block may begin at an odd class, and the kernel loads two classes at a time, at multiples of 8
            # bytes.
            bias = lax.dynamic_slice_in_dim(bias, begin[0], size)
        # By a tile: loads of the last tile are not clipped.
        bias = jnp.pad(bias.astype(jnp.float32), (0, tile.block_n * tile.cluster_n))
    return LogitTiles(begin, bias, head.soft_cap, tail)


def _call(
    head: Head,
    x: jax.Array,
    columns: int,
    begin: jax.Array | None,
    results: list[jax.ShapeDtypeStruct],
    epilogue: Epilogue,
    tile: MatmulParams,
    sms: int,
) -> list[jax.Array]:
    # A block of the vocabulary begins anywhere, not where an atom does.
    plan = dense_plan(
        x.dtype, x.shape, head.weight.shape, 1, tile, x.dtype,
        transpose_rhs=head.vocab_axis == 0, panelled=begin is not None and head.vocab_axis == 1,
    )  # fmt: skip
    steps = -(-x.shape[1] // plan.lhs.block_k)
    schedule = DenseSchedule(x.shape[0], columns, steps, plan.tile, begin)
    return matmul_kernel(
        [Factors(x, (head.weight,))], results, plan=plan, schedule=schedule, epilogue=epilogue, num_sms=sms
    )
