"""The operands that the backward kernels of one call on Hopper share."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.flash_attention.hopper.params import BackwardParams
from tilewright.kernels.flash_attention.hopper.scores import ScoreArrays, ScoreOptions
from tilewright.kernels.pallas_types import Scalar


@dataclasses.dataclass(frozen=True, slots=True)
class GroupParts:
    """The query heads of a key head, split over several work items, each of which has a part of dK and dV of its keys.

    Attributes:
      group: query heads of a key head.
      parts: work items of a tile of keys; with one part, an item has all query heads, and dK and dV are not sums.
    """

    group: int
    parts: int = 1

    def __post_init__(self) -> None:
        if self.parts < 1 or (self.parts - 1) * self.size >= self.group:
            raise ValueError(f"every part needs a query head, got {self.group=}, {self.parts=} of {self.size}")

    @property
    def size(self) -> int:
        """Query heads of a part; the last one may have fewer."""
        return -(-self.group // self.parts)

    def key_head(self, key_part: Scalar) -> Scalar:
        """The key head of a part, which is counted over all key heads."""
        return key_part if self.parts == 1 else lax.div(key_part, jnp.int32(self.parts))

    def query_heads(self, key_part: Scalar) -> tuple[Scalar, Scalar]:
        """The first query head of a part, and their number."""
        if self.parts == 1:
            return key_part * self.group, self.group
        part = lax.rem(key_part, jnp.int32(self.parts))
        first = self.key_head(key_part) * self.group + part * self.size
        # A Python number where all parts have as many heads: a loop over them then has constant bounds.
        if self.group % self.parts == 0:
            return first, self.size
        return first, lax.min(jnp.int32(self.size), self.group - part * self.size)

    def total(self, gradient: jax.Array, dtype: DTypeLike) -> jax.Array:
        """dK or dV from ``[batch, length, kv_heads · parts, dim]``."""
        if self.parts == 1:
            return gradient
        batch, length, _, dim = gradient.shape
        # The parts are float32 (`KeyValueResults`), so the sum of the heads is rounded once.
        return gradient.reshape(batch, length, -1, self.parts, dim).sum(axis=3).astype(dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class BackwardCall[Params: BackwardParams]:
    """The arrays that all backward kernels read, and the static options of the scores.

    Attributes:
      query, key: ``[batch, length, heads, head_dim]``.
      value, d_out, out: the same with ``value_dim``.
      statistics: a reference, ``[batch, heads, 2, padded q_length]`` float32, to the initial values of the accumulators
        of S and of dP, so that their subtraction costs nothing. Row 0 is −lse in the unit of
        ``ScoreOptions.multiplier``, −∞ for fully masked rows and those beyond the last query; row 1 is
        −delta = d_lse − rowsum(dO ∘ O). A kernel that computes only dQ finds d_lse in row 1, and subtracts the row sum.
      arrays: for tiles ``[queries, keys]``.
      padded_dims: head_dim and value_dim that the kernels compute with.
      panelled: whether tiles of the arrays lie in panels.
      parts: of the query heads of a key head, in the kernel for dK and dV.
      bias_dtype: of a bias that passes through shared memory (`BiasTiles`), else None.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    d_out: jax.Array
    out: jax.Array
    statistics: jax.Ref
    arrays: ScoreArrays
    options: ScoreOptions
    params: Params
    padded_dims: tuple[int, int]
    panelled: bool
    parts: GroupParts
    bias_dtype: DTypeLike | None

    @property
    def operands(self) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Query, key, value and d_out."""
        return self.query, self.key, self.value, self.d_out


class QueryOperands[Operand, Items](NamedTuple):
    """Operands of a kernel that computes only dQ, as arrays or references.

    Attributes:
      statistics: as in ``BackwardCall``, with d_lse in the second row.
      items: ``program_lists`` over tiles of queries, or for wide heads the work item of each CTA.
      tables: of the tile schedule.
    """

    query: Operand
    key: Operand
    value: Operand
    d_out: Operand
    out: Operand
    statistics: Operand
    items: Items
    tables: tuple[Operand, ...]
    arrays: ScoreArrays


class ConversionResults[Result](NamedTuple):
    """Results of an `OverlappedConversion`.

    Attributes:
      d_query: dQ with the rows that are converted.
      done: for each work item whether its rows are, int32.
    """

    d_query: Result
    done: Result


class KeyValueResults[Result](NamedTuple):
    """Results of a kernel for dK and dV: their types, references to them, or arrays.

    Attributes:
      d_key, d_value: whole tiles of keys if the gradient of a bias is added, else as long as key and value; where query
        heads are split (`GroupParts`) float32, with a head for each part.
      conversion: None unless a conversion of dQ is overlapped.
      d_bias: the array of a `BiasGradient` that the kernel stores as a whole; else None.
    """

    d_key: Result
    d_value: Result
    conversion: ConversionResults[Result] | None = None
    d_bias: Result | None = None
