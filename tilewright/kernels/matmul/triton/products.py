"""The matmuls of one call with groups in Triton and their gradients; a mapped call is one launch of more rows."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.kernels.matmul.backend import Products
from tilewright.kernels.matmul.groups import matrix_bounds, row_segments, row_tiles
from tilewright.kernels.matmul.inputs import MatmulInputs
from tilewright.kernels.triton import launch
from tilewright.kernels.triton.batching import over_batch
from tilewright.kernels.triton.matmul import TritonTile, fitted, tl_precision

GROUP = 8
"""Tiles of rows whose programs are beside each other for the same columns of their matrices."""


class TritonProducts(Products):
    """The products of rows in groups; a call without groups is one group.

    Attributes:
      params: of the forward kernel, or of both kernels of the backward pass.
    """

    def __init__(self, inputs: MatmulInputs, params: Any) -> None:
        self.inputs = inputs.as_one_group()
        self.params = params
        self.precision = tl_precision(inputs.precision)

    def forward(self) -> Sequence[jax.Array]:
        inputs, tile = self.inputs, self.params.tile
        if inputs.activation is None:
            return [self._rows_by_matrices(inputs.lhs, tile, inputs.out_dtype, inputs.transpose_rhs)]
        run = functools.partial(
            _launch_gated, tile, inputs.activation, inputs.keeps, inputs.transpose_rhs, self.precision
        )
        return [x[0] for x in self._over_rows(run, [inputs.lhs])]

    def rows(self, d_product: jax.Array) -> jax.Array:
        return d_product.reshape(-1, self.inputs.n)

    def d_lhs(self, d_products: Sequence[jax.Array]) -> jax.Array:
        inputs, tile = self.inputs, self.params.lhs
        if inputs.activation is None:
            return self._rows_by_matrices(d_products[0], tile, inputs.lhs.dtype, not inputs.transpose_rhs)
        run = functools.partial(_launch_gradient_of_rows, tile, inputs.transpose_rhs, self.precision)
        found: jax.Array = self._over_rows(run, d_products)[0]
        return found

    def d_weight(self, name: str, d_product: jax.Array) -> jax.Array:
        # The gradient of a transposed matrix is the transposed product: swap the factors rather than move the result.
        left, right = (d_product, self.inputs.lhs) if self.inputs.transpose_rhs else (self.inputs.lhs, d_product)
        dtype = self.inputs.weights[name].dtype
        run = functools.partial(_launch_outer_products, self.params.rhs, dtype, self.precision)
        mapped = [each[None] for each in (left, right, *matrix_bounds(self.inputs))]
        found: jax.Array = over_batch(run, mapped, None)[0]
        return found

    def _rows_by_matrices(self, rows: jax.Array, tile: TritonTile, dtype: Any, depth_is_last: bool) -> jax.Array:
        run = functools.partial(_launch_rows, tile, jnp.dtype(dtype), depth_is_last, self.precision)
        found: jax.Array = self._over_rows(run, [rows])[0]
        return found

    def _over_rows(self, run: Callable[[Any, Any], Any], rows: Sequence[jax.Array]) -> Any:
        """``run`` of rows, their segments and the matrices, each with a batch of one."""
        inputs = self.inputs
        segments = row_segments(
            *matrix_bounds(inputs), inputs.lhs.shape[0], inputs.group_offset is not None, inputs.fills
        )
        mapped = [each[None] for each in (*rows, *segments)]
        weights = tuple(each[None] for each in inputs.weights.values())
        return over_batch(run, mapped, weights if len(weights) > 1 else weights[0])


def _launch_rows(
    tile: TritonTile, dtype: Any, depth_is_last: bool, precision: str, mapped: Sequence[jax.Array], matrices: jax.Array
) -> jax.Array:
    """``[batch, rows, columns]``."""
    from tilewright.kernels.matmul.triton import kernels

    columns, depth = matrices.shape[2 if depth_is_last else 3], mapped[0].shape[2]
    sizes, options = _sizes(depth, columns, depth_is_last), {"PRECISION": precision}
    (out,) = _launch_tiles(kernels.rows_by_matrices, tile, "N", sizes, options, [dtype], mapped, [matrices])
    return out


def _launch_gated(
    tile: TritonTile, activation: str, keeps: bool, transposed: bool, precision: str, mapped: Sequence[jax.Array],
    matrices: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, ...]:  # fmt: skip
    """``[batch, rows, columns]`` of the output, and of the pre-activations if they are kept."""
    from tilewright.kernels.matmul.triton import gated_kernels

    sizes = _sizes(mapped[0].shape[2], matrices[0].shape[2 if transposed else 3], transposed)
    options, dtype = {"ACTIVATION": activation, "KEEP": keeps, "PRECISION": precision}, mapped[0].dtype
    kernel, dtypes = gated_kernels.gated_rows_by_matrices, [dtype, *[dtype if keeps else None] * 2]
    results = _launch_tiles(kernel, tile, "N", sizes, options, dtypes, mapped, matrices)
    return results if keeps else results[:1]


def _launch_gradient_of_rows(
    tile: TritonTile, transposed: bool, precision: str, mapped: Sequence[jax.Array],
    matrices: tuple[jax.Array, jax.Array],
) -> jax.Array:  # fmt: skip
    """``[batch, rows, k]``."""
    from tilewright.kernels.matmul.triton import gated_kernels

    sizes, dtype = _sizes(matrices[0].shape[3 if transposed else 2], mapped[0].shape[2], transposed), mapped[0].dtype
    kernel, options = gated_kernels.gradient_of_rows, {"PRECISION": precision}
    (out,) = _launch_tiles(kernel, tile, "K", sizes, options, [dtype], mapped, matrices)
    return out


def _sizes(k: int, n: int, transposed: bool) -> dict[str, int]:
    """The constants of matrices that are ``[k, n]``, or ``[n, k]`` if they are transposed."""
    return {"K": k, "N": n, "K_STRIDE": 1 if transposed else n, "N_STRIDE": k if transposed else 1}


def _launch_tiles(
    kernel: Any,
    tile: TritonTile,
    across: str,
    sizes: Mapping[str, int],
    options: Mapping[str, Any],
    dtypes: Sequence[Any],
    mapped: Sequence[jax.Array],
    matrices: Sequence[jax.Array],
) -> tuple[jax.Array, ...]:
    """A kernel over tiles of rows of one group each: ``[batch, rows, columns]`` for each dtype, nothing for ``None``.

    Args:
      across: the dimension of the columns, "K" or "N"; over the other one products are summed.
      sizes, options: constants of the kernel, of which the former are of both dimensions.
      mapped: arrays of rows of a batch, and its segments.
      matrices: of the batch, or of all of it alike.
    """
    *rows, starts, ends, which = mapped
    (batch, size, depth), columns = rows[0].shape, sizes[across]
    tile = fitted(tile, columns, depth)
    index = jnp.arange(batch, dtype=jnp.int32)[:, None]
    # A batch is one launch over `batch · size` rows, so each element has its rows, and its matrices if these are mapped
    # too, behind those of the elements before. −1 stays: it marks rows without a matrix.
    if matrices[0].shape[0] > 1:
        which = jnp.where(which < 0, which, which + index * matrices[0].shape[1])
    segments = (starts + index * size).ravel(), (ends + index * size).ravel(), which.ravel()
    _, *schedule = row_tiles(*segments, batch * size, tile.rows)
    tiles, shape = schedule[0].shape[0], (batch, size, columns)
    return launch(
        kernel,
        [*rows, *matrices, *schedule],
        # A kernel has all of its results; those that are not wanted have no elements, and a constant leaves out their
        # stores.
        [jax.ShapeDtypeStruct((0,) if dtype is None else shape, dtype or rows[0].dtype) for dtype in dtypes],
        # One axis, in which the kernel finds its tile itself: programs that share columns of a matrix are neighbours.
        grid=[tiles * -(-columns // tile.columns)],
        scalars={"tiles": tiles},
        constants={
            **sizes,
            "BLOCK_ROWS": tile.rows,
            f"BLOCK_{across}": tile.columns,
            f"BLOCK_{'K' if across == 'N' else 'N'}": tile.depth,
            "GROUP": GROUP,
            **options,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _launch_outer_products(
    tile: TritonTile, dtype: Any, precision: str, mapped: Sequence[jax.Array], _: None
) -> jax.Array:
    """``[batch, matrices, left, right]``."""
    from tilewright.kernels.matmul.triton import kernels

    left, right, starts, ends = mapped
    batch, size, height = left.shape
    width, matrices = right.shape[2], starts.shape[1]
    # Ranges of rows among those of the whole batch, as in `_launch_tiles`.
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
