"""Configs of the matmuls in XLA."""

import dataclasses

from tilewright.ops.kernel.arrays import is_symbolic
from tilewright.ops.types import Device
from tilewright.ops.utils.stable_ids import stable_id


@stable_id("tilewright/matmul.XlaGluBackwardParams")
@dataclasses.dataclass(frozen=True, slots=True)
class XlaGluBackwardParams:
    """Config of the backward pass of the gated linear unit.

    Attributes:
      recompute: compute the pre-activations again; under ``jax.jit`` those of the forward pass are then not kept.
    """

    recompute: bool = False

    def __post_init__(self) -> None:
        _check(self)


@stable_id("tilewright/grouped_matmul.XlaBlockParams")
@dataclasses.dataclass(frozen=True, slots=True)
class XlaBlockParams:
    """Config of loops over blocks of rows.

    Attributes:
      block_rows: rows of a block, all of one group; fewer if the call has fewer rows.
    """

    block_rows: int

    def __post_init__(self) -> None:
        _check(self)


@stable_id("tilewright/grouped_matmul.XlaGatedBackwardParams")
@dataclasses.dataclass(frozen=True, slots=True)
class XlaGatedBackwardParams:
    """Config of the backward pass of the gated grouped matmul; the attributes are those of the two above."""

    block_rows: int
    recompute: bool = False

    def __post_init__(self) -> None:
        _check(self)


def _check(params: XlaGluBackwardParams | XlaBlockParams | XlaGatedBackwardParams) -> None:
    name, self = type(params).__name__, params
    if not isinstance(params, XlaGluBackwardParams) and (type(params.block_rows) is not int or params.block_rows < 1):
        raise ValueError(f"{name} needs a positive integer, got {params.block_rows=}")
    if not isinstance(self, XlaBlockParams) and type(self.recompute) is not bool:
        raise TypeError(f"{name} needs a bool, got {self.recompute=}")


def block_rows(rows: int, groups: int, device: Device) -> int:
    """The rows of a block without measurements: a mean group's, from 8 to 128 on a CPU, from 16 to 512 elsewhere.

    A larger block is mostly rows of other groups; a smaller one copies a matrix for little arithmetic.
    """
    smallest, largest = (8, 128) if device.kind == "cpu" else (16, 512)
    if is_symbolic(rows, groups):
        return smallest * 4
    mean = -(-rows // max(groups, 1))
    return min(max(1 << (mean - 1).bit_length() if mean else 1, smallest), largest)


def candidate_rows(rows: int, groups: int, device: Device) -> list[int]:
    """Rows of a block that are worth measuring, the heuristic's first."""
    best = block_rows(rows, groups, device)
    return [best, *(each for each in (best // 4, best // 2, 2 * best, 4 * best) if each >= 4)]
