"""Calls of the kernels for TPUs: their arrays in blocks, the grid's indices, and what a step of it finds in VMEM."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tilewright.kernels.flash_attention.inputs import AttentionInputs, dropout_keys
from tilewright.kernels.flash_attention.mask_terms import MaskParts
from tilewright.kernels.flash_attention.masking import FAR
from tilewright.kernels.flash_attention.tpu.params import TpuTiles, Unit, balanced_block, units
from tilewright.kernels.flash_attention.tpu.schedule import Kinds, Schedule, Step
from tilewright.kernels.masks import TileGrid
from tilewright.kernels.pallas_types import Condition, Ref, Scalar
from tilewright.kernels.tpu.device import LANES, SUBLANES
from tilewright.kernels.tpu.launch import Order, run_kernel

LOG2E = math.log2(math.e)

DIM_STEP = 64
"""Head dims of queries and keys are padded to a multiple of this: half a tile's lanes."""

UNIT_BYTES = 20 << 20
"""VMEM for scores and probabilities of units under way: at most 11 MiB of any config that is listed."""

_LIMITS = np.iinfo(np.int32)

type Indices = tuple[Scalar, ...]
"""Batch element, query head, block of queries, block of keys."""


@dataclasses.dataclass(frozen=True, slots=True)
class Operand:
    """An array of a kernel, the shape of its blocks, and the block that goes with `Indices`."""

    array: jax.Array | jax.ShapeDtypeStruct
    block: tuple[int, ...]
    index: Callable[[Scalar, Scalar, Scalar, Scalar], Indices]


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that a kernel is compiled for, beside the shapes of its arrays.

    Attributes:
      inputs: with ``ShapeDtypeStruct`` in place of arrays.
    """

    inputs: AttentionInputs
    tiles: TpuTiles

    @functools.cached_property
    def parts(self) -> MaskParts:
        return MaskParts.of(self.inputs.mask)

    @functools.cached_property
    def grid(self) -> TileGrid:
        inputs, tiles = self.inputs, self.tiles
        block_q = balanced_block(inputs.q_length, tiles.block_q)
        return TileGrid(inputs.q_length, inputs.kv_length, block_q, balanced_block(inputs.kv_length, tiles.block_k))

    @functools.cached_property
    def padded(self) -> tuple[int, int]:
        """Queries and keys in whole blocks."""
        return self.grid.q_tiles * self.grid.block_q, self.grid.kv_tiles * self.grid.block_k

    @functools.cached_property
    def raw(self) -> bool:
        """True if logits are QKᵀ without its scale, which exponents alone have."""
        inputs = self.inputs
        return inputs.bias is None and inputs.logits_soft_cap is None and inputs.softmax_scale > 0

    @functools.cached_property
    def scale(self) -> float:
        """The factor of a logit in natural units: 1 if it is none of a `raw` one."""
        return self.inputs.softmax_scale if self.raw else 1.0

    @functools.cached_property
    def factor(self) -> float:
        """The factor of a logit in an exponent of 2."""
        return self.scale * LOG2E

    @functools.cached_property
    def precision(self) -> jax.lax.Precision:
        """The precision of matmuls: exact ones of float32, of which the systolic array takes bfloat16 parts."""
        return jax.lax.Precision.HIGHEST if self.inputs.dtype == np.float32 else jax.lax.Precision.DEFAULT

    def dot(self, a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
        """The float32 product of two matrices that contracts these axes."""
        contracted = (((axes[0],), (axes[1],)), ((), ()))
        return jax.lax.dot_general(a, b, contracted, precision=self.precision, preferred_element_type=jnp.float32)

    @functools.cached_property
    def units(self) -> list[Unit]:
        """The units of a block."""
        return units(self.grid.block_q, self.grid.block_k, self.tiles.unit_q, self.tiles.unit_k)

    def rows_of_queries(self, array: jax.Array, dim: int) -> jax.Array:
        """``[batch, heads, padded length, dim]`` of ``[batch, length, heads, _]``, with zeros in the padding."""
        return _padded(array.transpose(0, 2, 1, 3), {2: self.padded[0], 3: dim})

    def rows_of_keys(self, array: jax.Array, dim: int) -> jax.Array:
        """As `rows_of_queries`, of keys."""
        return _padded(array.transpose(0, 2, 1, 3), {2: self.padded[1], 3: dim})

    def query_block(self, array: jax.Array | jax.ShapeDtypeStruct) -> Operand:
        """Blocks of queries of ``[batch, heads, length, dim]``."""
        return Operand(array, (1, 1, self.grid.block_q, array.shape[3]), lambda b, h, i, j: (b, h, i, 0))

    def key_block(self, array: jax.Array) -> Operand:
        """Blocks of keys of ``[batch, kv_heads, length, dim]``."""
        groups = self.inputs.groups
        return Operand(array, (1, 1, self.grid.block_k, array.shape[3]), lambda b, h, i, j: (b, h // groups, j, 0))

    def score_operands(self, inputs: AttentionInputs) -> dict[str, Operand]:
        """The arrays that determine the logits beside queries and keys, by name."""
        found = {}
        if inputs.bias is not None:
            found["bias"] = self._scores(inputs.bias)
        parts = MaskParts.of(inputs.mask)
        if parts.matrix is not None:
            matrix = parts.matrix.materialise(inputs.q_length, inputs.kv_length)
            # Tiles of int8 have 32 rows.
            found["matrix"] = self._scores(matrix.astype(jnp.int32 if 1 in matrix.shape[2:] else jnp.int8))
        if parts.has_rows:
            queries, keys = self._rows(parts)
            block_q, block_k = self.grid.block_q, self.grid.block_k
            found["q_rows"] = Operand(queries, (1, block_q, 3), lambda b, h, i, j: (_at(queries, 0, b), i, 0))
            found["kv_rows"] = Operand(keys, (1, 2, block_k), lambda b, h, i, j: (_at(keys, 0, b), 0, j))
        return found

    def _scores(self, array: jax.Array) -> Operand:
        sizes = {axis: size for axis, size in zip((2, 3), self.padded, strict=True) if array.shape[axis] != 1}
        array = _padded(array, sizes)
        block_q = 1 if array.shape[2] == 1 else self.grid.block_q
        block_k = 1 if array.shape[3] == 1 else self.grid.block_k
        return Operand(
            array,
            (1, 1, block_q, block_k),
            lambda b, h, i, j: tuple(_at(array, axis, index) for axis, index in enumerate((b, h, i, j))),
        )

    def _rows(self, parts: MaskParts) -> tuple[jax.Array, jax.Array]:
        """Queries' segments and their lowest and highest visible positions, ``[batch | 1, length, 3]``; keys' segments
        and positions, ``[batch | 1, 2, length]``.
        """
        (q_rows, kv_rows), band = parts.rows(self.inputs.q_length, self.inputs.kv_length), parts.band
        segments, positions = q_rows[:, 0], q_rows[:, 1]
        # Positions are ±2³⁰ at most, but those outside of a length: such a query sees nothing, and such a key, of the
        # lowest number, is seen by none.
        outside, positions = positions == _LIMITS.max, jnp.clip(positions, -FAR, FAR)
        lowest = jnp.where(outside, _LIMITS.max, jnp.maximum(positions + band.lowest, _LIMITS.min + 1))
        highest = jnp.where(outside, _LIMITS.min, _saturated_sum(positions, band.highest))
        queries = jnp.stack([segments, lowest, highest], axis=2)
        return _padded(queries, {1: self.padded[0]}), _padded(kv_rows, {2: self.padded[1]})

    def scalars(self, inputs: AttentionInputs, entries: jax.Array | None) -> dict[str, jax.Array]:
        """The arrays in scalar memory, by name: the schedule's table, the dropout's keys."""
        found = {} if entries is None else {"entries": entries}
        keys = dropout_keys(inputs)
        if keys is not None:
            found["dropout_keys"] = jax.lax.bitcast_convert_type(keys, jnp.int32).reshape(-1)
        return found


@dataclasses.dataclass(frozen=True)
class Block:
    """The place that a step of the grid works on, and its references.

    Attributes:
      refs: the kernel's references, by name.
      batch, head, row, column: `Indices`.
    """

    plan: Plan
    refs: Mapping[str, Ref]
    batch: Scalar
    head: Scalar
    row: Scalar
    column: Scalar

    def queries(self, name: str, unit: Unit) -> jax.Array:
        return self.refs[name][0, 0, pl.ds(unit.row, unit.rows), :]

    def keys(self, name: str, unit: Unit) -> jax.Array:
        return self.refs[name][0, 0, pl.ds(unit.column, unit.columns), :]

    def scores(self, name: str, unit: Unit) -> jax.Array:
        """A unit of an array of scores, or a row or column of it that all queries or keys share."""
        ref = self.refs[name]
        rows = pl.ds(0, 1) if ref.shape[2] == 1 else pl.ds(unit.row, unit.rows)
        columns = pl.ds(0, 1) if ref.shape[3] == 1 else pl.ds(unit.column, unit.columns)
        return ref[0, 0, rows, columns]


class Turn(NamedTuple):
    """A step of the grid: whether it is the first or the last of its block of queries, and what it computes.

    Attributes:
      kinds: of all steps.
    """

    begins: Condition
    ends: Condition
    visited: Step
    kinds: Kinds


@dataclasses.dataclass(frozen=True)
class Launch:
    """The grid of a kernel.

    Attributes:
      axes: the sizes of the axes before that of the steps, and their orders.
      indices: batch element, query head and block of queries of the indices of those axes.
    """

    plan: Plan
    schedule: Schedule
    axes: Sequence[tuple[int, Order]]
    indices: Callable[..., tuple[Scalar, Scalar, Scalar]]

    def run(
        self,
        body: Callable[[Block, Turn], None],
        scalars: Mapping[str, jax.Array],
        operands: Mapping[str, Operand],
        results: Mapping[str, Operand],
        scratch: Mapping[str, tuple[int, int]],
        *,
        role: str,
        matmuls: int,
    ) -> dict[str, Any]:
        """Runs ``body(block, turn)`` in every step; returns the results by name.

        Args:
          results: their types, in place of arrays.
          scratch: shapes of float32 buffers in VMEM.
          matmuls: of the size of the scores by a head dim, for the estimate of the cost.
        """
        plan, schedule, names = self.plan, self.schedule, (*scalars, *operands, *results, *scratch)
        inputs, entry = plan.inputs, list(scalars).index("entries") if "entries" in scalars else None

        def index_map(operand: Operand) -> Callable[..., Indices]:
            def mapped(*arguments: Any) -> Indices:
                *axes, step = arguments[: len(self.axes) + 1]
                entries = None if entry is None else arguments[len(self.axes) + 1 + entry]
                b, h, i = self.indices(*axes)
                return operand.index(b, h, i, schedule.fetched(entries, b, h, i, step))

            return mapped

        kinds = schedule.kinds()

        def kernel(*refs: Any) -> None:
            named = dict(zip(names, refs, strict=True))
            axes = [pl.program_id(axis) for axis in range(len(self.axes))]
            step = pl.program_id(len(self.axes))
            b, h, i = self.indices(*axes)
            visited = schedule.step(named.get("entries"), b, h, i, step)
            turn = Turn(step == 0, step == schedule.steps - 1, visited, kinds)
            body(Block(plan, named, b, h, i, visited.block), turn)

        specs = [[pl.BlockSpec(each.block, index_map(each)) for each in side.values()] for side in (operands, results)]
        blocks = [each for side in (operands, results) for each in side.values()]
        # Two buffers of each, whose last two dimensions are whole tiles.
        windows = sum(2 * each.array.dtype.itemsize * _in_tiles(each.block) for each in blocks)
        share = schedule.visited() / (plan.grid.q_tiles * plan.grid.kv_tiles)
        elements = int(math.prod((inputs.batch, inputs.heads, *plan.padded)) * share)
        found = run_kernel(
            kernel,
            *scalars.values(),
            *(each.array for each in operands.values()),
            role=role,
            grid=[*(size for size, _ in self.axes), schedule.steps],
            orders=[*(order for _, order in self.axes), "arbitrary"],
            in_specs=specs[0],
            out_specs=specs[1],
            out_shape=[each.array for each in results.values()],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch.values()],
            scalars=len(scalars),
            flops=matmuls * elements * (inputs.head_dim + inputs.value_dim),
            transcendentals=elements,
            bytes_accessed=sum(math.prod(each.array.shape) * each.array.dtype.itemsize for each in blocks),
            vmem_limit=windows + sum(4 * math.prod(shape) for shape in scratch.values()) + UNIT_BYTES,
        )
        return dict(zip(results, found, strict=True))


def lanes(column: jax.Array, columns: int) -> jax.Array:
    """``[rows, columns]`` of ``[rows, 128]`` whose columns are the same."""
    if columns <= LANES:
        return column[:, :columns]
    return jnp.tile(column, (1, columns // LANES))


def rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _padded(array: jax.Array, sizes: Mapping[int, int]) -> jax.Array:
    widths = [(0, sizes.get(axis, size) - size) for axis, size in enumerate(array.shape)]
    return jnp.pad(array, widths) if any(width for _, width in widths) else array


def _at(array: jax.Array, axis: int, index: Scalar) -> Scalar:
    return 0 if array.shape[axis] == 1 else index


def _saturated_sum(positions: jax.Array, distance: int) -> jax.Array:
    return jnp.minimum(positions, _LIMITS.max - 1 - max(distance, 0)) + distance


def _in_tiles(block: Sequence[int]) -> int:
    *leading, rows, columns = block
    return math.prod(leading) * rounded_up(rows, 4 * SUBLANES) * rounded_up(columns, LANES)
