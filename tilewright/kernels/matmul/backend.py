"""The base class of the backends of all matmuls: results and gradients, composed of the products of a language."""

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.matmul.inputs import MatmulInputs, MatmulResults
from tilewright.kernels.numerics.activations import gated_gradients, kept_apart
from tilewright.kernels.op.arguments import padded
from tilewright.kernels.op.backend import Backend

PADDING_ROWS = 256
"""Rows of a matrix from which on padded copies of operands pay: a copy of ``[k, n]`` takes as long as the MMAs of 350
rows, and unaligned rows multiply the time by 2 to 4 (docs/notes/odd_sizes.md)."""

PADDING_SIZE = 64
"""The least k and n of copies."""


class Products(abc.ABC):
    """The products of the rows of a call with its weights; all are summed in float32 or wider."""

    @abc.abstractmethod
    def forward(self) -> Sequence[jax.Array]:
        """The results, as many as the inputs say, in any shape of as many elements."""

    @abc.abstractmethod
    def rows(self, d_product: jax.Array) -> jax.Array:
        """The cotangents of a product in the form that its gradients take."""

    @abc.abstractmethod
    def d_lhs(self, d_products: Sequence[jax.Array]) -> jax.Array:
        """The gradient of lhs, a sum over all products that is rounded once, here or by the caller."""

    @abc.abstractmethod
    def d_weight(self, name: str, d_product: jax.Array) -> jax.Array:
        """The gradient of a weight in its layout."""


class MatmulBackend[Forward, Backward](Backend[MatmulInputs, Any, Forward, Backward], abc.ABC):
    """A backend that defines only products; those of an op differ in their params."""

    @abc.abstractmethod
    def products(self, inputs: MatmulInputs, params: Forward | Backward) -> Products:
        """The products of a call whose operands have elements."""

    @abc.abstractmethod
    def recomputed_by(self, params: Backward) -> Forward | None:
        """The params by which a gated op's pre-activations are computed again; ``None`` to use those that were kept."""

    multiple: ClassVar[int] = 1
    """k and n of operands of 16 bits are padded to multiples of it if enough rows gain."""

    def pads(self, inputs: MatmulInputs) -> bool:
        """True if the products are of padded copies."""
        return (
            self.multiple > 1
            and (inputs.k % self.multiple != 0 or inputs.n % self.multiple != 0)
            and inputs.lhs.dtype.itemsize == 2
            and inputs.lhs_scale is None
            and inputs.rhs_scale is None
            and min(inputs.k, inputs.n) >= PADDING_SIZE
            and inputs.rows >= PADDING_ROWS * inputs.matrices
        )

    def padded(self, inputs: MatmulInputs) -> MatmulInputs:
        """The inputs of the products."""
        return inputs.padded(self.multiple) if self.pads(inputs) else inputs

    def forward(self, inputs: MatmulInputs, params: Forward) -> MatmulResults:
        if inputs.is_empty:
            return MatmulResults(*[jnp.zeros(inputs.out_shape, inputs.out_dtype)] * inputs.num_results)
        to_multiply = self.padded(inputs)
        found = (x.reshape(to_multiply.out_shape) for x in self.products(to_multiply, params).forward())
        return MatmulResults(*(_cut(x, inputs.out_shape) for x in found))

    def backward(self, inputs: MatmulInputs, results: Any, cotangents: jax.Array, params: Backward) -> dict[str, Any]:
        """Gradients of lhs and of the weights, of those that are used; of a gated op from both pre-activations."""
        if inputs.is_empty:
            return {name: jnp.zeros_like(inputs.arrays[name]) for name in ("lhs", *inputs.weights)}
        d_products = [cotangents]
        if inputs.activation is not None:
            again = self.recomputed_by(params)
            if again is not None:
                results = self.forward(kept_apart(inputs, cotangents), again)[1:]
            # By XLA, in one pass over memory: each of the two is an operand of two matmuls. Rows without a matrix may
            # get NaN, and reach no gradient.
            gate, up = results
            d_products = [*gated_gradients(inputs.activation, gate, up, cotangents, inputs.accumulator)]
        return self.gradients(inputs, d_products, params)

    def gradients(
        self, inputs: MatmulInputs, d_products: Sequence[jax.Array], params: Backward
    ) -> dict[str, jax.Array]:
        """Gradients of lhs and of the weights, of those that are used, from the cotangents of the products."""
        to_multiply = self.padded(inputs)
        products, gradients = self.products(to_multiply, params), {}
        if to_multiply is not inputs:
            d_products = [padded(each, self.multiple, each.ndim - 1) for each in d_products]
        d_products = [products.rows(each) for each in d_products]
        if inputs.wants("lhs"):
            gradients["lhs"] = products.d_lhs(d_products)
        for name, d_product in zip(inputs.weights, d_products, strict=True):
            if inputs.wants(name):
                gradients[name] = products.d_weight(name, d_product)
        return {
            name: _cut(x.reshape(to_multiply.gradient_shape(name)), inputs.gradient_shape(name)).astype(
                inputs.arrays[name].dtype
            )
            for name, x in gradients.items()
        }


def _cut(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Without what padding added."""
    return x if x.shape == shape else lax.slice(x, (0,) * x.ndim, shape)
