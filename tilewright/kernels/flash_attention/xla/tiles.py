"""The tiling of XLA attention: groups of heads, tiles of their scores, and the order of tiles."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.dropout import head_keys, keep_mask_tile
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.masks import Index, Mask, TileClass, TileGrid, reduce_classes
from tilewright.kernels.softmax import accumulation_dtype
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
        padded = _pad(rows, 1, self.q_padding, fill)
        split = padded.reshape(batch, self.grid.q_tiles, self.grid.block_q, heads // self.group, self.group, *rest)
        return split.transpose(1, 0, 3, 4, 2, *range(5, split.ndim))

    def kv_tiles(self, columns: jax.Array) -> Any:
        """``[b, kv_length, kv_heads, d]`` to ``[kv_tiles, b, kv_heads, block_k, d]``."""
        batch, _, heads, depth = columns.shape
        padded = _pad(columns, 1, self.kv_padding)
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


@dataclasses.dataclass(frozen=True, slots=True)
class Scores:
    """The logits of one step's tiles, and their dropout.

    ``query`` and ``key`` are tiled; ``factor`` is the part of the softmax scale that is not folded into ``query``.
    """

    tiling: Tiling
    inputs: AttentionInputs
    query: Any
    key: Any
    bias: Any
    mask: Mask | None
    factor: float
    dropout_keys: Any

    @classmethod
    def of(cls, inputs: AttentionInputs, tiling: Tiling, step: Index) -> "Scores":
        take = functools.partial(tiling.take, step=step, batch_axis=0, head_axis=2)
        options = inputs.options
        folded = scale_is_folded(options.softmax_scale, inputs.query.dtype)
        query = take(inputs.query)
        mask = tiling.take_mask(inputs.mask, step)
        if mask is not None:
            # Tiles are cut at traced positions, and a dynamic slice beyond the end of an array would be shifted.
            mask = mask.pad(tiling.grid.q_length + tiling.q_padding, tiling.grid.kv_length + tiling.kv_padding)
        keys = None
        if inputs.dropout_seed is not None and options.dropout_prob > 0.0:
            batch_start, head_start = tiling.starts(step)
            batch = batch_start + jnp.arange(tiling.batch_size)[:, None, None]
            heads = head_start + jnp.arange(tiling.head_size)[:, None]
            query_heads = heads * tiling.group + jnp.arange(tiling.group)
            if inputs.dropout_origin is not None:
                batch, query_heads = batch + inputs.dropout_origin[0], query_heads + inputs.dropout_origin[1]
            keys = head_keys(inputs.dropout_seed, batch, query_heads)
        return cls(
            tiling=tiling,
            inputs=inputs,
            query=tiling.q_tiles(query * jnp.asarray(options.softmax_scale, query.dtype) if folded else query),
            key=tiling.kv_tiles(take(inputs.key)),
            bias=pad_scores(tiling.take(inputs.bias, step, batch_axis=0, head_axis=1), tiling),
            mask=mask,
            factor=1.0 if folded else options.softmax_scale,
            dropout_keys=keys,
        )

    def logits(self, row: Index, column: Index, masked: bool) -> tuple[Any, float, Any]:
        """``(x, factor, slope)``: the logits are ``factor · x``, −inf if masked; slope is the soft cap's derivative or
        None.
        """
        options = self.inputs.options
        x = jnp.einsum(
            "bhgqd,bhkd->bhgqk",
            read(self.query, row),
            read(self.key, column),
            precision=options.precision,
            preferred_element_type=accumulation_dtype(self.query.dtype),
        )
        factor, slope = self.factor, None
        # Bias and cap are of scaled logits; and a masked logit is −∞, which a factor that is not positive would change
        # later.
        if self.bias is not None or options.logits_soft_cap is not None or factor <= 0.0:
            x, factor = x * factor if factor != 1.0 else x, 1.0
        if self.bias is not None:
            x = x + self._split_heads(score_tile(self.bias, self.tiling, row, column)).astype(x.dtype)
        if options.logits_soft_cap is not None:
            tanh = jnp.tanh(x / options.logits_soft_cap)
            x, slope = tanh * options.logits_soft_cap, 1.0 - tanh * tanh
        if masked:
            x = jnp.where(self._visible(row, column), x, -jnp.inf)
        return x, factor, slope

    def keep(self, row: Index, column: Index) -> Any:
        """Marks the elements that dropout keeps."""
        grid = self.tiling.grid
        block = (grid.block_q, grid.block_k)
        prob = self.inputs.options.dropout_prob
        starts = row * grid.block_q, column * grid.block_k
        return keep_mask_tile(self.dropout_keys, *starts, block, prob, multiples=block)

    def _visible(self, row: Index, column: Index) -> Any:
        grid = self.tiling.grid
        visible = jnp.ones((1, 1, 1, 1, 1), bool)
        if self.mask is not None:
            tile = self.mask.tile(row * grid.block_q, grid.block_q, column * grid.block_k, grid.block_k)
            visible = self._split_heads(tile)
        if self.tiling.is_ragged:
            columns = column * grid.block_k + jnp.arange(grid.block_k, dtype=jnp.int32)
            visible = visible & (columns < grid.kv_length)
        return visible

    def _split_heads(self, tile: jax.Array) -> Any:
        batch, heads, *rest = tile.shape
        if heads == 1:
            return tile[:, :, None]
        return tile.reshape(batch, heads // self.tiling.group, self.tiling.group, *rest)


def scale_is_folded(scale: float, dtype: DTypeLike) -> bool:
    """True if multiplying the query by the scale beforehand rounds no more than the matmul does."""
    if jnp.dtype(dtype).itemsize >= 4:
        return True
    # ±0.5 is the mantissa of powers of two, which round nothing. In float16 they may leave the range of its exponents.
    return jnp.dtype(dtype) == jnp.bfloat16 and abs(math.frexp(scale)[0]) == 0.5


def pad_scores(array: jax.Array | None, tiling: Tiling) -> Any:
    """A bias with its full dimensions padded to whole tiles."""
    if array is None:
        return None
    for axis, padding in ((2, tiling.q_padding), (3, tiling.kv_padding)):
        array = array if array.shape[axis] == 1 else _pad(array, axis, padding)
    return array


def score_tile(array: jax.Array, tiling: Tiling, row: Index, column: Index) -> Any:
    """One tile of a padded ``[b, h, q|1, kv|1]`` array."""
    for axis, start, size in _score_slices(array, tiling, row, column):
        array = (
            lax.slice_in_dim(array, start, start + size, axis=axis)
            if isinstance(start, int)
            else lax.dynamic_slice_in_dim(array, start, size, axis)
        )
    return array


def _score_slices(array: jax.Array, tiling: Tiling, row: Index, column: Index) -> list[tuple[int, Index, int]]:
    grid = tiling.grid
    slices = [(2, row * grid.block_q, grid.block_q), (3, column * grid.block_k, grid.block_k)]
    return [entry for entry in slices if array.shape[entry[0]] != 1]


def _pad(array: jax.Array, axis: int, padding: int, fill: float = 0.0) -> Any:
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
