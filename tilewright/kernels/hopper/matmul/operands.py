"""The operands of a matmul: tiles that TMA cuts from their arrays, and that wgmma takes from shared memory."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np

from tilewright.kernels.hopper.limits import SWIZZLE_ROWS, TMA_STRIDE_BYTES
from tilewright.kernels.hopper.matmul.params import BLOCK_BYTES
from tilewright.kernels.hopper.ring import Ring, RingPart
from tilewright.kernels.hopper.shared import SharedTile
from tilewright.kernels.pallas_types import Ref, Scalar


@dataclasses.dataclass(frozen=True, slots=True)
class OperandLayout:
    """The static half of an operand: an array of ``[x, k]`` or ``[k, x]``, where x is m or n; or several of them.

    Attributes:
      k_first: whether the array is ``[k, x]``. wgmma reads such a tile transposed (16-bit elements only).
      stacked: whether the array has a leading axis of matrices.
      panelled: whether a tile with several swizzle widths of columns lies in panels, each of them a copy; else it is
        one copy, and the array must consist of whole atoms (`atomic`), and the ranges of K too.
      indexed: whether the array's rows are those that an index names (`IndexedRows`), which threads copy.
    """

    dtype: np.dtype
    k_first: bool
    stacked: bool = False
    panelled: bool = True
    indexed: bool = False

    @property
    def block_k(self) -> int:
        """Elements of a K step."""
        return BLOCK_BYTES // self.dtype.itemsize

    def part(self, block: int, consumers: int, multicast: bool) -> RingPart:
        """The tiles of a stage.

        Args:
          block: rows or columns of all consumers together.
          consumers: that share the block, and have tiles of their own where they cannot take rows of one.
          multicast: whether all CTAs of a cluster have the same tiles; those of threads each copies for itself.
        """
        indexed = self.indexed
        multicast = multicast and not indexed
        if self.k_first:
            # Consumers have columns of their own: panels are chosen while the kernel is traced, not by an index.
            tile = SharedTile((self.block_k, block // consumers), self.dtype, BLOCK_BYTES, self.panelled)
            return RingPart(tile, consumers, multicast=multicast, by_threads=indexed)
        # A row is one swizzle width, so the tile is one panel: one copy from an array of any length.
        tile = SharedTile((block, self.block_k), self.dtype, BLOCK_BYTES, True)
        return RingPart(tile, 1, multicast=multicast, by_threads=indexed)

    def slices(self, ref: Ref, matrix: Scalar | None, start: Scalar, k: Scalar, part: RingPart) -> Sequence[Ref]:
        """The slices of the array that the tiles of a stage are loaded from."""
        rows, columns = part.tile.shape
        matrices = (matrix,) if self.stacked else ()
        if not self.panelled:  # the start of a tile is that of an atom, as the tile's is
            start, k = (pl.multiple_of(jnp.asarray(x), y) for x, y in ((start, columns), (k, SWIZZLE_ROWS)))
        if not self.k_first:
            return [ref.at[*matrices, pl.ds(start, rows), pl.ds(k, columns)]]
        starts = [start + number * columns for number in range(part.count or 1)]
        return [ref.at[*matrices, pl.ds(k, rows), pl.ds(first, columns)] for first in starts]

    def lhs_tile(self, stages: Ring, step: Scalar, consumer: Scalar, rows: int) -> Ref:
        """A consumer's rows of lhs, ``[rows, k]`` or ``[k, rows]``."""
        if self.k_first:
            return stages.get_mma_tile(step, number=consumer)
        return stages.get_mma_tile(step).at[pl.ds(consumer * rows, rows)]

    def rhs_tile(self, stages: Ring, step: Scalar, part: int) -> Ref:
        """A tile of rhs as ``[k, n]``."""
        tile = stages.get_mma_tile(step, part=part)
        # A view, nothing moves: wgmma takes 16-bit operands in either major order, and 8-bit ones with K contiguous
        # only.
        return tile if self.k_first else tile.T


def atomic(shape: tuple[int, ...], dtype: np.dtype) -> bool:
    """True if an array consists of whole swizzle atoms, so that one TMA copy cuts a tile of several widths from it."""
    return shape[-2] % SWIZZLE_ROWS == 0 and shape[-1] * dtype.itemsize % BLOCK_BYTES == 0


DTYPES = ("bfloat16", "float16")
NARROW_DTYPES = ("float8_e4m3fn", "float8_e5m2")
RESULTS = (*DTYPES, "float32")


def operand_reasons(
    dtypes: Mapping[str, Any], out_dtype: str, sizes: Mapping[str, int], allowed: Sequence[str] = DTYPES
) -> list[str]:
    """Reasons why operands cannot be multiplied here; empty if they can.

    Args:
      dtypes: of the operands, by their names.
      allowed: dtypes of operands.
      sizes: of all dimensions that are the last one of an operand or of a result, by their names.
    """
    others = {name: dtype for name, dtype in dtypes.items() if str(dtype) not in allowed}
    reasons = [f"{name} must be one of {tuple(allowed)}, got {dtype}" for name, dtype in others.items()]
    if len(set(dtypes.values())) > 1:
        reasons.append(f"operands must have one dtype, got {', '.join(f'{x}: {dtype}' for x, dtype in dtypes.items())}")
    if out_dtype not in RESULTS:
        reasons.append(f"the result must be one of {RESULTS}, got {out_dtype}")
    itemsize = min((np.dtype(dtype).itemsize for dtype in dtypes.values()), default=2)
    for name, size in sizes.items():
        if size % (TMA_STRIDE_BYTES // itemsize):
            reasons.append(f"TMA needs rows at multiples of {TMA_STRIDE_BYTES} bytes, got {name}={size}")
    return reasons
