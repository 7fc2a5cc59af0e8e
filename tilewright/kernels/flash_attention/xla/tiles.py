"""The tiling of XLA attention: groups of heads, tiles of their scores, and the order of tiles."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tilewright.kernels.masks import Index, Mask, TileClass, TileGrid, reduce_classes
from tilewright.ops.kernel.arrays import is_symbolic

UNROLLED_TILES = 4
"""Number of tiles up to which the program is unrolled: no loop, static slices, no rescaling on a row's first tile."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tiling:
    """The tiling of one call; a step processes ``batch_size`` × ``head_size`` key/value heads and all their queries."""

    batch: int
    kv_heads: int
    group: int
    grid: TileGrid
    batch_size: int
    head_size: int

    def __post_init__(self) -> None:
        if self.batch % self.batch_size or self.kv_heads % self.head_size:
            raise ValueError(
                f"{self.batch_size=} must divide {self.batch=} and {self.head_size=} must divide {self.kv_heads=}"
            )

    @property
    def head_steps(self) -> int:
        return self.kv_heads // self.head_size

    @property
    def steps(self) -> int:
        return self.batch // self.batch_size * self.head_steps

    @property
    def q_padding(self) -> int:
        return self.grid.q_tiles * self.grid.block_q - self.grid.q_length

    @property
    def kv_padding(self) -> int:
        return self.grid.kv_tiles * self.grid.block_k - self.grid.kv_length

    @property
    def is_ragged(self) -> bool:
        """True if the last column of tiles may extend beyond the keys."""
        return is_symbolic(self.kv_padding) or self.kv_padding > 0

    def starts(self, step: Index) -> tuple[Index, Index]:
        """First batch element and first key/value head of a step."""
        return step // self.head_steps * self.batch_size, step % self.head_steps * self.head_size

    def take(self, array: jax.Array | None, step: Index, *, batch_axis: int, head_axis: int) -> Any:
        """A step's part of an array whose heads are key/value or query heads, or broadcast (size 1)."""
        if array is None or self.steps == 1:
            return array
        batch_start, head_start = self.starts(step)
        if array.shape[batch_axis] > 1 and self.batch_size < self.batch:
            array = lax.dynamic_slice_in_dim(array, batch_start, self.batch_size, batch_axis)
        if array.shape[head_axis] > 1 and self.head_size < self.kv_heads:
            per_head = array.shape[head_axis] // self.kv_heads
            array = lax.dynamic_slice_in_dim(array, head_start * per_head, self.head_size * per_head, head_axis)
        return array

    def take_mask(self, mask: Mask | None, step: Index) -> Mask | None:
        if mask is None or self.steps == 1:
            return mask
        batch_start, head_start = self.starts(step)
        return mask.take(batch_start, self.batch_size, head_start * self.group, self.head_size * self.group)

    def q_tiles(self, rows: jax.Array, fill: float = 0.0) -> Any:
        """``[b, q_length, heads, ...]`` to ``[q_tiles, b, kv_heads, group, block_q, ...]``."""
        batch, _, heads, *rest = rows.shape
        padded = pad_axis(rows, 1, self.q_padding, fill)
        split = padded.reshape(batch, self.grid.q_tiles, self.grid.block_q, heads // self.group, self.group, *rest)
        return split.transpose(1, 0, 3, 4, 2, *range(5, split.ndim))

    def kv_tiles(self, columns: jax.Array) -> Any:
        """``[b, kv_length, kv_heads, d]`` to ``[kv_tiles, b, kv_heads, block_k, d]``."""
        batch, _, heads, depth = columns.shape
        padded = pad_axis(columns, 1, self.kv_padding)
        split = padded.reshape(batch, self.grid.kv_tiles, self.grid.block_k, heads, depth)
        return split.transpose(1, 0, 3, 2, 4)

    def q_rows(self, tiles: jax.Array) -> Any:
        """The inverse of ``q_tiles``, as ``[b, kv_heads, group, q_length, ...]``."""
        rows = jnp.moveaxis(tiles, 0, 3)
        rows = rows.reshape(*rows.shape[:3], -1, *rows.shape[5:])
        return rows[:, :, :, : self.grid.q_length]

    def merge_steps(self, stacked: jax.Array) -> Any:
        """``[steps, batch_size, head_size, ...]`` to ``[batch, kv_heads, ...]``."""
        split = stacked.reshape(-1, self.head_steps, *stacked.shape[1:])
        return jnp.swapaxes(split, 1, 2).reshape(self.batch, self.kv_heads, *stacked.shape[3:])


@dataclasses.dataclass(frozen=True, slots=True)
class TileRun:
    """Tiles that share one loop body: their row and column indices, of which the first ``count`` are valid."""

    masked: bool
    rows: Any
    columns: Any
    count: Any


def schedule(tiling: Tiling, mask: Mask | None) -> list[TileRun]:
    """The tiles to process, partial ones first, then full ones; numpy arrays if the mask is static."""
    grid = tiling.grid
    if grid.is_symbolic:
        return _symbolic_schedule(tiling, mask)
    possible: Any
    if mask is None:
        possible = np.full((grid.q_tiles, grid.kv_tiles), TileClass.FULL)
    else:
        possible = reduce_classes(mask.classify(grid, static_only=True))
    # Even without a mask the keys beyond the end must be masked, which only partial tiles are.
    if tiling.is_ragged:
        possible[:, -1] = np.minimum(possible[:, -1], TileClass.PARTIAL)
    rows, columns = (index.astype(np.int32) for index in np.nonzero(possible != TileClass.EMPTY))
    # A loop for each kind, so that full tiles evaluate no mask.
    if mask is None or mask.is_static:
        classes = possible[rows, columns]
        chosen = [np.flatnonzero(classes == kind) for kind in (TileClass.PARTIAL, TileClass.FULL)]
        return [
            TileRun(masked, rows[index], columns[index], len(index))
            for masked, index in zip((True, False), chosen, strict=True)
        ]
    # ``rows`` and ``columns`` hold every tile that may be visible, as arrays count as PARTIAL so far. Which of them are
    # is known on the device only: the lists of both kinds have the full size, and the device counts their entries.
    if not rows.size:
        return []
    classes = reduce_classes(mask.classify(grid))[rows, columns]
    if tiling.is_ragged:
        classes = jnp.where(columns == grid.kv_tiles - 1, jnp.minimum(classes, TileClass.PARTIAL), classes)
    runs = []
    for masked, kind in ((True, TileClass.PARTIAL), (False, TileClass.FULL)):
        (index,) = jnp.nonzero(classes == kind, size=rows.size, fill_value=0)
        count = jnp.sum(classes == kind, dtype=jnp.int32)
        runs.append(TileRun(masked, jnp.asarray(rows)[index], jnp.asarray(columns)[index], count))
    return runs


def _symbolic_schedule(tiling: Tiling, mask: Mask | None) -> list[TileRun]:
    """The tiles to process if the lengths are known only to a call of the exported program."""
    grid = tiling.grid
    size = grid.q_tiles * grid.kv_tiles
    tiles = jnp.arange(size, dtype=jnp.int32)
    rows, columns = tiles // grid.kv_tiles, tiles % grid.kv_tiles
    if mask is None:
        # Whether the last column is ragged is not known, so every tile evaluates the mask.
        return [TileRun(True, rows, columns, jnp.asarray(size, jnp.int32))]
    classes = reduce_classes(jnp.asarray(mask.classify(grid))).reshape(-1)
    classes = jnp.where(columns == grid.kv_tiles - 1, jnp.minimum(classes, TileClass.PARTIAL), classes)
    runs = []
    for masked, kind in ((True, TileClass.PARTIAL), (False, TileClass.FULL)):
        chosen = classes == kind
        # `jnp.nonzero` takes no symbolic size.
        order = jnp.argsort(~chosen, stable=True)  # the chosen tiles first, in their order
        runs.append(TileRun(masked, rows[order], columns[order], jnp.sum(chosen, dtype=jnp.int32)))
    return runs


def is_unrolled(runs: list[TileRun]) -> bool:
    """True if ``run_tiles`` unrolls the tiles, so that carries may be lists."""
    return all(isinstance(run.count, int) for run in runs) and sum(run.count for run in runs) <= UNROLLED_TILES


def run_tiles(runs: list[TileRun], body: Callable[[Index, Index, bool, Any], Any], carry: Any) -> Any:
    """Calls ``carry = body(row, column, masked, carry)`` for each tile."""
    unrolled = is_unrolled(runs)
    for run in runs:
        if unrolled:
            for row, column in zip(run.rows.tolist(), run.columns.tolist(), strict=True):
                carry = body(row, column, run.masked, carry)
            continue
        if isinstance(run.count, int) and run.count == 0:
            continue
        rows, columns = jnp.asarray(run.rows), jnp.asarray(run.columns)

        def step(t, carry, rows=rows, columns=columns, masked=run.masked):
            return body(rows[t], columns[t], masked, carry)

        carry = lax.fori_loop(0, run.count, step, carry)
    return carry


def read(store: Any, index: Index) -> Any:
    """Entry ``index`` of a list, or along the first axis of an array."""
    if isinstance(store, list) or isinstance(index, int):
        return store[index]
    return lax.dynamic_index_in_dim(store, index, keepdims=False)


def write(store: Any, index: Index, entry: Any) -> Any:
    """``store`` with entry ``index`` replaced."""
    if isinstance(store, list):
        return [entry if position == index else old for position, old in enumerate(store)]
    return lax.dynamic_update_index_in_dim(store, entry, index, 0)


def pad_axis(array: jax.Array, axis: int, padding: int, fill: float = 0.0) -> Any:
    """Appends ``fill`` to an axis."""
    if isinstance(padding, int) and padding == 0:
        return array
    widths = [(0, padding if k == axis else 0, 0) for k in range(array.ndim)]
    return lax.pad(array, jnp.asarray(fill, array.dtype), widths)


def over_steps(tiling: Tiling, run_step: Callable[[Index, Any], tuple[Any, Any]], carry: Any) -> tuple[Any, Any]:
    """Calls ``run_step(step, carry) -> (carry, results)`` for every step; results are ``[batch, kv_heads, ...]``."""
    if tiling.steps == 1:
        return run_step(0, carry)
    carry, stacked = lax.scan(
        lambda carry, step: run_step(step, carry), carry, jnp.arange(tiling.steps, dtype=jnp.int32)
    )
    return carry, jax.tree.map(tiling.merge_steps, stacked)
