"""The Triton backend of the grouped matmul, on NVIDIA GPUs from Ampere on."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tilewright.kernels.grouped_matmul.groups import matrix_bounds, row_segments, row_tiles
from tilewright.kernels.grouped_matmul.inputs import GroupedInputs
from tilewright.kernels.grouped_matmul.triton.params import (
    Params,
    TritonGroupedBackwardParams,
    TritonGroupedForwardParams,
    footprints,
    listed_params,
)
from tilewright.kernels.op.backend import Implementation
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.op.footprint import Footprint, launch_reasons
from tilewright.kernels.triton import launch, unavailable
from tilewright.kernels.triton.matmul import TritonTile, fitted, tl_precision
from tilewright.ops.types import Device, Direction

DTYPES = ("float16", "bfloat16", "float32")
MAX_INT32 = (1 << 31) - 1

GROUP = 8
"""Tiles of rows whose programs are beside each other for the same columns of their matrices."""


class TritonGroupedMatmul(Implementation[GroupedInputs, Any, TritonGroupedForwardParams, TritonGroupedBackwardParams]):
    """Serves float16, bfloat16 and float32 without scales; sums are in float32, in one order."""

    platform: ClassVar[Platform] = Platform.TRITON
    forward_params: ClassVar[type] = TritonGroupedForwardParams
    backward_params: ClassVar[type] = TritonGroupedBackwardParams
    late_import: ClassVar[str] = "triton"
    serves: ClassVar[frozenset[str]] = frozenset({"group_offset", "transpose_rhs", "precision"})

    def reasons(self, inputs: GroupedInputs, device: Device, direction: Direction) -> list[str]:
        reasons = unavailable(device)
        dtypes = {"lhs": inputs.lhs.dtype.name, "rhs": inputs.rhs.dtype.name, "the result": inputs.out_dtype}
        reasons += [
            f"{name} must be one of {DTYPES}, got {each}" for name, each in dtypes.items() if each not in DTYPES
        ]
        if inputs.lhs.dtype != inputs.rhs.dtype:
            reasons.append(f"lhs and rhs must have one dtype, got {inputs.lhs.dtype} and {inputs.rhs.dtype}")
        if direction == "backward" and inputs.out_dtype != inputs.lhs.dtype.name:
            reasons.append(f"backward the result must have the dtype of lhs, got {inputs.out_dtype}")
        if inputs.precision is not None and not isinstance(inputs.precision, jax.lax.Precision):
            reasons.append(f"it takes a jax.lax.Precision, got {inputs.precision}")
        if inputs.k * inputs.n > MAX_INT32:
            reasons.append(f"elements of a matrix must be counted by 32 bits, got {inputs.k=}, {inputs.n=}")
        return reasons

    def candidates(self, inputs: GroupedInputs, device: Device, direction: Direction) -> Iterable[Params]:
        listed = listed_params(inputs, direction)
        fitting = [params for params in listed if not launch_reasons(footprints(inputs, params), device)]
        return fitting or listed[:1]

    def footprints(
        self, inputs: GroupedInputs, device: Device, direction: Direction, params: Params
    ) -> Sequence[Footprint]:
        return footprints(inputs, params)

    def forward(self, inputs: GroupedInputs, params: TritonGroupedForwardParams) -> jax.Array:
        if inputs.is_empty:
            return jnp.zeros(inputs.out_shape, inputs.out_dtype)
        return _by_matrices(inputs, inputs.lhs, params.tile, inputs.out_dtype, of_lhs=False)

    def backward(
        self, inputs: GroupedInputs, results: object, cotangents: jax.Array, params: TritonGroupedBackwardParams
    ) -> dict[str, Any]:
        """Gradients of lhs and rhs, of those that are used."""
        if inputs.is_empty:
            return {"lhs": jnp.zeros_like(inputs.lhs), "rhs": jnp.zeros_like(inputs.rhs)}
        gradients = {}
        if inputs.wants("lhs"):
            gradients["lhs"] = _by_matrices(inputs, cotangents, params.lhs, inputs.lhs.dtype, of_lhs=True)
        if inputs.wants("rhs"):
            gradients["rhs"] = outer_products(inputs, cotangents, params.rhs)
        return gradients


def _by_matrices(inputs: GroupedInputs, rows: jax.Array, tile: TritonTile, dtype: Any, of_lhs: bool) -> jax.Array:
    """Rows times their matrices, or for the gradient of lhs the transposed ones."""
    segments = row_segments(*_bounds(inputs), inputs.lhs.shape[0], inputs.group_offset is not None)
    depth_is_last = of_lhs != inputs.transpose_rhs
    run = functools.partial(_launch_by_matrices, tile, jnp.dtype(dtype), depth_is_last, _precision(inputs))
    return over_batch(run, [rows[None], *(each[None] for each in segments)], inputs.rhs[None])[0]


def _launch_by_matrices(
    tile: TritonTile, dtype: Any, depth_is_last: bool, precision: str, mapped: Sequence[jax.Array], matrices: jax.Array
) -> jax.Array:
    """``[batch, rows, columns]``, from rows and segments of a batch, and matrices of it or of all alike."""
    from tilewright.kernels.grouped_matmul.triton import kernels

    rows, starts, ends, which = mapped
    batch, size, depth = rows.shape
    columns = matrices.shape[2 if depth_is_last else 3]
    tile = fitted(tile, columns, depth)
    index = jnp.arange(batch, dtype=jnp.int32)[:, None]
    if matrices.shape[0] > 1:
        which = jnp.where(which < 0, which, which + index * matrices.shape[1])
    segments = (starts + index * size).ravel(), (ends + index * size).ravel(), which.ravel()
    _, *schedule = row_tiles(*segments, batch * size, tile.rows)
    tiles = schedule[0].shape[0]
    (out,) = launch(
        kernels.rows_by_matrices,
        [rows, matrices, *schedule],
        [jax.ShapeDtypeStruct((batch, size, columns), dtype)],
        grid=[tiles * -(-columns // tile.columns)],
        scalars={"tiles": tiles},
        constants={
            "K": depth,
            "N": columns,
            "K_STRIDE": 1 if depth_is_last else columns,
            "N_STRIDE": depth if depth_is_last else 1,
            "BLOCK_ROWS": tile.rows,
            "BLOCK_N": tile.columns,
            "BLOCK_K": tile.depth,
            "GROUP": GROUP,
            "PRECISION": precision,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def outer_products(inputs: GroupedInputs, d_out: jax.Array, tile: TritonTile) -> jax.Array:
    """The gradient of rhs, in its layout."""
    left, right = (d_out, inputs.lhs) if inputs.transpose_rhs else (inputs.lhs, d_out)
    run = functools.partial(_launch_outer_products, tile, inputs.rhs.dtype, _precision(inputs))
    mapped = [each[None] for each in (left, right, *_bounds(inputs))]
    return over_batch(run, mapped, None)[0]


def _launch_outer_products(
    tile: TritonTile, dtype: Any, precision: str, mapped: Sequence[jax.Array], _: None
) -> jax.Array:
    """``[batch, matrices, left, right]``."""
    from tilewright.kernels.grouped_matmul.triton import kernels

    left, right, starts, ends = mapped
    batch, size, height = left.shape
    width, matrices = right.shape[2], starts.shape[1]
    index = jnp.arange(batch, dtype=jnp.int32)[:, None] * size
    (out,) = launch(
        kernels.outer_products,
        [left, right, (starts + index).ravel(), (ends + index).ravel()],
        [jax.ShapeDtypeStruct((batch, matrices, height, width), dtype)],
        grid=[batch * matrices * -(-height // tile.rows) * -(-width // tile.columns)],
        constants={
            "LEFT": height,
            "RIGHT": width,
            "BLOCK_LEFT": tile.rows,
            "BLOCK_RIGHT": tile.columns,
            "BLOCK_ROWS": tile.depth,
            "PRECISION": precision,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def _bounds(inputs: GroupedInputs) -> tuple[jax.Array, jax.Array]:
    return matrix_bounds(inputs.group_sizes, inputs.group_offset, inputs.lhs.shape[0], inputs.rhs.shape[0])


def _precision(inputs: GroupedInputs) -> str:
    return tl_precision(inputs.precision)


def over_batch(run: Callable[[Any, Any], Any], mapped: Sequence[jax.Array], matrices: Any) -> Any:
    """Returns ``run(mapped, matrices)``, whose arrays have a batch as their first axis; ``vmap`` multiplies it.

    Matrices that are the same for the whole batch have a first axis of 1; of several, all have it or none.
    """

    @jax.custom_batching.custom_vmap
    def call(mapped: Any, matrices: Any) -> Any:
        return run(mapped, matrices)

    @call.def_vmap
    def _(size: int, batched: Any, mapped: Any, matrices: Any) -> tuple[Any, Any]:
        batch = mapped[0].shape[1 if batched[0][0] else 0]

        def merged(array: jax.Array, is_batched: bool) -> jax.Array:
            array = array if is_batched else array[None]
            return jnp.broadcast_to(array, (size, batch, *array.shape[2:])).reshape(-1, *array.shape[2:])

        together = [merged(*each) for each in zip(mapped, batched[0], strict=True)]
        flags = jax.tree.leaves(batched[1])
        shared = not any(flags) and all(x.shape[0] == 1 for x in jax.tree.leaves(matrices))
        if not shared:
            matrices = jax.tree.map(merged, matrices, batched[1])
        out = over_batch(run, together, matrices)
        out = jax.tree.map(lambda x: x.reshape(size, batch, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return call(list(mapped), matrices)
