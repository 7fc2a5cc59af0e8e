"""The grouped matmul and its gradients over blocks of rows."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.grouped_matmul.groups import matrix_bounds
from tilewright.kernels.grouped_matmul.inputs import GroupedInputs
from tilewright.kernels.grouped_matmul.scales import by_blocks, expanded, factor
from tilewright.kernels.grouped_matmul.xla.blocks import Block, Blocks
from tilewright.kernels.numerics.dots import accumulator, dot
from tilewright.ops.kernel.arrays import is_symbolic


def forward(inputs: GroupedInputs, block_rows: int) -> jax.Array:
    """``[rows, n]`` in the result's dtype."""
    return Products(inputs, block_rows).forward()


def d_lhs(inputs: GroupedInputs, d_out: jax.Array, block_rows: int) -> jax.Array:
    """The gradient of lhs, in its dtype."""
    return Products(inputs, block_rows).d_lhs(d_out)


def d_rhs(inputs: GroupedInputs, d_out: jax.Array, block_rows: int) -> jax.Array:
    """The gradient of rhs, in its dtype and layout, summed in float32."""
    return Products(inputs, block_rows).d_rhs(d_out)


class Products:
    """The matmuls of one call, with its rows padded if their number is a symbol: a block may not reach behind them."""

    def __init__(self, inputs: GroupedInputs, block_rows: int):
        self.rows = inputs.lhs.shape[0]
        starts, ends = matrix_bounds(inputs.group_sizes, inputs.group_offset, self.rows, inputs.rhs.shape[0])
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
        self.accumulator = accumulator(inputs.lhs.dtype, inputs.rhs.dtype, inputs.out_dtype)

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

    def forward_block(self, block: Block) -> jax.Array:
        """The result of a block's rows, not rounded."""
        axes = (1, 1 - self.n_axis)
        return self.scaled(dot(self.lhs(block), self.rhs(block), axes, self.precision, self.accumulator))

    def forward(self) -> jax.Array:
        def step(block: Block, out: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            return (block.written(out[0], self.forward_block(block)),)

        return self.over_rows(step, [self.inputs.out_shape[1]], self.inputs.out_dtype)[0]

    def d_lhs_block(self, block: Block, d_out: jax.Array) -> jax.Array:
        """The gradient of a block's rows of lhs, not rounded; ``d_out`` is padded."""
        axes = (1, self.n_axis)
        product = self.scaled(dot(block.rows(d_out), self.rhs(block), axes, self.precision, self.accumulator))
        scale = self.row_scale(block)
        return product if scale is None else product * scale

    def d_lhs(self, d_out: jax.Array) -> jax.Array:
        d_out, lhs = self.padded(d_out), self.inputs.lhs

        def step(block: Block, gradient: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            return (block.written(gradient[0], self.d_lhs_block(block, d_out)),)

        return self.over_rows(step, [lhs.shape[1]], lhs.dtype)[0]

    def over_rows(self, step: Any, columns: Sequence[int], dtype: Any) -> tuple[jax.Array, ...]:
        """Arrays of rows that a loop over blocks writes, zeros where it writes nothing."""
        zeros = tuple(jnp.zeros((self.blocks.rows, size), dtype) for size in columns)
        arrays = self.blocks.over(step, zeros)
        return tuple(x[: self.rows] for x in arrays) if self.padding else arrays

    def d_rhs(self, d_out: jax.Array) -> jax.Array:
        d_out, rhs = self.padded(d_out), self.inputs.rhs

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
