"""The matmuls of one call and their gradients: of all rows at once, or with groups over blocks of rows."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.matmul.backend import Products
from tilewright.kernels.matmul.groups import matrix_bounds
from tilewright.kernels.matmul.inputs import MatmulInputs
from tilewright.kernels.matmul.scales import by_blocks, expanded, factor
from tilewright.kernels.matmul.xla.blocks import Block, Blocks
from tilewright.kernels.numerics.activations import gated
from tilewright.kernels.numerics.dots import dot
from tilewright.ops.kernel.arrays import is_symbolic


class DenseProducts(Products):
    """The matmuls of all rows with the same matrices."""

    def __init__(self, inputs: MatmulInputs) -> None:
        # Codes with one scale are multiplied as they are, and the result is scaled; others are first made numbers.
        self.of_lhs, self.of_rhs = (
            _elements(inputs.lhs_scale, inputs, "lhs"),
            _elements(inputs.rhs_scale, inputs, "rhs"),
        )
        self.factor = factor(inputs.lhs_scale, inputs.rhs_scale)
        self.inputs = inputs.replace(
            lhs=_times(inputs.lhs, self.of_lhs), rhs=_times(inputs.rhs, self.of_rhs), lhs_scale=None, rhs_scale=None
        )

    def _dot(self, lhs: jax.Array, rhs: jax.Array, axes: Any) -> jax.Array:
        found: jax.Array = dot(lhs, rhs, axes, self.inputs.precision, self.inputs.accumulator)
        return found if self.factor is None else found * self.factor.astype(found.dtype)

    def forward(self) -> Sequence[jax.Array]:
        products = [self._dot(self.inputs.lhs, x, self.inputs.k_axes) for x in self.inputs.weights.values()]
        return [x.astype(self.inputs.out_dtype) for x in results_of(self.inputs, products)]

    def rows(self, d_product: jax.Array) -> jax.Array:
        return d_product

    def d_lhs(self, d_products: Sequence[jax.Array]) -> jax.Array:
        n_axis, products = 1 - self.inputs.k_axes[1], []
        for d_product, weight in zip(d_products, self.inputs.weights.values(), strict=True):
            # lhs is [k, m] here, so the weight comes first: its gradient needs no transpose of its own.
            if self.inputs.transpose_lhs:
                products.append(self._dot(weight, d_product, (n_axis, 1)))
            else:
                products.append(self._dot(d_product, weight, (d_product.ndim - 1, n_axis)))
        return _times(sum(products[1:], products[0]), self.of_lhs)

    def d_weight(self, name: str, d_product: jax.Array) -> jax.Array:
        lhs, k_axis = self.inputs.lhs, self.inputs.k_axes[0]
        of_lhs, of_product = (axis for axis in range(lhs.ndim) if axis != k_axis), range(d_product.ndim - 1)
        # The order of the factors gives the layout of the matrix, [n, k] or [k, n], without a transpose.
        if self.inputs.transpose_rhs:
            return _times(self._dot(d_product, lhs, (tuple(of_product), tuple(of_lhs))), self.of_rhs)
        return _times(self._dot(lhs, d_product, (tuple(of_lhs), tuple(of_product))), self.of_rhs)


def _elements(scale: Any, inputs: MatmulInputs, name: str) -> Any:
    """A scale for each element of an operand, if it has scales for blocks."""
    if by_blocks(scale) is None:
        return None
    axes = inputs.k_axes[:1] if name == "lhs" else (0, 1)
    return expanded(scale, inputs.arrays[name].shape, axes).astype(inputs.accumulator)


def _times(x: jax.Array, scale: Any) -> jax.Array:
    return x if scale is None else x.astype(scale.dtype) * scale


class GroupedProducts(Products):
    """The matmuls of rows in groups, block by block."""

    def __init__(self, inputs: MatmulInputs, block_rows: int) -> None:
        self.inputs = inputs
        self.block_rows = block_rows

    @functools.cached_property
    def each(self) -> "dict[str, BlockProduct]":
        return {name: BlockProduct(self.inputs.product(name), self.block_rows) for name in self.inputs.weights}

    def forward(self) -> Sequence[jax.Array]:
        def step(block: Block, results: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            # All products of a block before the next block: its rows are read once, and are still in the cache.
            rows = results_of(self.inputs, [each.forward(block) for each in self.each.values()])
            return tuple(block.written(array, x) for array, x in zip(results, rows, strict=True))

        return self._over_rows(step, [self.inputs.n] * self.inputs.num_results, self.inputs.out_dtype)

    def rows(self, d_product: jax.Array) -> jax.Array:
        return self.each["rhs"].padded(d_product)

    def d_lhs(self, d_products: Sequence[jax.Array]) -> jax.Array:
        def step(block: Block, gradients: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            pairs = zip(self.each.values(), d_products, strict=True)
            # In the dtype of the accumulator: rounded one by one, sums would lose what they cancel.
            first, *others = (product.d_lhs(block, d_product) for product, d_product in pairs)
            return (block.written(gradients[0], sum(others, first)),)

        return self._over_rows(step, [self.inputs.k], self.inputs.lhs.dtype)[0]

    def d_weight(self, name: str, d_product: jax.Array) -> jax.Array:
        return self.each[name].d_rhs(d_product)

    def _over_rows(self, step: Any, columns: Sequence[int], dtype: Any) -> tuple[jax.Array, ...]:
        """Arrays of rows that a loop over blocks writes, zeros where it writes nothing."""
        first = self.each["rhs"]
        zeros = tuple(jnp.zeros((first.blocks.rows, size), dtype) for size in columns)
        arrays = first.blocks.over(step, zeros)
        return tuple(x[: first.rows] for x in arrays) if first.padding else arrays


def results_of(inputs: MatmulInputs, products: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """The results of products, not rounded: of a gated op the output, and both where they are kept."""
    if inputs.activation is None:
        return products
    return [gated(inputs.activation, *products), *products][: inputs.num_results]


class BlockProduct:
    """One matmul, with its rows padded if their number is a symbol: a block may not reach behind them."""

    def __init__(self, inputs: MatmulInputs, block_rows: int) -> None:
        self.rows = inputs.lhs.shape[0]
        starts, ends = matrix_bounds(inputs)
        self.padding = block_rows if is_symbolic(self.rows) else 0
        size = block_rows if self.padding else min(block_rows, self.rows)
        self.blocks = Blocks(starts, ends, self.rows + self.padding, size)
        row_scale = by_blocks(inputs.lhs_scale)
        self.inputs = inputs.replace(
            lhs=self.padded(inputs.lhs), lhs_scale=None if row_scale is None else self.padded(row_scale)
        )
        self.factor = factor(inputs.lhs_scale, inputs.rhs_scale)
        self.n_axis = 0 if inputs.transpose_rhs else 1
        self.precision = inputs.precision
        self.accumulator = inputs.accumulator

    def padded(self, array: jax.Array) -> jax.Array:
        return jnp.pad(array, ((0, self.padding), (0, 0))) if self.padding else array

    def lhs(self, block: Block) -> jax.Array:
        """A block's rows, with their scales; the rows of others hold anything."""
        rows = block.rows(self.inputs.lhs)
        scale = self.row_scale(block)
        return rows if scale is None else rows.astype(self.accumulator) * scale

    def row_scale(self, block: Block) -> Any:
        """A scale for each element of a block's rows, if there are such."""
        scale = self.inputs.lhs_scale
        if scale is None:
            return None
        return expanded(block.rows(scale), (0, self.inputs.lhs.shape[1]), (1,)).astype(self.accumulator)

    def rhs(self, block: Block) -> jax.Array:
        """A block's matrix, with its scales."""
        matrix, scale = block.of(self.inputs.rhs), self.matrix_scale(block)
        return matrix if scale is None else matrix.astype(self.accumulator) * scale

    def matrix_scale(self, block: Block) -> Any:
        """A scale for each element of a block's matrix, if there are such."""
        scale = by_blocks(self.inputs.rhs_scale)
        if scale is None:
            return None
        return expanded(block.of(scale), self.inputs.rhs.shape[1:], (0, 1)).astype(self.accumulator)

    def scaled(self, product: jax.Array) -> jax.Array:
        return product if self.factor is None else product * self.factor.astype(product.dtype)

    def forward(self, block: Block) -> jax.Array:
        """The result of a block's rows, not rounded."""
        axes = (1, 1 - self.n_axis)
        return self.scaled(dot(self.lhs(block), self.rhs(block), axes, self.precision, self.accumulator))

    def d_lhs(self, block: Block, d_out: jax.Array) -> jax.Array:
        """The gradient of a block's rows of lhs, not rounded; ``d_out`` is padded."""
        axes = (1, self.n_axis)
        product = self.scaled(dot(block.rows(d_out), self.rhs(block), axes, self.precision, self.accumulator))
        scale = self.row_scale(block)
        return product if scale is None else product * scale

    def d_rhs(self, d_out: jax.Array) -> jax.Array:
        """The gradient of rhs; ``d_out`` is padded."""
        rhs = self.inputs.rhs

        def step(block: Block, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            total, gradients = carry
            left, right = jnp.where(block.inside, self.lhs(block), 0), block.own_rows(d_out)
            if self.n_axis == 0:
                left, right = right, left
            product = dot(left, right, (0, 0), self.precision, self.accumulator)
            # A group's blocks are consecutive. Its sum so far is written after each of them, and the last one counts.
            total = jnp.where(block.is_first, 0, total) + product
            scale = self.matrix_scale(block)
            gradient = self.scaled(total if scale is None else total * scale).astype(rhs.dtype)
            return total, lax.dynamic_update_index_in_dim(gradients, gradient, block.matrix, 0)

        init = jnp.zeros(rhs.shape[1:], self.accumulator), jnp.zeros_like(rhs)
        return self.blocks.over(step, init)[1]
