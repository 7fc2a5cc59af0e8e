"""Tiles in shared memory: their layout as TMA and wgmma want it, Mosaic GPU's transforms for it, and their bytes."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.layouts import Layout, Swizzle, SwizzledLayout, blocked_product, row_major
from tilewright.kernels.hopper.limits import SHARED_ALIGNMENT, SWIZZLE_ROWS, SWIZZLES
from tilewright.kernels.hopper.panels import PanelRef
from tilewright.kernels.pallas_types import Ref

# A type checker takes the transforms of jax 0.12 for abstract, because one method of their base has no body.
_mosaic: Any = plgpu

# A swizzle permutes vectors of 16 bytes by the index of the 128-byte line that they lie in.
_VECTOR_BYTES = 16
_LINE_SHIFT = 3


def swizzle_of(rows: int, columns: int, dtype: DTypeLike, swizzle: int | None = None) -> int:
    """The swizzle in bytes of a rows × columns tile: the one asked for, or the widest that divides the columns.

    Raises:
      ValueError: no width fits, with the reason.
    """
    itemsize = jnp.dtype(dtype).itemsize
    if rows < 1 or columns < 1:
        raise ValueError(f"a tile must not be empty, got {rows=}, {columns=}")
    if rows % SWIZZLE_ROWS:
        raise ValueError(f"a swizzle permutes blocks of {SWIZZLE_ROWS} rows, which do not divide {rows=}")
    if swizzle is not None:
        if swizzle not in SWIZZLES:
            raise ValueError(f"swizzles are {sorted(SWIZZLES)} bytes wide, got {swizzle=}")
        if columns * itemsize % swizzle:
            raise ValueError(
                f"{columns=} of {itemsize} bytes are no multiple of the {swizzle}-byte swizzle "
                f"({swizzle // itemsize} columns)"
            )
        return swizzle
    for width in SWIZZLES:
        if columns * itemsize % width == 0:
            return width
    raise ValueError(f"{columns=} of {itemsize} bytes are no multiple of any swizzle, the narrowest has 32 bytes")


def hardware_swizzle(width: int, itemsize: int) -> Swizzle:
    """The permutation of elements that TMA and wgmma apply at a width in bytes."""
    if _VECTOR_BYTES % itemsize:
        raise ValueError(f"{itemsize=} does not divide the {_VECTOR_BYTES} bytes that a swizzle moves")
    base = (_VECTOR_BYTES // itemsize).bit_length() - 1
    return Swizzle((width // _VECTOR_BYTES).bit_length() - 1, base, _LINE_SHIFT)


def shared_layout(rows: int, columns: int, dtype: DTypeLike, swizzle: int | None = None) -> SwizzledLayout:
    """The layout of a rows × columns tile in shared memory: atoms of 8 rows × one swizzle width, row-major in both.

    Raises:
      ValueError: no swizzle fits, with the reason.
    """
    width = swizzle_of(rows, columns, dtype, swizzle)
    itemsize = jnp.dtype(dtype).itemsize
    block = (SWIZZLE_ROWS, width // itemsize)
    tiled = blocked_product(row_major(*block), row_major(rows // block[0], columns // block[1]))
    return SwizzledLayout(tiled, hardware_swizzle(width, itemsize))


def emit_transforms(layout: SwizzledLayout | Layout, dtype: DTypeLike) -> tuple[Any, ...]:
    """``(TilingTransform, SwizzleTransform)`` for a tile with this layout.

    Raises:
      ValueError: wgmma cannot read such a tile, with the reason.
    """
    if isinstance(layout, Layout):
        layout = SwizzledLayout(layout)
    if len(layout.layout.modes) != 2:
        raise ValueError(f"a tile has rows and columns, got {layout.layout.shape=}")
    itemsize = jnp.dtype(dtype).itemsize
    rows, columns = (mode.size for mode in layout.layout.modes)
    if layout.swizzle is None:
        raise ValueError(f"wgmma's operands are swizzled by {sorted(SWIZZLES)} bytes, got no swizzle")
    widths = [width for width in SWIZZLES if hardware_swizzle(width, itemsize) == layout.swizzle]
    if not widths:
        raise ValueError(f"{layout.swizzle} is none of the hardware's for {itemsize} bytes: {sorted(SWIZZLES)} wide")
    (width,) = widths
    expected = shared_layout(rows, columns, dtype, width)
    # Compared as functions: different trees of modes may be the same function.
    if not np.array_equal(layout.layout.matrix(), expected.layout.matrix()):
        raise ValueError(
            f"the {width}-byte swizzle needs blocks of {SWIZZLE_ROWS} × {width // itemsize} in row-major order, "
            f"{expected.layout}, got {layout.layout}"
        )
    return _mosaic.TilingTransform((SWIZZLE_ROWS, width // itemsize)), _mosaic.SwizzleTransform(width)


@functools.lru_cache(maxsize=256)
def _tile_transforms(rows: int, columns: int, dtype: DTypeLike, swizzle: int | None) -> tuple[Any, ...]:
    """The transforms of a rows × columns tile, whose layout takes long to compute."""
    return emit_transforms(shared_layout(rows, columns, dtype, swizzle), dtype)


def aligned_bytes(shape: tuple[int, ...], dtype: DTypeLike) -> int:
    """Shared memory of a buffer in bytes, alignment included."""
    size = math.prod(shape) * jnp.dtype(dtype).itemsize
    return -(-size // SHARED_ALIGNMENT) * SHARED_ALIGNMENT


def panel_scratch(shapes: Sequence[tuple[int, ...]], dtype: DTypeLike, transforms: Sequence[tuple[Any, ...]]) -> Any:
    """The scratch type of panels of these shapes: for each two views of one memory, with and without tiling."""
    panels = list(zip(shapes, transforms, strict=True))
    # Mosaic lays both halves of the union out alike, for they have the same panels.
    return plgpu.RefUnion(
        tuple(plgpu.SMEM(shape, dtype, transforms=(swizzle,)) for shape, (_, swizzle) in panels),
        tuple(plgpu.SMEM(shape, dtype, transforms=both) for shape, both in panels),
    )


def panel_references(ref: Any) -> tuple[tuple[Ref, ...], tuple[Ref, ...]]:
    """References to panels without and with tiling, from the reference to their union."""
    memory, operands = ref
    return tuple(memory), tuple(operands)


@dataclasses.dataclass(frozen=True)
class SharedTile:
    """A tile in shared memory, whose layout, transforms and size follow from shape, dtype and swizzle.

    Attributes:
      swizzle: in bytes; None takes the widest that fits, 0 leaves the tile row-major, which is the only choice for a
        tile that is not a matrix. Both operands of one wgmma that are in shared memory must have the same.
      panelled: whether the columns lie in panels of one swizzle width, for arrays that TMA cannot cut into atoms. If
        the swizzle given does not divide the columns, the last panel has the rest, by a narrower swizzle.
    """

    shape: tuple[int, ...]
    dtype: Any
    swizzle: int | None = None
    panelled: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        object.__setattr__(self, "shape", tuple(self.shape))
        if not self.shape or min(self.shape) < 1:
            raise ValueError(f"a tile needs positive dimensions, got {self.shape=}")
        if len(self.shape) != 2:
            if self.swizzle:
                raise ValueError(f"only matrices are swizzled, got {self.swizzle=} for {self.shape=}")
            object.__setattr__(self, "swizzle", 0)
        elif self.swizzle != 0:
            rows, columns = self.shape
            # A narrower last panel is swizzled for itself, so only the columns of the others must be a multiple of the
            # width.
            if self.panelled and self.swizzle:
                columns -= columns * self.dtype.itemsize % self.swizzle // self.dtype.itemsize
            object.__setattr__(self, "swizzle", swizzle_of(rows, columns, self.dtype, self.swizzle))
        if self.panelled and not self.swizzle:
            raise ValueError(f"panels are as wide as a swizzle, got {self.swizzle=}")
        if self.panelled and self.panels[-1] * self.dtype.itemsize not in SWIZZLES:
            raise ValueError(f"the last of the panels {self.panels} of {self.shape=} is as wide as no swizzle")

    @functools.cached_property
    def panels(self) -> tuple[int, ...]:
        """Columns of each panel; a single one for a tile that has none."""
        columns, width = self.shape[-1], (self.swizzle or 0) // self.dtype.itemsize
        if not self.panelled or not width:
            return (columns,)
        rest = columns % width
        return (width,) * (columns // width) + ((rest,) if rest else ())

    @functools.cached_property
    def layout(self) -> SwizzledLayout:
        """The offset of each element; of panels, in the first one."""
        if not self.swizzle:
            return SwizzledLayout(row_major(*self.shape))
        rows, columns = self.shape[0], self.panels[0]
        return shared_layout(rows, columns, self.dtype, self.swizzle)

    @functools.cached_property
    def transforms(self) -> tuple[Any, ...]:
        """Mosaic's tiling and swizzle, emitted from the layout; none where the tile stays row-major."""
        return _tile_transforms(self.shape[0], self.panels[0], self.dtype, self.swizzle) if self.swizzle else ()

    def panel_transforms(self, width: int) -> tuple[Any, ...]:
        """The transforms of a panel of so many columns."""
        return _tile_transforms(self.shape[0], width, self.dtype, None)

    @functools.cached_property
    def copies(self) -> int:
        """TMA copies of a tile: one for each panel."""
        return len(self.panels)

    def stack_bytes(self, count: int) -> int:
        """Shared memory of so many tiles in bytes, alignment included."""
        if self.panelled:
            return sum(aligned_bytes((count, self.shape[0], width), self.dtype) for width in self.panels)
        return aligned_bytes((count, *self.shape), self.dtype)

    def scratch(self, *stack: int) -> Any:
        """The scratch type of the tile, or of a stack of such tiles, whose reference ``bind`` takes."""
        if not self.panelled:
            return plgpu.SMEM((*stack, *self.shape), self.dtype, transforms=self.transforms)
        # Panels of one column range lie beside each other for the whole stack, so slots are indices of every panel, and
        # the distance of two panels is that of two stacks.
        shapes = [(*stack, self.shape[0], width) for width in self.panels]
        return panel_scratch(shapes, self.dtype, [self.panel_transforms(width) for width in self.panels])

    def bind(self, ref: Any) -> Ref:
        """The tile, or stack of tiles, over the reference that the kernel got for ``scratch()``."""
        if not self.panelled:
            return ref
        memory, operands = panel_references(ref)
        # Mosaic aligns each scratch buffer, so the stride includes the alignment, too.
        stride = aligned_bytes(operands[0].shape, self.dtype) // self.dtype.itemsize
        return PanelRef(operands, memory, stride, tuple(map(self.panel_transforms, self.panels)))

    def stack(self, *stack: int) -> "TileStack":
        """A stack of such tiles as a part of a kernel's scratch memory; of no dimensions, a single tile."""
        return TileStack(self, stack)


@dataclasses.dataclass(frozen=True, slots=True)
class TileStack:
    """The plan of a stack of tiles, which ``run_kernel`` binds."""

    tile: SharedTile
    counts: tuple[int, ...]

    def scratch(self) -> tuple[Any]:
        """The scratch type, in the form of ``RingPlan.scratch``."""
        return (self.tile.scratch(*self.counts),)

    def bind(self, ref: Any) -> Ref:
        """The stack over the reference that the kernel got."""
        return self.tile.bind(ref)
