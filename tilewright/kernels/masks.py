"""The mask algebra that all attention ops share: visible positions, and classes of empty and full tiles.

``True`` means visible: the query attends to the key. A mask is a pytree: arrays are its leaves, everything else is
static. A mask without arrays is classified with numpy while tracing; one with arrays by a few array operations, in
memory linear in the lengths (an ``ExplicitMask`` itself is quadratic).
"""

import abc
import dataclasses
import functools
import operator
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, Integer

from tilewright.ops.kernel.arrays import is_symbolic
from tilewright.ops.utils.stable_ids import stable_id

type Index = int | Integer[Array, ""]
type TileClasses = np.ndarray | Int[Array, "#batch #heads q_tiles kv_tiles"]
type TileBool = Bool[Array, "#batch #heads #q_size #kv_size"]
type Numbers = np.ndarray | Array

_INT32 = np.iinfo(np.int32)


class TileClass(IntEnum):
    """Visibility of a tile's positions; in this order AND is the minimum and OR the maximum."""

    EMPTY = 0
    PARTIAL = 1
    FULL = 2


@dataclasses.dataclass(frozen=True, slots=True)
class TileGrid:
    """A ``q_length`` × ``kv_length`` score matrix cut into tiles; the last of a row or column may be ragged."""

    q_length: int
    kv_length: int
    block_q: int
    block_k: int

    def __post_init__(self) -> None:
        if self.q_length < 0 or self.kv_length < 0:
            raise ValueError(f"lengths must not be negative, got {self.q_length=}, {self.kv_length=}")
        if self.block_q < 1 or self.block_k < 1:
            raise ValueError(f"blocks must be positive, got {self.block_q=}, {self.block_k=}")

    @property
    def q_tiles(self) -> int:
        return -(-self.q_length // self.block_q)

    @property
    def kv_tiles(self) -> int:
        return -(-self.kv_length // self.block_k)

    @property
    def is_symbolic(self) -> bool:
        """True if a length is a symbolic dimension of ``jax.export``: tile arrays are then not numpy's."""
        return is_symbolic(self.q_length, self.kv_length)

    @property
    def q_bounds(self) -> tuple[Numbers, Numbers]:
        """First and last row of each row of tiles, both inclusive, without the ragged tile's padding."""
        return _block_bounds(self.q_length, self.block_q)

    @property
    def kv_bounds(self) -> tuple[Numbers, Numbers]:
        """First and last column of each column of tiles, both inclusive, without the ragged tile's padding."""
        return _block_bounds(self.kv_length, self.block_k)


class Mask(abc.ABC):
    """Decides which query may attend to which key; masks combine with ``&`` and ``|``."""

    __slots__ = ()

    def __and__(self, other: "Mask") -> "AndMask":
        if not isinstance(other, Mask):
            return NotImplemented
        return AndMask(members(self, AndMask) + members(other, AndMask))

    def __or__(self, other: "Mask") -> "OrMask":
        if not isinstance(other, Mask):
            return NotImplemented
        return OrMask(members(self, OrMask) + members(other, OrMask))

    @property
    def is_static(self) -> bool:
        """True if the mask holds no array, so that ``classify`` returns a numpy array."""
        return not jax.tree.leaves(self)

    def materialise(self, q_length: int, kv_length: int) -> TileBool:
        """The whole mask, broadcastable to ``[batch, heads, q_length, kv_length]``: the definition."""
        return self.tile(0, q_length, 0, kv_length)

    @abc.abstractmethod
    def tile(self, q_start: Index, q_size: int, kv_start: Index, kv_size: int) -> TileBool:
        """One tile of ``materialise``; the starts may be traced.

        The tile must lie within the lengths of the mask's arrays (a traced slice that does not is silently shifted): if
        the last tile is ragged, ``pad`` the arrays first, and bound rows and columns by the true lengths.
        """

    @abc.abstractmethod
    def classify(self, grid: TileGrid, *, static_only: bool = False) -> TileClasses:
        """The ``TileClass`` of each tile, ``[batch|1, heads|1, q_tiles, kv_tiles]``, int32.

        Sound: EMPTY has no True and FULL no False among the tile's positions within ``grid``'s lengths (the padding of
        a ragged tile does not count); PARTIAL implies nothing. With ``static_only`` every part that holds arrays counts
        as PARTIAL, and the result is always a numpy array.
        """

    @abc.abstractmethod
    def pad(self, q_length: int, kv_length: int) -> "Mask":
        """The mask with its arrays extended to these lengths; its values in the padding are unspecified."""

    @abc.abstractmethod
    def take(self, batch_start: Index, batch_size: int, head_start: Index, head_size: int) -> "Mask":
        """The mask of a range of batch elements and query heads."""

    @abc.abstractmethod
    def check(self, batch: int, heads: int, q_length: int, kv_length: int) -> None:
        """Raises ``ValueError`` if an array does not fit a score matrix of this shape, ``TypeError`` for its dtype."""


class BandMask(Mask):
    """A mask that depends only on the difference of the key's and the query's position."""

    __slots__ = ()

    q_positions: Integer[Array, "#batch q_length"] | None
    kv_positions: Integer[Array, "#batch kv_length"] | None

    @property
    @abc.abstractmethod
    def difference_bounds(self) -> tuple[int | None, int | None]:
        """The minimum and maximum visible ``j - i``, None if unbounded."""

    def tile(self, q_start: Index, q_size: int, kv_start: Index, kv_size: int) -> TileBool:
        lowest, highest = self.difference_bounds
        rows = _positions(self.q_positions, q_start, q_size)[:, None, :, None]
        columns = _positions(self.kv_positions, kv_start, kv_size)[:, None, None, :]
        # int32 suffices: positions are at most ±2³⁰, see `CausalMask`.
        difference = columns - rows
        # Broadcastable, so that a band without bounds makes no array of the tile's size.
        visible = jnp.ones((1, 1, 1, 1), bool)
        if lowest is not None:
            visible = visible & (difference >= _saturate(lowest))
        if highest is not None:
            visible = visible & (difference <= _saturate(highest))
        return visible

    def classify(self, grid: TileGrid, *, static_only: bool = False) -> TileClasses:
        if self.is_static:
            return _difference_classes(*self.difference_bounds, *grid.q_bounds, *grid.kv_bounds)
        if static_only:
            return _all_partial(grid)
        # Min and max of each block suffice to bound j - i. Positions with gaps may leave a full or empty tile PARTIAL.
        q_bounds = _position_bounds(self.q_positions, grid.q_bounds, grid.block_q)
        kv_bounds = _position_bounds(self.kv_positions, grid.kv_bounds, grid.block_k)
        return _difference_classes(*self.difference_bounds, *q_bounds, *kv_bounds)

    def pad(self, q_length: int, kv_length: int) -> "BandMask":
        return self._with(_pad_edge(self.q_positions, -1, q_length), _pad_edge(self.kv_positions, -1, kv_length))

    def take(self, batch_start: Index, batch_size: int, head_start: Index, head_size: int) -> "BandMask":
        return self._with(*(_take(part, 0, batch_start, batch_size) for part in (self.q_positions, self.kv_positions)))

    def check(self, batch: int, heads: int, q_length: int, kv_length: int) -> None:
        _check_rows("q_positions", self.q_positions, batch, q_length)
        _check_rows("kv_positions", self.kv_positions, batch, kv_length)

    def _with(self, q_positions: Array | None, kv_positions: Array | None) -> "BandMask":
        return dataclasses.replace(self, q_positions=q_positions, kv_positions=kv_positions)  # type: ignore[type-var]


class CombinedMask(Mask):
    """A mask combined from others."""

    __slots__ = ()

    masks: tuple[Mask, ...]

    def pad(self, q_length: int, kv_length: int) -> "CombinedMask":
        return type(self)(tuple(mask.pad(q_length, kv_length) for mask in self.masks))  # type: ignore[call-arg]

    def take(self, batch_start: Index, batch_size: int, head_start: Index, head_size: int) -> "CombinedMask":
        parts = tuple(mask.take(batch_start, batch_size, head_start, head_size) for mask in self.masks)
        return type(self)(parts)  # type: ignore[call-arg]

    def check(self, batch: int, heads: int, q_length: int, kv_length: int) -> None:
        for mask in self.masks:
            mask.check(batch, heads, q_length, kv_length)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["q_positions", "kv_positions"], meta_fields=["offset"]
)
@stable_id("tilewright/masks.CausalMask", formerly=("tilewright.kernels.masks:CausalMask",))
@dataclasses.dataclass(frozen=True, slots=True)
class CausalMask(BandMask):
    """Key ``j`` is visible to query ``i`` iff ``j <= i + offset``; the position arrays, ±2³⁰ at most, replace i and j.

    Attributes:
      offset: 0 aligns the first query with the first key, ``kv_length - q_length`` the last with the last.
      q_positions: ``[batch|1, q_length]`` integers, or None for the row's index.
      kv_positions: ``[batch|1, kv_length]`` integers, or None for the column's index.
    """

    offset: int = 0
    q_positions: Integer[Array, "#batch q_length"] | None = None
    kv_positions: Integer[Array, "#batch kv_length"] | None = None

    def __post_init__(self) -> None:
        operator.index(self.offset)

    @property
    def difference_bounds(self) -> tuple[int | None, int | None]:
        return None, self.offset


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["q_positions", "kv_positions"],
    meta_fields=["left", "right", "offset"],
)
@stable_id("tilewright/masks.WindowMask", formerly=("tilewright.kernels.masks:WindowMask",))
@dataclasses.dataclass(frozen=True, slots=True)
class WindowMask(BandMask):
    """Key ``j`` is visible to query ``i`` iff ``i + offset - left <= j <= i + offset + right``; None is unbounded.

    The position arrays are those of ``CausalMask``.
    """

    left: int | None
    right: int | None
    offset: int = 0
    q_positions: Integer[Array, "#batch q_length"] | None = None
    kv_positions: Integer[Array, "#batch kv_length"] | None = None

    def __post_init__(self) -> None:
        operator.index(self.offset)
        for side in (self.left, self.right):
            if side is not None and operator.index(side) < 0:
                raise ValueError(f"a window's sides must not be negative, got {self.left=}, {self.right=}")

    @property
    def difference_bounds(self) -> tuple[int | None, int | None]:
        lowest = None if self.left is None else self.offset - self.left
        highest = None if self.right is None else self.offset + self.right
        return lowest, highest


@functools.partial(jax.tree_util.register_dataclass, data_fields=["q_segment_ids", "kv_segment_ids"], meta_fields=[])
@stable_id("tilewright/masks.SegmentMask", formerly=("tilewright.kernels.masks:SegmentMask",))
@dataclasses.dataclass(frozen=True, slots=True)
class SegmentMask(Mask):
    """A query attends to the keys of its own segment: ids ``[batch|1, q_length]`` and ``[batch|1, kv_length]``."""

    q_segment_ids: Integer[Array, "#batch q_length"]
    kv_segment_ids: Integer[Array, "#batch kv_length"]

    def tile(self, q_start: Index, q_size: int, kv_start: Index, kv_size: int) -> TileBool:
        rows = _slice(self.q_segment_ids, -1, q_start, q_size)
        columns = _slice(self.kv_segment_ids, -1, kv_start, kv_size)
        return rows[:, None, :, None] == columns[:, None, None, :]

    def classify(self, grid: TileGrid, *, static_only: bool = False) -> TileClasses:
        if static_only:
            return _all_partial(grid)
        q_low, q_high = _block_extrema(self.q_segment_ids, grid.block_q)
        kv_low, kv_high = _block_extrema(self.kv_segment_ids, grid.block_k)
        q_low, q_high, kv_low, kv_high = q_low[:, :, None], q_high[:, :, None], kv_low[:, None, :], kv_high[:, None, :]
        # Ids in a block need not be sorted: disjoint ranges of ids prove that nothing matches, and only blocks of one
        # id each prove that everything does.
        empty = (q_high < kv_low) | (kv_high < q_low)
        full = (q_low == q_high) & (kv_low == kv_high) & (q_low == kv_low)
        return _classes(empty, full)[:, None]

    def pad(self, q_length: int, kv_length: int) -> "SegmentMask":
        return SegmentMask(_pad_edge(self.q_segment_ids, -1, q_length), _pad_edge(self.kv_segment_ids, -1, kv_length))

    def take(self, batch_start: Index, batch_size: int, head_start: Index, head_size: int) -> "SegmentMask":
        return SegmentMask(
            *(_take(ids, 0, batch_start, batch_size) for ids in (self.q_segment_ids, self.kv_segment_ids))
        )

    def check(self, batch: int, heads: int, q_length: int, kv_length: int) -> None:
        _check_rows("q_segment_ids", self.q_segment_ids, batch, q_length)
        _check_rows("kv_segment_ids", self.kv_segment_ids, batch, kv_length)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["q_lengths", "kv_lengths"], meta_fields=[])
@stable_id("tilewright/masks.LengthMask", formerly=("tilewright.kernels.masks:LengthMask",))
@dataclasses.dataclass(frozen=True, slots=True)
class LengthMask(Mask):
    """Rows ``i < q_lengths[b]`` attend to columns ``j < kv_lengths[b]``; ``[batch|1]`` each, None is unbounded."""

    q_lengths: Integer[Array, "#batch"] | None = None
    kv_lengths: Integer[Array, "#batch"] | None = None

    def tile(self, q_start: Index, q_size: int, kv_start: Index, kv_size: int) -> TileBool:
        inside = jnp.ones((1, 1, 1, 1), bool)
        if self.q_lengths is not None:
            rows = q_start + lax.broadcasted_iota(jnp.int32, (1, 1, q_size, 1), 2)
            inside = inside & (rows < self.q_lengths[:, None, None, None])
        if self.kv_lengths is not None:
            columns = kv_start + lax.broadcasted_iota(jnp.int32, (1, 1, 1, kv_size), 3)
            inside = inside & (columns < self.kv_lengths[:, None, None, None])
        return inside

    def classify(self, grid: TileGrid, *, static_only: bool = False) -> TileClasses:
        if static_only and not self.is_static:
            return _all_partial(grid)
        # NumPy cannot make an array with symbolic dimensions.
        xp: Any = jnp if grid.is_symbolic else np
        classes: Any = xp.full((1, 1, grid.q_tiles, grid.kv_tiles), TileClass.FULL, np.int32)
        if self.q_lengths is not None:
            first, last = (bound[None, :, None] for bound in grid.q_bounds)
            lengths = self.q_lengths[:, None, None]
            classes = jnp.minimum(classes, _classes(first >= lengths, last < lengths)[:, None])
        if self.kv_lengths is not None:
            first, last = (bound[None, None, :] for bound in grid.kv_bounds)
            lengths = self.kv_lengths[:, None, None]
            classes = jnp.minimum(classes, _classes(first >= lengths, last < lengths)[:, None])
        return classes

    def pad(self, q_length: int, kv_length: int) -> "LengthMask":
        return self

    def take(self, batch_start: Index, batch_size: int, head_start: Index, head_size: int) -> "LengthMask":
        return LengthMask(*(_take(part, 0, batch_start, batch_size) for part in (self.q_lengths, self.kv_lengths)))

    def check(self, batch: int, heads: int, q_length: int, kv_length: int) -> None:
        _check_rows("q_lengths", self.q_lengths, batch)
        _check_rows("kv_lengths", self.kv_lengths, batch)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=[])
@stable_id("tilewright/masks.ExplicitMask", formerly=("tilewright.kernels.masks:ExplicitMask",))
@dataclasses.dataclass(frozen=True, slots=True)
class ExplicitMask(Mask):
    """A boolean array of rank 4, each dimension full or 1."""

    array: Bool[Array, "#batch #heads #q_length #kv_length"]

    def tile(self, q_start: Index, q_size: int, kv_start: Index, kv_size: int) -> TileBool:
        rows = self.array if self.array.shape[2] == 1 else _slice(self.array, 2, q_start, q_size)
        return rows if rows.shape[3] == 1 else _slice(rows, 3, kv_start, kv_size)

    def classify(self, grid: TileGrid, *, static_only: bool = False) -> TileClasses:
        if static_only:
            return _all_partial(grid)
        # ``low``: all of a tile is visible; ``high``: any of it. A dimension of 1 is not reduced; it represents all its
        # tiles.
        low, high = self.array, self.array
        for axis, block in ((2, grid.block_q), (3, grid.block_k)):
            if self.array.shape[axis] != 1:
                low, high = _block_reduce(low, axis, block, jnp.all), _block_reduce(high, axis, block, jnp.any)
        classes = _classes(~high, low)
        return jnp.broadcast_to(classes, (*classes.shape[:2], grid.q_tiles, grid.kv_tiles))

    def pad(self, q_length: int, kv_length: int) -> "ExplicitMask":
        rows = self.array if self.array.shape[2] == 1 else _pad_edge(self.array, 2, q_length)
        return ExplicitMask(rows if rows.shape[3] == 1 else _pad_edge(rows, 3, kv_length))

    def take(self, batch_start: Index, batch_size: int, head_start: Index, head_size: int) -> "ExplicitMask":
        return ExplicitMask(_take(_take(self.array, 0, batch_start, batch_size), 1, head_start, head_size))

    def check(self, batch: int, heads: int, q_length: int, kv_length: int) -> None:
        expected = (batch, heads, q_length, kv_length)
        shape = self.array.shape
        if len(shape) != 4 or any(size not in (1, full) for size, full in zip(shape, expected, strict=True)):
            raise ValueError(f"a mask array must be broadcastable to {expected=} and of rank 4, got {shape=}")
        if self.array.dtype != bool:
            raise TypeError(f"a mask array must be boolean, got {self.array.dtype=}")


@functools.partial(jax.tree_util.register_dataclass, data_fields=["masks"], meta_fields=[])
@stable_id("tilewright/masks.AndMask", formerly=("tilewright.kernels.masks:AndMask",))
@dataclasses.dataclass(frozen=True, slots=True)
class AndMask(CombinedMask):
    """Visible where every one of ``masks`` is; built by ``&``."""

    masks: tuple[Mask, ...]

    def tile(self, q_start: Index, q_size: int, kv_start: Index, kv_size: int) -> TileBool:
        return functools.reduce(operator.and_, (mask.tile(q_start, q_size, kv_start, kv_size) for mask in self.masks))

    def classify(self, grid: TileGrid, *, static_only: bool = False) -> TileClasses:
        bands = [mask for mask in self.masks if isinstance(mask, BandMask) and mask.is_static]
        # By identity: equality would compare the arrays of other masks, which gives no single truth value.
        others = [mask for mask in self.masks if not any(mask is band for band in bands)]
        classes = [mask.classify(grid, static_only=static_only) for mask in others]
        if bands:  # two partial bands may have an empty intersection, so classify the intersection
            bounds = _intersect([band.difference_bounds for band in bands])
            classes.append(_difference_classes(*bounds, *grid.q_bounds, *grid.kv_bounds))
        return _fold(np.minimum, jnp.minimum, classes)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["masks"], meta_fields=[])
@stable_id("tilewright/masks.OrMask", formerly=("tilewright.kernels.masks:OrMask",))
@dataclasses.dataclass(frozen=True, slots=True)
class OrMask(CombinedMask):
    """Visible where any one of ``masks`` is; built by ``|``."""

    masks: tuple[Mask, ...]

    def tile(self, q_start: Index, q_size: int, kv_start: Index, kv_size: int) -> TileBool:
        return functools.reduce(operator.or_, (mask.tile(q_start, q_size, kv_start, kv_size) for mask in self.masks))

    def classify(self, grid: TileGrid, *, static_only: bool = False) -> TileClasses:
        # Partial members may cover a tile together; it stays PARTIAL, which is always sound.
        classes = [mask.classify(grid, static_only=static_only) for mask in self.masks]
        return _fold(np.maximum, jnp.maximum, classes)


def members(mask: Mask | None, kind: type[CombinedMask]) -> tuple[Mask, ...]:
    """The members of a combined mask of this kind; of any other mask the mask itself, of None nothing."""
    if mask is None:
        return ()
    return mask.masks if isinstance(mask, kind) else (mask,)


def reduce_classes(classes: TileClasses) -> TileClasses:
    """Reduces to ``[q_tiles, kv_tiles]``: the class that holds for every batch element and head."""
    xp: Any = np if isinstance(classes, np.ndarray) else jnp
    low, high = xp.min(classes, axis=(0, 1)), xp.max(classes, axis=(0, 1))
    return xp.where(low == high, low, TileClass.PARTIAL)


def _intersect(bands: list[tuple[int | None, int | None]]) -> tuple[int | None, int | None]:
    lowest = [low for low, _ in bands if low is not None]
    highest = [high for _, high in bands if high is not None]
    return max(lowest, default=None), min(highest, default=None)


def _fold(static: Callable, traced: Callable, classes: list[TileClasses]) -> TileClasses:
    if all(isinstance(part, np.ndarray) for part in classes):
        return functools.reduce(static, classes)
    return functools.reduce(traced, classes)


def _all_partial(grid: TileGrid) -> np.ndarray:
    return np.full((1, 1, grid.q_tiles, grid.kv_tiles), TileClass.PARTIAL, np.int32)


def _classes(empty: Numbers, full: Numbers) -> Any:
    xp: Any = np if isinstance(empty, np.ndarray) else jnp
    return xp.where(empty, TileClass.EMPTY, xp.where(full, TileClass.FULL, TileClass.PARTIAL)).astype(np.int32)


def _difference_classes(
    lowest: int | None, highest: int | None, q_first: Numbers, q_last: Numbers, kv_first: Numbers, kv_last: Numbers
) -> TileClasses:
    """Classes of ``lowest <= j - i <= highest`` from the bounds of i and j in each block, ``[batch|1, blocks]``.

    Exact if a block's positions are all the integers between its bounds, since the differences are contiguous then.
    """
    min_difference, max_difference = (
        kv_first[..., None, :] - q_last[..., None],
        kv_last[..., None, :] - q_first[..., None],
    )
    # no position visible, every position visible
    empty, full = min_difference > max_difference, min_difference <= max_difference
    if lowest is not None:
        empty, full = empty | (max_difference < _saturate(lowest)), full & (min_difference >= _saturate(lowest))
    if highest is not None:
        empty, full = empty | (min_difference > _saturate(highest)), full & (max_difference <= _saturate(highest))
    # Bounds that cross hide every position, but a tile whose differences span both bounds passes the two tests above.
    if lowest is not None and highest is not None and lowest > highest:
        empty = empty | True
    classes = _classes(empty, full)
    # Bounds of indices have no batch dimension, those of position arrays have.
    return classes[None, None] if classes.ndim == 2 else classes[:, None]


def _saturate(bound: int) -> int:
    """The int32 that compares with every difference of positions as ``bound`` does."""
    return min(max(bound, int(_INT32.min)), int(_INT32.max))


def _positions(positions: Array | None, start: Index, size: int) -> Array:
    if positions is None:
        return start + lax.broadcasted_iota(jnp.int32, (1, size), 1)
    return _slice(positions, -1, start, size).astype(jnp.int32)


def _position_bounds(positions: Array | None, bounds: tuple[Numbers, Numbers], block: int) -> tuple[Numbers, Numbers]:
    if positions is None:
        return bounds[0][None].astype(np.int32), bounds[1][None].astype(np.int32)
    return _block_extrema(positions.astype(jnp.int32), block)


def _block_bounds(length: int, block: int) -> tuple[Numbers, Numbers]:
    if not is_symbolic(length):
        first = np.arange(0, length, block)
        return first, np.minimum(first + block, length) - 1
    starts = jnp.arange(-(-length // block), dtype=jnp.int32) * block
    return starts, jnp.minimum(starts + block, jnp.asarray(length, jnp.int32)) - 1


def _block_extrema(array: Array, block: int) -> tuple[Array, Array]:
    return _block_reduce(array, 1, block, jnp.min), _block_reduce(array, 1, block, jnp.max)


def _block_reduce(array: Array, axis: int, block: int, reduction: Callable[..., Array]) -> Array:
    length = array.shape[axis]
    tiles = -(-length // block)
    padded = _pad_edge(array, axis, tiles * block)  # repeating the last element changes no minimum, maximum, any or all
    shape = (*array.shape[:axis], tiles, block, *array.shape[axis + 1 :])
    return reduction(padded.reshape(shape), axis=axis + 1)


def _pad_edge[A: (Array, Array | None)](array: A, axis: int, length: int) -> A:
    # An axis without elements has no edge to repeat.
    if array is None or array.shape[axis] in (0, length):
        return array
    if is_symbolic(length):  # jnp.pad needs a static amount of padding
        last = jnp.asarray(array.shape[axis], jnp.int32) - 1
        return jnp.take(array, jnp.minimum(jnp.arange(length, dtype=jnp.int32), last), axis=axis)
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, length - array.shape[axis])
    return jnp.pad(array, widths, mode="edge")


def _take[A: (Array, Array | None)](array: A, axis: int, start: Index, size: int) -> A:
    return array if array is None or array.shape[axis] == 1 else _slice(array, axis, start, size)


def _slice(array: Array, axis: int, start: Index, size: int) -> Array:
    if isinstance(start, int):
        return lax.slice_in_dim(array, start, start + size, axis=axis % array.ndim)
    return lax.dynamic_slice_in_dim(array, start, size, axis=axis)


def _check_rows(name: str, array: Array | None, batch: int, length: int | None = None) -> None:
    if array is None:
        return
    full = (batch,) if length is None else (batch, length)
    if array.shape not in (full, (1, *full[1:])):
        raise ValueError(f"{name} must have the shape {full} or {(1, *full[1:])}, got {array.shape=}")
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must hold integers, got {array.dtype=}")
