"""Tile schedules: the work items of a matmul as data, which the kernel decodes on the device."""

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.pallas_types import Scalar


class Work(NamedTuple):
    """A work item of a CTA: a tile of the result, and the range of K that it sums over.

    Attributes:
      row, column: of the tile's first element.
      matrix: index into stacked operands and results; None if they are not stacked.
      k: the first element of the range of K.
      steps: K steps; 0 gives zeros.
      row_end: the row behind the last one that is stored, or None: all that the result has.
      k_end: behind the last element of the range of K, or None: the operands' own end, behind which TMA reads zeros.
      rhs_column: the first column of rhs, or None: that of the result.
      lhs_row: the first row of lhs, or None: that of the result.
      part: the number of the part of lhs, or None where it is whole.
    """

    row: Scalar
    column: Scalar
    matrix: Scalar | None
    k: Scalar
    steps: Scalar
    row_end: Scalar | None = None
    k_end: Scalar | None = None
    rhs_column: Scalar | None = None
    lhs_row: Scalar | None = None
    part: Scalar | None = None


class Schedule(Protocol):
    """The items of a kernel. Its leaves are arrays, in the kernel references to them."""

    def items(self) -> Scalar:
        """The number of items of all clusters."""
        ...

    def work(self, item: Scalar, cta: Scalar) -> Work:
        """An item of a CTA of its cluster."""
        ...


class TileIndex(NamedTuple):
    """A tile of a cluster, by its number along m and n."""

    row: Any
    column: Any


def in_bands(item: Scalar, row_tiles: Scalar, column_tiles: int, band: int) -> TileIndex:
    """The tile of an item: in bands of ``band`` rows of tiles, column by column.

    What the clusters work on at a time is then about as many rows as columns, whose operands the L2 cache holds.
    """
    # Row fastest within a band: as many CTAs as a band has rows take one tile of rhs at a time, and its rows of lhs are
    # read again for the next columns while they are still in the L2 cache. The last band may have fewer rows of tiles.
    items_of_band = jnp.int32(band * column_tiles)
    first = lax.div(item, items_of_band) * band
    index = lax.rem(item, items_of_band)
    rows = jnp.minimum(row_tiles - first, band)
    return TileIndex(first + lax.rem(index, rows), lax.div(index, rows))


@dataclasses.dataclass(frozen=True, slots=True)
class TileShape:
    """The tile of the result that a CTA computes, and the CTAs of a cluster along both.

    Attributes:
      columns: fewer than ``block_n`` where several accumulators share these.
    """

    rows: int
    columns: int
    cluster_m: int
    cluster_n: int
    band: int

    def tiles(self, rows: int, columns: int) -> TileIndex:
        """Tiles of a cluster in so many rows and columns; the last may hang over."""
        return TileIndex(-(-rows // (self.rows * self.cluster_m)), -(-columns // (self.columns * self.cluster_n)))

    def place(self, index: TileIndex, cta: Scalar) -> tuple[Scalar, Scalar]:
        """First row and column of a CTA's tile in the tile of its cluster."""
        row, column = index.row * self.cluster_m, index.column * self.cluster_n
        # A cluster is along one of the two: its CTAs share the tiles of the other operand by multicast.
        row, column = (row + cta, column) if self.cluster_m > 1 else (row, column + cta)
        return row * self.rows, column * self.columns


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseSchedule:
    """All tiles of one matmul.

    Attributes:
      first_column: ``[1]``, of rhs; None for its first one.
    """

    rows: int = dataclasses.field(metadata={"static": True})
    columns: int = dataclasses.field(metadata={"static": True})
    steps: int = dataclasses.field(metadata={"static": True})
    tile: TileShape = dataclasses.field(metadata={"static": True})
    first_column: Any = None

    @property
    def tiles(self) -> TileIndex:
        """Tiles of a cluster along both."""
        return self.tile.tiles(self.rows, self.columns)

    def items(self) -> int:
        """The number of items of all clusters."""
        return self.tiles.row * self.tiles.column

    def work(self, item: Scalar, cta: Scalar) -> Work:
        """An item of a CTA of its cluster."""
        index = in_bands(item, self.tiles.row, self.tiles.column, self.tile.band)
        row, column = self.tile.place(index, cta)
        # Only the device may know where a block of the vocabulary begins; the result begins at column 0 all the same.
        rhs_column = None if self.first_column is None else self.first_column[0] + column
        return Work(row, column, None, jnp.int32(0), jnp.int32(self.steps), rhs_column=rhs_column)


@dataclasses.dataclass(frozen=True)
class DevicesSchedule:
    """All tiles of a matmul whose rows belong to several devices: those of one device, a part, after those of another.

    Attributes:
      own: ``[1]``, the number of this device.
      devices: how many there are.
      batches: ranges of rows that each device has, between which are those of the others.
      rows: of a range.
    """

    own: Any
    devices: int = dataclasses.field(metadata={"static": True})
    batches: int = dataclasses.field(metadata={"static": True})
    rows: int = dataclasses.field(metadata={"static": True})
    columns: int = dataclasses.field(metadata={"static": True})
    steps: int = dataclasses.field(metadata={"static": True})
    tile: TileShape = dataclasses.field(metadata={"static": True})

    @property
    def tiles(self) -> TileIndex:
        """Tiles of a cluster of one range of rows, along both."""
        return self.tile.tiles(self.rows, self.columns)

    @property
    def items_of_part(self) -> int:
        """The number of items of one device's rows."""
        return self.batches * self.tiles.row * self.tiles.column

    def items(self) -> int:
        """The number of items of all clusters."""
        return self.devices * self.items_of_part

    def part(self, item: Scalar) -> Scalar:
        """The number of an item's part."""
        return lax.div(jnp.asarray(item, jnp.int32), jnp.int32(self.items_of_part))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GatheredSchedule(DevicesSchedule):
    """The rows of this device first, then those of the devices behind it, which lhs has for itself."""

    def work(self, item: Scalar, cta: Scalar) -> Work:
        """An item of a CTA of its cluster."""
        part, of_range = self.part(item), self.tiles.row
        item = item - part * self.items_of_part
        index = in_bands(item, self.batches * of_range, self.tiles.column, self.tile.band)
        batch = lax.div(jnp.asarray(index.row, jnp.int32), jnp.int32(of_range)) if self.batches > 1 else 0
        row, column = self.tile.place(TileIndex(index.row - batch * of_range, index.column), cta)
        # Part p comes from the device p behind this one, so that at a time each device is sent to by one other.
        device = lax.rem(self.own[0] + part, jnp.int32(self.devices))
        first = (batch * self.devices + device) * self.rows
        # Behind the last row of a range are rows of another device.
        whole = self.rows % (self.tile.rows * self.tile.cluster_m) == 0
        return Work(
            first + row,
            column,
            None,
            jnp.int32(0),
            jnp.int32(self.steps),
            None if whole else first + self.rows,
            lhs_row=batch * self.rows + row,
            part=part,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScatteredSchedule(DevicesSchedule):
    """The rows of the device behind this one first, and its own last; tiles of each are in the same order."""

    def work(self, item: Scalar, cta: Scalar) -> Work:
        """An item of a CTA of its cluster: its row is one of the range ``matrix`` of the device's rows."""
        part, of_range = self.part(item), self.tiles.row
        index = in_bands(item - part * self.items_of_part, self.batches * of_range, self.tiles.column, self.tile.band)
        batch = lax.div(jnp.asarray(index.row, jnp.int32), jnp.int32(of_range)) if self.batches > 1 else jnp.int32(0)
        row, column = self.tile.place(TileIndex(index.row - batch * of_range, index.column), cta)
        # Its own rows are the last part, when the sums of the others for them have had the most time to arrive.
        device = lax.rem(self.own[0] + part + 1, jnp.int32(self.devices))
        first = (batch * self.devices + device) * self.rows
        return Work(row, column, batch, jnp.int32(0), jnp.int32(self.steps), lhs_row=first + row, part=part)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RaggedRowsSchedule:
    """Rows in groups, each of which has a matrix: the tiles of a group begin at its first row.

    Attributes:
      behind: its last element is the number of tiles of rows.
      matrix, first, end: ``[tiles]``, of each tile of rows (of a cluster) its matrix, its first row, and the row behind
        the last one of its group; matrix is -1 for rows without one, which get zeros.
    """

    behind: Any
    matrix: Any
    first: Any
    end: Any
    columns: int = dataclasses.field(metadata={"static": True})
    steps: int = dataclasses.field(metadata={"static": True})
    tile: TileShape = dataclasses.field(metadata={"static": True})

    @property
    def row_tiles(self) -> Scalar:
        """Tiles of rows."""
        tiles: Scalar = self.behind[self.behind.shape[0] - 1]
        return tiles

    @property
    def column_tiles(self) -> int:
        """Tiles of a cluster along the columns."""
        return self.tile.tiles(1, self.columns).column

    def items(self) -> Scalar:
        """The number of items of all clusters."""
        return self.row_tiles * self.column_tiles

    def work(self, item: Scalar, cta: Scalar) -> Work:
        """An item of a CTA of its cluster."""
        index = in_bands(item, self.row_tiles, self.column_tiles, self.tile.band)
        # The rows of a cluster's tile begin anywhere; its CTAs take them one after the other.
        offset, column = self.tile.place(TileIndex(jnp.int32(0), index.column), cta)
        # Rows without a matrix: a tile without steps, whose accumulators are zeros.
        matrix = self.matrix[index.row]
        steps = jnp.where(matrix < 0, 0, self.steps)
        return Work(
            self.first[index.row] + offset, column, jnp.maximum(matrix, 0), jnp.int32(0), steps, self.end[index.row]
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RaggedReductionSchedule:
    """A matmul for each group, which sums over the group's own range of K.

    Items of the longest ranges come first, so that `Rounds` share them out evenly.

    Attributes:
      order: ``[groups]``, the groups in the order of their items, of `longest_first`.
      starts, ends: ``[groups]``, the range of each.
    """

    order: Any
    starts: Any
    ends: Any
    rows: int = dataclasses.field(metadata={"static": True})
    columns: int = dataclasses.field(metadata={"static": True})
    block_k: int = dataclasses.field(metadata={"static": True})
    tile: TileShape = dataclasses.field(metadata={"static": True})

    @property
    def tiles(self) -> TileIndex:
        """Tiles of a cluster of one matrix, along both."""
        return self.tile.tiles(self.rows, self.columns)

    def items(self) -> int:
        """The number of items of all clusters."""
        return self.starts.shape[0] * self.tiles.row * self.tiles.column

    def work(self, item: Scalar, cta: Scalar) -> Work:
        """An item of a CTA of its cluster."""
        of_matrix = jnp.int32(self.tiles.row * self.tiles.column)
        matrix = self.order[lax.div(item, of_matrix)]
        index = in_bands(lax.rem(item, of_matrix), self.tiles.row, self.tiles.column, self.tile.band)
        row, column = self.tile.place(index, cta)
        # A group without rows has no steps, and its matrix zeros.
        start, end = self.starts[matrix], self.ends[matrix]
        steps = lax.div(end - start + (self.block_k - 1), jnp.int32(self.block_k))
        # K begins at the group's first row, which may be any: these operands lie in panels, whose TMA copies may begin
        # at any row.
        return Work(row, column, matrix, start, steps, None, end)


def longest_first(starts: jax.Array, ends: jax.Array) -> jax.Array:
    """The numbers of ranges from the longest one to the shortest."""
    sizes, index = ends - starts, jnp.arange(ends.shape[0], dtype=jnp.int32)
    # All pairs are compared: it takes a few microseconds, a sort more.
    other, own = sizes[None, :], sizes[:, None]
    rank = ((other > own) | ((other == own) & (index[None, :] < index[:, None]))).sum(1, dtype=jnp.int32)
    return jnp.where(rank[None, :] == index[:, None], index[None, :], 0).sum(1, dtype=jnp.int32)
