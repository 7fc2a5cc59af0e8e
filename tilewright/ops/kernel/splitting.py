"""The interface between kernels that say how a call may be split and the lowering that has XLA split it.

A call over automatic mesh axes is split by XLA's partitioner when a program is compiled. The kernel knows which
dimensions of its arrays go together, and what a device does with its part; the lowering knows the partitioner, mapped
axes, and how configs are chosen.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
from jax.sharding import AbstractMesh, PartitionSpec

from tilewright.ops.kernel.kernel import Kernel
from tilewright.ops.types import Direction
from tilewright.ops.utils.hook import Hook

AUTOMATIC = "automatic"
"""In place of a config's name: each device's part chooses its own."""

type Dimensions = tuple[str | None, ...]
"""The factor of each dimension of an array; dimensions with the same one are split together, ``None`` not at all."""

type RunStage = Callable[..., Any]
"""Runs the stage "results" or "gradients" of a call of a device's part: ``(stage, inputs, *rest)``."""


@dataclasses.dataclass(frozen=True)
class PartOfCall:
    """The part of a call that a device has, and its code.

    Attributes:
      operands: a spec for each operand.
      results: the same for each result.
      function: the flat results of a device from its parts of the operands, under the mesh's axes.
    """

    operands: Sequence[PartitionSpec]
    results: Sequence[PartitionSpec]
    function: Callable[..., Sequence[Any]]


class Splitting(Protocol):
    """One direction of a call, without its arrays; equal ones are the same call.

    Its methods get the abstract operands of a call of one element, without mapped axes.
    """

    @property
    def kernel(self) -> Kernel[Any, Any]:
        """The op."""

    @property
    def direction(self) -> Direction:
        """The direction of the call."""

    def inputs(self, operands: Sequence[Any]) -> Any:
        """The argument of the call that its config is chosen for."""

    def results(self, operands: Sequence[Any]) -> Sequence[jax.ShapeDtypeStruct]:
        """The abstract results."""

    def names(self, operands: Sequence[Any]) -> Sequence[str]:
        """The name of each operand, for people; those that are no arguments have none."""

    def identity(self, operands: Sequence[Any]) -> str:
        """A text that tells the call from others with the same inputs, in every process."""

    def priority(self, operands: Sequence[Any]) -> Sequence[int]:
        """The arrays, as indices of operands and then results, by whose split a call goes: the first that is split."""

    def dimensions(self, operands: Sequence[Any]) -> tuple[Sequence[Dimensions], Sequence[Dimensions]]:
        """The factors of the dimensions of operands and results."""

    def part(
        self, operands: Sequence[Any], mesh: AbstractMesh, axes: Mapping[str, tuple[str, ...]], run: RunStage
    ) -> PartOfCall:
        """The split of each factor over mesh axes.

        Raises:
          ValueError: the op cannot be split like that.
        """


BIND_SPLIT: Hook[Callable[[Splitting, Any, Sequence[Any]], list[Any]]] = Hook("the lowering of split calls")
"""Runs a call that XLA splits: ``(call, selector, operands)``."""
