"""The epilogue of a work item: from its accumulators the results."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import jax

from tilewright.kernels.pallas_types import Scalar

type Columns = tuple[jax.Array, ...]
"""A tile in registers, float32 or as it is stored, in blocks of columns that lie beside each other."""


class Place(NamedTuple):
    """A consumer's tile: its first row and column of the result, and the number of its tile of columns."""

    row: Scalar
    column: Scalar
    tile: Scalar


class Epilogue(Protocol):
    """An op's own epilogue. Its leaves are arrays, in the kernel references to them."""

    def __call__(self, sums: Sequence[Columns], place: Place) -> Sequence[Columns | jax.Array]:
        """Computes a part of each result.

        Args:
          sums: one tile for each operand of rhs.

        Returns:
          Tiles for results of ``[m, n]``, and vectors of a value for each row for those of ``[tiles of columns, m]``.
        """
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class AsSummed:
    """Stores the accumulators as they are."""

    def __call__(self, sums: Sequence[Columns], place: Place) -> Sequence[Columns]:
        """The tiles of the results."""
        return sums
