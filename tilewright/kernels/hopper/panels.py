"""Tiles in shared memory whose columns lie in panels, for arrays of any length and width.

Mosaic GPU tiles shared memory by atoms of 8 rows × one swizzle width, row of atoms by row of atoms. A TMA copy into
such a tile needs an array that is cut in the same way, so its rows must come in eights and its columns in swizzle
widths: other arrays would have to be padded, a copy in memory. In a panel, one swizzle width of columns, the atoms lie
one below the other, which is the order in which TMA itself writes rows: a copy for each panel takes the array as it is
and writes zeros for what lies beyond its end, and a store leaves that out.

The memory of a panel has two references: ``memory`` for TMA, plain rows, and ``operands`` for wgmma and for registers,
which are tiled.
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.mosaic_mma import (
    Panels,
    commit_wgmma,
    issue_wgmma,
    issue_wgmma_of_columns,
    panelled_operand,
    transposed_operand,
)
from tilewright.kernels.pallas_types import Index, Part, Ref


@dataclasses.dataclass(frozen=True, slots=True)
class PanelViews:
    """``PanelRef.at``."""

    ref: "PanelRef"

    def __getitem__(self, index: Index, /) -> Ref:
        return self.ref.view(index if isinstance(index, tuple) else (index,))


@dataclasses.dataclass(frozen=True, slots=True)
class PanelRef:
    """A reference to a tile of panels, or to a stack of such tiles: ``[*stack, rows, columns]``.

    Attributes:
      operands: of each panel the reference for wgmma and for registers.
      memory: of each panel the reference for TMA.
      stride: elements from a panel to the next.
      transforms: Mosaic's, of each of ``operands``.
      transposed: whether an MMA takes the tile as ``[columns, rows]``.
    """

    operands: tuple[Ref, ...]
    memory: tuple[Ref, ...]
    stride: int
    transforms: tuple[tuple[Any, ...], ...]
    transposed: bool = False

    @property
    def width(self) -> int:
        """Columns of a panel; the last one may have fewer."""
        return self.operands[0].shape[-1]

    @property
    def starts(self) -> tuple[int, ...]:
        """The first column of each panel."""
        return tuple(number * self.width for number in range(len(self.operands)))

    @property
    def panels(self) -> Panels:
        """Number, distance and direction of the panels, for the MMA."""
        return Panels(len(self.operands), self.stride, self.transposed)

    @property
    def by_width(self) -> "tuple[PanelRef, ...]":
        """The panels of one width, and the narrower last one, if there is one."""
        # Panels of one width are one MMA; a narrower one has another swizzle, and takes an MMA of its own.
        groups, first = [], 0
        for _, found in itertools.groupby(ref.shape[-1] for ref in self.operands):
            chosen = slice(first, first := first + len(list(found)))
            parts = self.operands[chosen], self.memory[chosen], self.stride, self.transforms[chosen]
            groups.append(PanelRef(*parts, self.transposed))
        return tuple(groups)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.operands[0].shape[:-1], self.starts[-1] + self.operands[-1].shape[-1])

    @property
    def dtype(self) -> np.dtype:
        return self.operands[0].dtype

    @property
    def at(self) -> PanelViews:
        return PanelViews(self)

    @property
    def T(self) -> "PanelRef":
        return dataclasses.replace(self, transposed=not self.transposed)

    def view(self, index: tuple[Part, ...]) -> Ref:
        """A part of the stack, of the rows, and of the columns: of these whole panels, and a single one as it is."""
        operands, memory, transforms = self.operands, self.memory, self.transforms
        if len(index) == len(self.shape):
            # Mosaic cuts a reference by whole atoms, and a panel is one atom wide.
            columns = index[-1]
            if not isinstance(columns, pl.Slice) or columns.start % self.width or columns.size % self.width:
                raise ValueError(f"columns are taken by panels of {self.width}, got {columns}")
            # The distance of the panels stays the same, so a part of them is an operand with the same stride.
            chosen = slice(columns.start // self.width, (columns.start + columns.size) // self.width)
            index, operands, memory, transforms = index[:-1], operands[chosen], memory[chosen], transforms[chosen]
            if len(operands) == 1:
                return operands[0].at[index]
        operands, memory = (tuple(ref.at[index] for ref in refs) for refs in (operands, memory))
        return dataclasses.replace(self, operands=operands, memory=memory, transforms=transforms)

    def reshape(self, *shape: int | tuple[int, ...]) -> Ref:
        raise ValueError(f"panels keep their shape, got {shape}")

    def __getitem__(self, index: Index, /) -> jax.Array:
        raise ValueError(f"a tile of panels is loaded panel by panel, got {index=}")

    def __setitem__(self, index: Index, value: ArrayLike, /) -> None:
        """Stores registers to the whole tile, ``ref[...] = value``."""
        if index is not Ellipsis or not isinstance(value, jax.Array):
            raise ValueError(f"a tile of panels is stored as a whole, from an array, got {index=}")
        for start, ref in zip(self.starts, self.operands, strict=True):
            ref[...] = value[:, start : start + ref.shape[-1]]


def mma(accumulator: Ref, a: Ref | jax.Array, b: Ref, *, transpose_a: bool = False) -> None:
    """Issues the MMA ``accumulator += a @ b``, as one group of wgmma.

    Args:
      a: registers, or a tile.
      b: a tile; of panels if ``a`` is.
      transpose_a: whether the operand is the transpose of the tile ``a``.
    """
    if isinstance(b, PanelRef):
        mma_of_panels(accumulator, a, b, transpose_a)
    else:
        assert not transpose_a or not isinstance(a, jax.Array)
        plgpu.wgmma(accumulator, a.T if transpose_a else a, b)


def mma_of_panels(accumulator: Ref, a: Ref | jax.Array, b: PanelRef, transpose_a: bool) -> None:
    """`mma` where ``b`` has panels.

    wgmma takes the distance of panels as that of two columns of atoms, so it reads panels as it reads whole tiles; an
    MMA for each panel would be up to a fifth slower. Pallas has no reference with such strides, so Mosaic GPU is called
    here as Pallas calls it for ``plgpu.wgmma``.

    Both operands may have a narrower last panel if the MMA contracts over columns: it is another swizzle, and another
    MMA of the same group. The accumulator may have fewer columns than ``b`` if ``a`` is in registers: so many are
    computed.
    """
    layout = plgpu.Layout.WGMMA
    parts, left_parts = b.by_width, a.by_width if isinstance(a, PanelRef) else None
    if len(parts) > 1 and (not b.transposed or left_parts is None or transpose_a):
        raise ValueError(f"only a contraction over columns takes panels of two widths, got {b.shape=}")
    # References go to Mosaic with the transforms of a single panel: the memref of the first one says where the operand
    # begins and how an atom is laid out, `panelled_operand` adds the other panels.
    types: list[Any] = [layout]
    operands: list[Ref | jax.Array] = []
    for number, part in enumerate(parts):
        left = a if left_parts is None else left_parts[number].operands[0]
        transforms = part.transforms[0] if left_parts is None else left_parts[number].transforms[0]
        types += [layout if isinstance(a, jax.Array) else plgpu.RefType(transforms), plgpu.RefType(part.transforms[0])]
        operands += [left, part.operands[0]]
    # Fewer columns than whole panels: P of 80 keys, say, or an accumulator that leaves out the columns of padding.
    is_partial = isinstance(a, jax.Array) and (accumulator.shape[1] < b.shape[1] or a.shape[1] % b.width > 0)

    @plgpu.inline_mgpu(
        arg_types=tuple(types),
        return_type=plgpu.ShapeDtypeStruct(accumulator.shape, jnp.float32, layout=layout),
    )
    def issue(_: Any, accumulator: Any, *operands: Any) -> Any:
        # The accumulator goes from MMA to MMA without a wait: wgmmas on one accumulator are ordered by the hardware,
        # and all of them are one group, so that callers count in-flight MMAs as with ``plgpu.wgmma``.
        for number, part in enumerate(parts):
            left, right = operands[2 * number : 2 * number + 2]
            left = left if left_parts is None else panelled_operand(left, left_parts[number].panels)
            left = transposed_operand(left) if transpose_a else left
            right, swizzle = panelled_operand(right, part.panels), part.width * part.dtype.itemsize
            issue_part = issue_wgmma_of_columns if is_partial else issue_wgmma
            accumulator = issue_part(accumulator, left, right, swizzle)
        commit_wgmma()
        return accumulator

    # Without a wait: an MMA that adds to the accumulator may be in flight.
    in_flight = plgpu.wgmma_accumulator_load(accumulator, wait_n=None)
    accumulator[...] = issue(in_flight, *operands)


def load_tile(source: Ref, target: Ref, barrier: Ref, cluster_axis: str | None = None) -> None:
    """Starts the TMA copies of a tile from global memory, ``[rows, columns]``, each of which arrives on ``barrier``.

    With ``cluster_axis`` all CTAs of the cluster load the same tile, each a part of it for all.
    """
    if not isinstance(target, PanelRef):
        plgpu.copy_gmem_to_smem(source, target, barrier, collective_axes=cluster_axis)
        return
    # A copy for each panel, not for each atom of 8 rows: with whole tiles of V filled atom by atom, 64 copies for a
    # step of 128 keys, calls took 6 to 8 % longer (docs/notes/hopper_attention.md).
    for start, panel in zip(target.starts, target.memory, strict=True):
        # The barrier counts a copy for each panel (``SharedTile.copies``), with zeros for what is beyond the array's
        # end: a copy that is clipped still completes all of its bytes.
        part = _columns(source, start, panel.shape[-1])
        plgpu.copy_gmem_to_smem(part, panel, barrier, collective_axes=cluster_axis)


def store_tile(source: Ref, target: Ref, first: int = 0) -> None:
    """Starts the TMA stores of a tile to global memory, ``[rows, columns]``, from column ``first`` on."""
    if isinstance(source, PanelRef):
        for start, panel in zip(source.starts, source.memory, strict=True):
            plgpu.copy_smem_to_gmem(panel, _columns(target, first + start, panel.shape[-1]))
    elif source.shape[-1] < target.shape[-1]:
        plgpu.copy_smem_to_gmem(source, target.at[:, pl.ds(first, source.shape[-1])])
    else:
        plgpu.copy_smem_to_gmem(source, target)


def _columns(array: Ref, start: int, width: int) -> Ref:
    """Columns of a panel in global memory, which may hang over the end."""
    # Pallas refuses a constant slice that reaches past the end; `axis_index * 0` is not a constant while it traces.
    hangs_over = start + width > array.shape[-1]
    return array.at[:, pl.ds(lax.axis_index("program") * 0 + start if hangs_over else start, width)]
