"""A layout algebra: functions from coordinates to offsets, given by trees of shapes and strides.

A coordinate may be a tree like the shape or an integer, which counts with the *first* mode fastest, whatever the
strides are. The definitions are those of CuTe (CUTLASS documentation, "CuTe Layout Algebra").
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

type Tree = int | tuple["Tree", ...]


def _leaves(tree: Tree) -> Iterator[int]:
    if isinstance(tree, int):
        yield tree
    else:
        for branch in tree:
            yield from _leaves(branch)


def _congruent(one: Tree, other: Tree) -> bool:
    if isinstance(one, int) or isinstance(other, int):
        return isinstance(one, int) and isinstance(other, int)
    return len(one) == len(other) and all(itertools.starmap(_congruent, zip(one, other, strict=True)))


def _size(shape: Tree) -> int:
    return math.prod(_leaves(shape))


def _offset(coordinate: Tree, shape: Tree, stride: Tree) -> int:
    if isinstance(coordinate, int):
        if not 0 <= coordinate < _size(shape):
            raise ValueError(f"{coordinate=} is outside of {shape=}")
        total = 0
        # The first leaf is the lowest digit of the integer.
        for extent, step in zip(_leaves(shape), _leaves(stride), strict=True):
            coordinate, position = divmod(coordinate, extent)
            total += position * step
        return total
    if isinstance(shape, int) or isinstance(stride, int) or len(coordinate) != len(shape):
        raise ValueError(f"{coordinate=} is no coordinate of {shape=}")
    return sum(_offset(*branch) for branch in zip(coordinate, shape, stride, strict=True))


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """The function that maps a coordinate of ``shape`` to the sum of its components times ``stride``."""

    shape: Tree
    stride: Tree

    def __post_init__(self) -> None:
        if not _congruent(self.shape, self.stride):
            raise ValueError(f"shape and stride must be the same tree, got {self.shape=}, {self.stride=}")
        if any(extent < 1 for extent in _leaves(self.shape)):
            raise ValueError(f"extents must be positive, got {self.shape=}")
        if any(step < 0 for step in _leaves(self.stride)):
            raise ValueError(f"strides must not be negative, got {self.stride=}")

    def __call__(self, *coordinate: Tree) -> int:
        """The offset of a coordinate, ``layout(5)``, ``layout(1, 2)`` or ``layout((0, 1), 2)``."""
        return _offset(coordinate[0] if len(coordinate) == 1 else coordinate, self.shape, self.stride)

    @property
    def modes(self) -> tuple["Layout", ...]:
        """The top branches, each a layout; a leaf is its own only mode."""
        if isinstance(self.shape, int) or isinstance(self.stride, int):
            return (self,)
        return tuple(itertools.starmap(Layout, zip(self.shape, self.stride, strict=True)))

    @property
    def flat(self) -> tuple[tuple[int, int], ...]:
        """Extent and stride of each leaf."""
        return tuple(zip(_leaves(self.shape), _leaves(self.stride), strict=True))

    @property
    def size(self) -> int:
        """Number of coordinates."""
        return _size(self.shape)

    @property
    def cosize(self) -> int:
        """One past the largest offset."""
        return 1 + sum((extent - 1) * step for extent, step in self.flat)

    def offsets(self) -> np.ndarray:
        """Offsets of all coordinates in the order of their integers."""
        offsets = np.zeros(1, np.int64)
        # The first leaf is the fastest digit, so it varies along the last axis here.
        for extent, step in self.flat:
            offsets = (np.arange(extent)[:, None] * step + offsets).reshape(-1)
        return offsets

    def matrix(self) -> np.ndarray:
        """Offsets of a layout of two modes as a matrix.

        Raises:
          ValueError: it has not two modes.
        """
        if len(self.modes) != 2:
            raise ValueError(f"a matrix has two modes, got {self.shape=}")
        rows, columns = self.modes
        return rows.offsets()[:, None] + columns.offsets()


def _of_modes(modes: Sequence[Layout]) -> Layout:
    """The layout with these modes."""
    return Layout(tuple(mode.shape for mode in modes), tuple(mode.stride for mode in modes))


def of_leaves(leaves: Sequence[tuple[int, int]]) -> Layout:
    """The layout with these extents and strides."""
    if not leaves:
        return Layout(1, 0)
    if len(leaves) == 1:
        return Layout(*leaves[0])
    return Layout(tuple(extent for extent, _ in leaves), tuple(step for _, step in leaves))


def row_major(*shape: int) -> Layout:
    """The compact layout whose last mode is contiguous."""
    return Layout(shape, tuple(math.prod(shape[mode + 1 :]) for mode in range(len(shape))))


def coalesce(layout: Layout) -> Layout:
    """The same function of integers with the fewest leaves."""
    merged: list[tuple[int, int]] = []
    for extent, step in layout.flat:
        if extent == 1:
            continue
        # Merged where the leaf goes on at the offset at which the one before it ends.
        if merged and step == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0] * extent, merged[-1][1])
        else:
            merged.append((extent, step))
    return of_leaves(merged)


def _compose_leaf(leaves: Sequence[tuple[int, int]], count: int, step: int) -> Layout:
    """The image of 0, step, 2·step, ... under the outer layout of these leaves."""
    # The leaves are the digits of a mixed radix: the step skips a leaf as a whole, or a leaf holds a whole number of
    # steps, or all that are left.
    if step == 0 or count == 1:
        return Layout(count, 0)
    found: list[tuple[int, int]] = []
    left, stride = count, step
    for extent, outer in leaves:
        if (left - 1) * stride < extent:
            found.append((left, outer * stride))
            break
        if stride % extent == 0:
            stride //= extent
            continue
        held = extent // stride
        if extent % stride or left % held:
            raise ValueError(
                f"{count=} steps of {step=} do not divide the outer layout: {left} of {stride} left at extent {extent}"
            )
        found.append((held, outer * stride))
        left, stride = left // held, 1
    return of_leaves(found)


def composition(outer: Layout, inner: Layout) -> Layout:
    """``outer(inner(x))`` as a layout with the modes of ``inner``.

    Raises:
      ValueError: ``inner`` has offsets outside of ``outer``, or the composition is no layout.
    """
    if inner.cosize > outer.size:
        raise ValueError(f"{inner.cosize=} offsets do not fit {outer.size=} coordinates")
    leaves = coalesce(outer).flat

    def compose(shape: Tree, stride: Tree) -> Layout:
        if isinstance(shape, int) or isinstance(stride, int):
            return _compose_leaf(leaves, *Layout(shape, stride).flat[0])
        return _of_modes(list(itertools.starmap(compose, zip(shape, stride, strict=True))))

    composed = compose(inner.shape, inner.stride)
    # Leaf by leaf is right only where the leaves of the inner layout do not carry into one another.
    if not np.array_equal(composed.offsets(), outer.offsets()[inner.offsets()]):
        raise ValueError(f"the modes of {inner} carry into one another in {outer}")
    return composed


def complement(layout: Layout, size: int) -> Layout:
    """The layout that repeats ``layout`` to fill ``[0, size)`` without overlap.

    Raises:
      ValueError: ``layout`` overlaps itself, or its gaps cannot be filled by one layout.
    """
    # Leaves by stride: ``filled`` offsets are taken below a leaf, and its stride has room for stride / filled copies of
    # them.
    gaps: list[tuple[int, int]] = []
    filled = 1
    for extent, step in sorted(layout.flat, key=lambda leaf: leaf[1]):
        if extent == 1:
            continue
        if step == 0 or step % filled:
            raise ValueError(f"{layout} has no complement: stride {step} is not a multiple of the {filled} below it")
        gaps.append((step // filled, filled))
        filled = extent * step
    gaps.append((-(-size // filled), filled))
    return coalesce(of_leaves(gaps))


def blocked_product(block: Layout, tiler: Layout) -> Layout:
    """A layout of ``tiler`` whose elements are copies of ``block``, with the modes of both joined: block first.

    Raises:
      ValueError: they differ in the number of modes, or ``block`` has no complement.
    """
    if len(block.modes) != len(tiler.modes):
        raise ValueError(f"block and tiler differ in their modes, got {block.shape=}, {tiler.shape=}")
    # The complement numbers the copies of ``block`` in memory, without overlap, and ``tiler`` says which of them is
    # where.
    repeats = composition(complement(block, block.size * tiler.cosize), tiler)
    return _of_modes(
        [coalesce(_of_modes([inner, outer])) for inner, outer in zip(block.modes, repeats.modes, strict=True)]
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Swizzle:
    """The permutation ``x ^ ((x & mask) >> shift)`` of offsets, its own inverse.

    ``mask`` covers ``bits`` bits from bit ``base + shift`` on; they are added to the ``bits`` bits from ``base`` on.
    """

    bits: int
    base: int
    shift: int

    def __post_init__(self) -> None:
        if min(self.bits, self.base) < 0 or self.shift < self.bits:
            raise ValueError(
                f"the permuted bits must lie below the mask, got {self.bits=}, {self.base=}, {self.shift=}"
            )

    @property
    def mask(self) -> int:
        """The bits that select the permutation."""
        return ((1 << self.bits) - 1) << (self.base + self.shift)

    @property
    def period(self) -> int:
        """Number of offsets after which the permutation repeats."""
        return 1 << (self.base + self.shift + self.bits)

    def __call__[Offset: (int, np.ndarray)](self, offset: Offset) -> Offset:
        """The permuted offset, or array of offsets."""
        return offset ^ ((offset & self.mask) >> self.shift)


@dataclasses.dataclass(frozen=True, slots=True)
class SwizzledLayout:
    """``swizzle(layout(coordinate))``; None leaves the layout as it is."""

    layout: Layout
    swizzle: Swizzle | None = None

    def __call__(self, *coordinate: Tree) -> int:
        """The offset of a coordinate."""
        offset = self.layout(*coordinate)
        return offset if self.swizzle is None else self.swizzle(offset)

    def offsets(self) -> np.ndarray:
        """Offsets of all coordinates in the order of their integers."""
        offsets = self.layout.offsets()
        return offsets if self.swizzle is None else self.swizzle(offsets)

    def matrix(self) -> np.ndarray:
        """Offsets of a layout of two modes as a matrix.

        Raises:
          ValueError: it has not two modes.
        """
        offsets = self.layout.matrix()
        return offsets if self.swizzle is None else self.swizzle(offsets)
