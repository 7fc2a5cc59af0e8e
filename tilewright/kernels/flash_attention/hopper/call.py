"""What the backward kernels of one call on Hopper have in common."""

import dataclasses
from typing import NamedTuple

import jax

from tilewright.kernels.flash_attention.hopper.params import BackwardParams
from tilewright.kernels.flash_attention.hopper.scores import ScoreArrays, ScoreOptions


@dataclasses.dataclass(frozen=True, slots=True)
class BackwardCall[Params: BackwardParams]:
    """The arrays that all backward kernels read, padded, and what they are told of the scores.

    Attributes:
      query, key: ``[batch, length, heads, head_dim]``.
      value, d_out, out: the same with ``value_dim``.
      statistics: a reference, ``[batch, heads, 2, padded q_length]`` float32, to what scores and the gradients of
        probabilities start from, so that to subtract it costs nothing: lse in the unit of ``ScoreOptions.multiplier``,
        −∞ where a row sees nothing or does not exist; and the row sums of ``d_out · out`` less the gradient of lse.
        Both negated. A kernel for dQ alone finds the gradient of lse in the second row, and subtracts the row sums.
      arrays: for tiles ``[queries, keys]``.
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

    @property
    def operands(self) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Query, key, value and d_out."""
        return self.query, self.key, self.value, self.d_out


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
      d_key, d_value: whole tiles of keys if the gradient of a bias is added, else as long as key and value.
      conversion: None unless a conversion of dQ is overlapped.
    """

    d_key: Result
    d_value: Result
    conversion: ConversionResults[Result] | None = None
