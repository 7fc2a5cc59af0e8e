"""The parts that Triton kernels of matmuls share: tiles, and the precision of products of float32."""

import dataclasses

import jax

from tilewright.kernels.triton.limits import MIN_DOT, power_of_two
from tilewright.ops.utils.stable_ids import stable_id

EXACT = ("HIGH", "FLOAT32", "F32", "BFLOAT16_3X", "BF16_BF16_F32_X", "TENSORFLOAT32_X3", "TF32_TF32_F32_X3")
"""Prefixes of precisions for which float32 must not be rounded to TensorFloat-32, by XLA's meaning of them."""


@stable_id("tilewright/grouped_matmul.TritonTile")
@dataclasses.dataclass(frozen=True, slots=True)
class TritonTile:
    """The tile and the launch of one kernel.

    Attributes:
      rows, columns: of a program's part of the result.
      depth: rows or columns that are summed in one step.
      num_warps: warps of a program.
      num_stages: stages of its pipelined loop.
    """

    rows: int
    columns: int
    depth: int
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        for name, minimum, maximum in (
            ("rows", MIN_DOT, 256), ("columns", MIN_DOT, 256), ("depth", MIN_DOT, 256), ("num_warps", 1, 16),
        ):  # fmt: skip
            value = getattr(self, name)
            if type(value) is not int or value & (value - 1) or not minimum <= value <= maximum:
                raise ValueError(f"{name} must be a power of two from {minimum} to {maximum}, got {self}")
        if type(self.num_stages) is not int or not 1 <= self.num_stages <= 8:
            raise ValueError(f"num_stages must be from 1 to 8, got {self}")

    def shared_bytes(self, itemsize: int) -> int:
        """Estimate for a program: both operands of every stage."""
        return self.num_stages * (self.rows + self.columns) * self.depth * itemsize


def fitted(tile: TritonTile, columns: int, depth: int) -> TritonTile:
    """The tile, no wider and no deeper than the arrays."""
    return dataclasses.replace(
        tile,
        columns=min(tile.columns, power_of_two(columns, MIN_DOT)),
        depth=min(tile.depth, power_of_two(depth, MIN_DOT)),
    )


def tl_precision(precision: jax.lax.Precision | None = None) -> str:
    """The input precision of ``tl.dot``: float32 is rounded to TensorFloat-32 unless the call says otherwise.

    A call without a precision has that of ``jax.default_matmul_precision``, as in XLA.
    """
    given = jax.config.jax_default_matmul_precision if precision is None else precision
    return "tf32x3" if getattr(given, "name", str(given)).upper().startswith(EXACT) else "tf32"
