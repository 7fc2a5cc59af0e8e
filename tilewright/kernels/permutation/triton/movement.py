"""The movement of rows in Triton, on NVIDIA GPUs from Ampere on; a mapped call is one launch of more tokens."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from tilewright.kernels.matmul.groups import prefix_sums
from tilewright.kernels.permutation.movement import GateGradients, Movement
from tilewright.kernels.permutation.routing import Routing
from tilewright.kernels.triton import launch, unavailable
from tilewright.kernels.triton.description import JitKernel
from tilewright.kernels.triton.limits import power_of_two
from tilewright.ops.types import Device
from tilewright.ops.utils.device import current_device

MAX_K = 64
"""Largest number of choices of a token: kernels have their loop over them unrolled."""

MAX_CHOICES = 1 << 30
"""Largest number of choices, which kernels count in 32 bits."""

COUNTED = 128
"""Choices of a program that counts or places them: as many pairs of each are compared."""

EXPERTS = 32
"""Experts, or other choices, that a program compares with its choices at once: 32 elements of a thread."""

SUMMED = (1024, 2)
"""Blocks of choices and experts of a tile whose counts are added up."""

SPREAD_BYTES = 8 << 10
"""Bytes of a tile that is read once and written k times."""

SUMMED_BYTES = 4 << 10
"""Bytes of a tile that is read several times into float32 sums."""

MAX_COLUMNS = 1024
"""Columns of a tile: with 16-bit elements a warp loads four times 512 bytes of a row, all in flight."""

MIN_COLUMNS = 256
"""Columns of a tile with which every thread of a warp loads 16 bytes of 16-bit elements."""

MAX_ROWS = 64

PROGRAMS_PER_CORE = 2
"""Programs below which tiles are made smaller: one of 4 warps alone on an SM has too little in flight."""


type Maybe = jax.Array | None


class Tile(NamedTuple):
    rows: int
    columns: int
    num_warps: int


def tile_of(rows: int, columns: int, elements: int, *, splits_columns: bool = True) -> Tile:
    """A tile of up to so many elements, and of fewer where there would be few programs.

    Args:
      splits_columns: columns have programs of their own, and are not a loop.
    """
    sizes = (MAX_COLUMNS >> shift for shift in range(3))
    # The largest of those that reach least beyond the columns.
    best = min(sizes, key=lambda size: (-(-columns // size) * size, -size))
    block_columns = min(power_of_two(columns), best)
    block_rows = min(max(elements // block_columns, 1), MAX_ROWS, power_of_two(rows))
    enough = PROGRAMS_PER_CORE * current_device().cores
    while (block_rows > 1 or (splits_columns and block_columns > MIN_COLUMNS)) and (
        -(-rows // block_rows) * (-(-columns // block_columns) if splits_columns else 1) < enough
    ):
        if block_rows > 1:
            block_rows //= 2
        else:
            block_columns //= 2
    return Tile(block_rows, block_columns, min(max(block_rows * block_columns // 512, 1), 4))


class TritonMovement(Movement):
    """Rows of float16, bfloat16 or float32 with at least one column."""

    def reasons(self, tokens: int, k: int, device: Device) -> list[str]:
        found = unavailable(device)
        if k > MAX_K:
            found.append(f"a token may have {MAX_K} choices, got {k=}")
        if tokens * k > MAX_CHOICES:
            found.append(f"there may be {MAX_CHOICES} choices, got {tokens} tokens with {k=}")
        return found

    def route(self, experts: jax.Array, num_experts: int, capacity: int | None = None) -> Routing:
        run = functools.partial(_route, num_experts, capacity)
        found = _mapped(run, lambda size, experts: (_flat(experts),))(experts[None])
        return Routing(*(x[0] for x in found))

    def gather(self, x: jax.Array, routing: Routing, weights: Maybe = None, *, fills: bool = True) -> jax.Array:
        def merge(size: int, x: jax.Array, positions: jax.Array, source: jax.Array, weights: Maybe) -> Sequence[Maybe]:
            choices = source.shape[1]
            return _flat(x), _shifted(positions, choices), _shifted(source, choices), _flat(weights)

        found: jax.Array = _mapped(functools.partial(_gather, fills), merge)(
            x, routing.positions, routing.source, weights
        )
        return found

    def combine(
        self,
        rows: jax.Array,
        routing: Routing,
        weights: Maybe = None,
        bias: Maybe = None,
        experts: Maybe = None,
        out_dtype: DTypeLike | None = None,
    ) -> jax.Array:
        def merge(
            size: int, rows: jax.Array, positions: jax.Array, weights: Maybe, bias: Maybe, experts: Maybe
        ) -> Sequence[Maybe]:
            moved = _flat(rows), _shifted(positions, rows.shape[1]), _flat(weights)
            return (*moved, *_merged_bias(bias, experts))

        run = functools.partial(_combine, jnp.dtype(rows.dtype if out_dtype is None else out_dtype))
        found: jax.Array = _mapped(run, merge)(rows, routing.positions, weights, *_bias(bias, experts))
        return found

    def dots(
        self,
        y: jax.Array,
        rows: jax.Array,
        routing: Routing,
        bias: Maybe = None,
        experts: Maybe = None,
    ) -> jax.Array:
        def merge(
            size: int, y: jax.Array, rows: jax.Array, positions: jax.Array, bias: Maybe, experts: Maybe
        ) -> Sequence[Maybe]:
            return _flat(y), _flat(rows), _shifted(positions, rows.shape[1]), *_merged_bias(bias, experts)

        found: jax.Array = _mapped(_dots, merge)(y, rows, routing.positions, *_bias(bias, experts))
        return found

    def gate_gradients(
        self,
        activation: str,
        gate: jax.Array,
        up: jax.Array,
        d_hidden: jax.Array,
        row_weights: jax.Array,
        source: jax.Array,
    ) -> GateGradients:
        run = functools.partial(_gate_gradients, activation)
        call = _mapped(run, lambda size, *arrays: tuple(map(_flat, arrays)))
        return GateGradients(*call(gate, up, d_hidden, row_weights, source))


def _mapped(run: Callable[..., Any], merge: Callable[..., Any]) -> Callable[..., Any]:
    """A function that ``vmap`` maps by one call of ``run`` on more rows.

    Args:
      merge: maps the number of elements, and arrays with one more axis in front, to the arrays of one call, whose
        results have the rows of one element behind those of another.
    """

    @jax.custom_batching.custom_vmap
    def call(*arrays: Maybe) -> Any:
        return run(*arrays)

    @call.def_vmap
    def _(size: int, batched: Sequence[bool | None], *arrays: Maybe) -> tuple[Any, Any]:
        every = jax.tree.map(
            lambda x, is_batched: x if is_batched else jnp.broadcast_to(x, (size, *x.shape)), arrays, tuple(batched)
        )
        found = _mapped(run, merge)(*merge(size, *every))
        found = jax.tree.map(lambda x: x.reshape(size, x.shape[0] // size, *x.shape[1:]), found)
        return found, jax.tree.map(lambda _: True, found)

    return call


def _flat(x: Maybe) -> Maybe:
    return None if x is None else x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _shifted(index: jax.Array, step: int) -> Maybe:
    """Indices into arrays that are one behind another; those of nothing stay negative."""
    first = jnp.arange(index.shape[0], dtype=index.dtype).reshape(-1, *[1] * (index.ndim - 1)) * step
    return _flat(jnp.where(index < 0, index, index + first))


def _bias(bias: Maybe, experts: Maybe) -> tuple[Maybe, Maybe]:
    """Both or none: experts are read for their biases alone."""
    return bias, None if bias is None else experts


def _merged_bias(bias: Maybe, experts: Maybe) -> tuple[Maybe, Maybe]:
    """Biases of all elements; an expert that does not exist may become one that does, for a choice that is dropped."""
    return (None, None) if bias is None or experts is None else (_flat(bias), _shifted(experts, bias.shape[1]))


def _or_absent(x: Maybe, dtype: DTypeLike) -> jax.Array:
    return jnp.zeros((0,), dtype) if x is None else x


def _route(num_experts: int, capacity: int | None, experts: jax.Array) -> Routing:
    """The routing of each element of a batch."""
    from tilewright.kernels.permutation.triton import kernels

    batch, tokens, k = experts.shape
    choices = tokens * k
    blocks, i32 = -(-choices // COUNTED), jnp.int32
    limit = choices if capacity is None else min(capacity, choices)
    by_block = jax.ShapeDtypeStruct((batch, blocks, num_experts), i32)
    sizes, constants = {"choices": choices, "blocks": blocks}, {"E": num_experts, "BLOCK": COUNTED}
    (counts,) = launch(
        kernels.count_choices,
        [experts],
        [by_block],
        grid=[batch * blocks],
        scalars=sizes,
        constants=constants | {"BLOCK_E": EXPERTS},
    )
    before, group_sizes = launch(
        kernels.sum_counts,
        [counts],
        [by_block, jax.ShapeDtypeStruct((batch, num_experts), i32)],
        grid=[batch * -(-num_experts // SUMMED[1])],
        scalars={"blocks": blocks, "capacity": limit},
        constants={"E": num_experts, "BLOCK": min(power_of_two(blocks), SUMMED[0]), "BLOCK_E": SUMMED[1]},
    )
    ends = jax.vmap(prefix_sums)(group_sizes)
    source, positions = launch(
        kernels.place_choices,
        [experts, before, ends - group_sizes, ends],
        [jax.ShapeDtypeStruct((batch, choices), i32), jax.ShapeDtypeStruct(experts.shape, i32)],
        grid=[batch * blocks],
        scalars=sizes | {"capacity": limit},
        constants=constants | {"PART": EXPERTS},
    )
    return Routing(source, positions, group_sizes)


def _gather(fills: bool, x: jax.Array, positions: jax.Array, source: jax.Array, weights: Maybe) -> jax.Array:
    from tilewright.kernels.permutation.triton import kernels

    given = _or_absent(weights, jnp.float32)
    constants = {"WEIGHTED": weights is not None, "FILLS": fills}
    out = jax.ShapeDtypeStruct((source.shape[0], x.shape[1]), x.dtype)
    return _by_columns(kernels.spread, SPREAD_BYTES, [x, positions, source, given], out, positions.shape, constants)


def _combine(
    dtype: np.dtype, rows: jax.Array, positions: jax.Array, weights: Maybe, bias: Maybe, experts: Maybe
) -> jax.Array:
    from tilewright.kernels.permutation.triton import kernels

    absent = _or_absent(weights, jnp.float32), _or_absent(bias, rows.dtype), _or_absent(experts, jnp.int32)
    constants = {"WEIGHTED": weights is not None, "BIASED": bias is not None}
    out = jax.ShapeDtypeStruct((positions.shape[0], rows.shape[1]), dtype)
    return _by_columns(kernels.combine, SUMMED_BYTES, [rows, positions, *absent], out, positions.shape, constants)


def _by_columns(
    kernel: JitKernel,
    tile_bytes: int,
    arrays: Sequence[jax.Array],
    out: jax.ShapeDtypeStruct,
    shape: tuple[int, ...],
    constants: dict[str, bool],
) -> jax.Array:
    """A kernel of tokens and columns; its first array is that of the rows, ``shape`` is tokens and k."""
    (tokens, k), d = shape, out.shape[1]
    tile = tile_of(tokens, d, tile_bytes // arrays[0].dtype.itemsize)
    (found,) = launch(
        kernel,
        arrays,
        [out],
        grid=[-(-tokens // tile.rows) * -(-d // tile.columns)],
        scalars={"tokens": tokens},
        constants={"K": k, "D": d, "BLOCK_TOKENS": tile.rows, "BLOCK_D": tile.columns, **constants},
        num_warps=tile.num_warps,
    )
    return found


def _dots(y: jax.Array, rows: jax.Array, positions: jax.Array, bias: Maybe, experts: Maybe) -> jax.Array:
    from tilewright.kernels.permutation.triton import kernels

    d, choices = rows.shape[1], positions.size
    tile = tile_of(choices, d, SUMMED_BYTES // rows.dtype.itemsize, splits_columns=False)
    (found,) = launch(
        kernels.dots,
        [y, rows, positions, _or_absent(bias, rows.dtype), _or_absent(experts, jnp.int32)],
        [jax.ShapeDtypeStruct(positions.shape, jnp.float32)],
        grid=[-(-choices // tile.rows)],
        scalars={"choices": choices},
        constants={
            "K": positions.shape[1],
            "D": d,
            "BLOCK_CHOICES": tile.rows,
            "BLOCK_D": tile.columns,
            "BIASED": bias is not None,
        },
        num_warps=tile.num_warps,
    )
    return found


def _gate_gradients(
    activation: str,
    gate: jax.Array,
    up: jax.Array,
    d_hidden: jax.Array,
    row_weights: jax.Array,
    source: jax.Array,
) -> tuple[jax.Array, ...]:
    from tilewright.kernels.permutation.triton import kernels

    rows, n = gate.shape
    tile = tile_of(rows, n, SUMMED_BYTES // gate.dtype.itemsize, splits_columns=False)
    wide = jax.ShapeDtypeStruct(gate.shape, gate.dtype)
    return launch(
        kernels.gate_gradients,
        [gate, up, d_hidden, row_weights, source],
        [wide, wide, wide, jax.ShapeDtypeStruct((rows,), jnp.float32)],
        grid=[-(-rows // tile.rows)],
        scalars={"rows": rows},
        constants={"N": n, "BLOCK_ROWS": tile.rows, "BLOCK_N": tile.columns, "ACTIVATION": activation},
        num_warps=tile.num_warps,
    )
