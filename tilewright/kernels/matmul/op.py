"""The base class of all matmuls: what a call returns, keeps and costs, with or without groups, gate and scales."""

import abc
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.kernels.matmul.cases import group_offset_of, group_sizes
from tilewright.kernels.matmul.inputs import MatmulInputs, MatmulResults
from tilewright.kernels.matmul.partitioning import matmul_partitioning
from tilewright.kernels.matmul.reference import matmul_reference
from tilewright.kernels.numerics.activations import gated
from tilewright.kernels.op.cases import generator_of
from tilewright.kernels.op.choice import Choice
from tilewright.kernels.op.portfolio import PortfolioKernel
from tilewright.kernels.op.roofline import Cost, array_bytes
from tilewright.kernels.op.sharding import Partitioning
from tilewright.ops.kernel.arrays import struct_like
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.kernel.parts import Product


class MatmulKernel(PortfolioKernel[MatmulInputs, MatmulResults], abc.ABC):
    """An op that defines only ``prepare``, ``cases`` and its backends; a gated one also sets ``run_is_forward``."""

    def reference(self, inputs: MatmulInputs) -> jax.Array:
        """The oracle: promote narrow arrays for exact results."""
        return cast(jax.Array, matmul_reference(inputs).astype(inputs.out_dtype))

    def results(self, inputs: MatmulInputs) -> Any:
        """The result in the dtype that was asked for, and both pre-activations if they are kept."""
        out: Any = jax.ShapeDtypeStruct(inputs.out_shape, inputs.out_dtype)
        return MatmulResults(*[out] * inputs.num_results)

    def outputs(self, inputs: MatmulInputs, results: MatmulResults) -> jax.Array:
        return results.out

    def run(self, inputs: MatmulInputs, *, cfg: Choice) -> Any:
        """The result, without pre-activations in memory where the backend can do without."""
        return super().run(inputs.replace(keeps=False), cfg=cfg)

    def residuals(self, results: MatmulResults) -> Any:
        """Both pre-activations; without a gate the backward pass needs only the operands."""
        return results[1:]

    def cotangents(self, inputs: MatmulInputs, residuals: Any, cotangents: tuple[Any, ...]) -> Any:
        """Only the cotangents of the result."""
        return cotangents[0]

    def outputs_of_residuals(self, residuals: Any, inputs: MatmulInputs) -> Any:
        """The gated activation of the pre-activations as they are kept, which are rounded."""
        wide = jnp.promote_types(jnp.float32, inputs.out_dtype)
        gate, up = (x.astype(wide) for x in residuals)
        return gated(cast(str, inputs.activation), gate, up).astype(inputs.out_dtype)

    def product(self, inputs: MatmulInputs) -> Product:
        """Rows times a matrix, with groups too."""
        lhs_k, rhs_k = inputs.k_axes
        matrix = jax.ShapeDtypeStruct(inputs.rhs.shape[-2:], inputs.rhs.dtype)
        sources = (("lhs",), tuple(inputs.weights))
        return Product(struct_like(inputs.lhs), matrix, ((lhs_k,), (rhs_k,)), sources=sources)

    def partitioning(self, inputs: MatmulInputs) -> Partitioning | None:
        """Splits by rows, k, n and matrices, as in the types of the operands."""
        return matmul_partitioning(inputs)

    def split_alike(self, inputs: MatmulInputs) -> Sequence[Mapping[str, int]]:
        """The matrices of a gate and of what it multiplies, along n and by group."""
        stacked = 0 if inputs.group_sizes is None else 1
        n = stacked + (0 if inputs.transpose_rhs else 1)
        axes = (n, 0) if stacked else (n,)
        return [dict.fromkeys(inputs.weights, axis) for axis in axes] if inputs.up is not None else []

    def sampled(self, inputs: MatmulInputs, key: jax.Array) -> MatmulInputs:
        """Normal arrays, unequal groups that have all rows, and an offset at which every matrix has a group."""
        random, drawn = generator_of(key), dict[str, Any]()
        if inputs.group_sizes is not None:
            drawn["group_sizes"] = group_sizes(random, inputs.rows, inputs.groups)
        if inputs.group_offset is not None:
            drawn["group_offset"] = group_offset_of(random, inputs.groups, inputs.matrices)
        for name, scale in (("lhs_scale", inputs.lhs_scale), ("rhs_scale", inputs.rhs_scale)):
            if scale is not None:
                drawn[name] = random.uniform(0.5, 2.0, scale.shape).astype(np.float32)
        return super().sampled(inputs, key).replace(**drawn)

    def cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """FLOPs if every row has a matrix, twice as many backward, and bytes of every operand and result once."""
        inputs = self.inputs_of(inv)
        flops = 2.0 * len(inputs.weights) * inputs.rows * inputs.k * inputs.n
        operands, out = array_bytes(inputs.operands), _out_bytes(inputs)
        if inv.direction == "forward":
            return Cost(flops, float(operands + out))
        return Cost(2 * flops, float(2 * operands + out * (1 if inputs.up is None else 3)))

    def min_cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """The same forward, or where groups may be empty the bytes of the result; backward that of one gradient."""
        inputs, cost = self.inputs_of(inv), self.cost(inv)
        if inputs.group_sizes is not None:
            return Cost(0.0, float(_out_bytes(inputs)) if inv.direction == "forward" else 0.0)
        return cost if inv.direction == "forward" else Cost(cost.flops / (2 * len(inputs.weights)), 0.0)


def _out_bytes(inputs: MatmulInputs) -> int:
    return inputs.rows * inputs.n * jnp.dtype(inputs.out_dtype).itemsize
