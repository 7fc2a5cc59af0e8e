"""``jax.lax.ragged_dot`` as a backend: what XLA makes of it on a device, with rows and group sizes made safe for it."""

import abc
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.matmul.backend import MatmulBackend, Products
from tilewright.kernels.matmul.groups import matrix_bounds, owned
from tilewright.kernels.matmul.inputs import MatmulInputs
from tilewright.kernels.matmul.xla.params import XlaGluBackwardParams
from tilewright.kernels.matmul.xla.products import results_of
from tilewright.kernels.numerics.dots import accumulator
from tilewright.kernels.op.choice import Platform
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams
from tilewright.ops.utils.device import current_device


class _RaggedDot[Backward](MatmulBackend[FwdParams, Backward], abc.ABC):
    """Serves calls with a matrix for every group and without scales.

    On CPUs and GPUs XLA computes it with all rows for every group, on CPUs in memory ``groups`` times that of lhs, and
    NaN or infinity in one matrix reaches the rows of all groups: 0 · NaN is among the terms of each sum. That is why it
    is never the first choice there, not even on a GPU for few rows, where all rows' products with a matrix take no
    longer than reading it. For TPUs XLA has Mosaic kernels of its own that go over the tiles of each group, where the
    other backend is a loop over blocks.
    """

    name: ClassVar[str] = "ragged_dot"
    platform: ClassVar[Platform] = Platform.XLA
    serves: ClassVar[frozenset[str]] = frozenset({"up", "activation", "group_sizes", "transpose_rhs", "precision"})

    def reasons(self, inputs: MatmulInputs, device: Device, direction: Direction) -> list[str]:
        if direction == "backward" and device.kind == "gpu":
            return [
                "XLA may compute the gradient of rhs by cuDNN, whose result is wrong unless groups are multiples of 256"
            ]
        return []

    def deprioritized(self, inputs: MatmulInputs, device: Device, direction: Direction) -> bool:
        return device.kind != "tpu"

    def candidates(self, inputs: MatmulInputs, device: Device, direction: Direction) -> Iterable[Any]:
        return [self.forward_params() if direction == "forward" else self.backward_params()]

    def products(self, inputs: MatmulInputs, params: FwdParams | Backward) -> Products:
        return _RaggedProducts(inputs)


class RaggedDot(_RaggedDot[BwdParams]):
    """Serves ``grouped_matmul``."""

    def recomputed_by(self, params: BwdParams) -> None:
        return None


class GatedRaggedDot(_RaggedDot[XlaGluBackwardParams]):
    """Serves ``gated_grouped_matmul`` by a call for each matrix, of rows that are read twice."""

    backward_params: ClassVar[type] = XlaGluBackwardParams

    def recomputed_by(self, params: XlaGluBackwardParams) -> FwdParams | None:
        return FwdParams() if params.recompute else None


class _RaggedProducts(Products):
    """The matmuls of rows in groups."""

    def __init__(self, inputs: MatmulInputs) -> None:
        self.inputs = inputs
        self.each = {name: inputs.product(name) for name in inputs.weights}

    def forward(self) -> Sequence[jax.Array]:
        inputs = self.inputs
        # The activation is of sums that are not rounded.
        dtype = inputs.out_dtype if inputs.activation is None else inputs.accumulator
        products = [_ragged_dot(each.lhs, each, 1 - _n_axis(each), dtype) for each in self.each.values()]
        return [x.astype(inputs.out_dtype) for x in results_of(inputs, products)]

    def rows(self, d_product: jax.Array) -> jax.Array:
        return d_product

    def d_lhs(self, d_products: Sequence[jax.Array]) -> jax.Array:
        inputs = self.inputs
        dtype = inputs.lhs.dtype if inputs.activation is None else inputs.accumulator
        pairs = zip(self.each.values(), d_products, strict=True)
        first, *others = (_ragged_dot(d_product, each, _n_axis(each), dtype) for each, d_product in pairs)
        return sum(others, first)

    def d_weight(self, name: str, d_product: jax.Array) -> jax.Array:
        return _ragged_contraction(self.each[name], d_product)


def _n_axis(inputs: MatmulInputs) -> int:
    """The axis of a matrix that is the result's columns."""
    return 0 if inputs.transpose_rhs else 1


def _sizes(inputs: MatmulInputs) -> tuple[jax.Array, jax.Array]:
    """Group sizes that are not negative and sum to the number of rows at most; and for each row if it has a group.

    A negative size would shift the groups behind it into those before, and their rows would be sums.
    """
    starts, ends = matrix_bounds(inputs)
    return ends - starts, owned(starts, ends, inputs.lhs.shape[0])[:, None]


def _ragged_dot(rows: jax.Array, inputs: MatmulInputs, contracting: int, dtype: Any) -> jax.Array:
    """Rows of groups times one axis of their matrices."""
    sizes, is_owned = _sizes(inputs)
    # Rows behind the last group are not written on every device.
    out = _call(rows, inputs.rhs, sizes, ((1,), (1 + contracting,)), True, inputs, dtype)
    return jnp.where(is_owned, out, 0)


def _ragged_contraction(inputs: MatmulInputs, d_out: jax.Array) -> jax.Array:
    """For each group, the sum over its rows of the outer products: the gradient of rhs."""
    sizes, is_owned = _sizes(inputs)
    # Zero the rows without a group on both sides: zero times NaN is NaN.
    lhs, d_out = (jnp.where(is_owned, x, 0) for x in (inputs.lhs, d_out))
    left, right = (d_out, lhs) if inputs.transpose_rhs else (lhs, d_out)
    return _call(left, right, sizes, ((0,), (0,)), False, inputs, inputs.rhs.dtype)


def _call(
    lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, contracting: Any, groups_in_rhs: bool, inputs: MatmulInputs,
    dtype: Any,
) -> jax.Array:  # fmt: skip
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(contracting, ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0] if groups_in_rhs else [],
    )
    wide = accumulator(lhs.dtype, rhs.dtype, dtype)
    spec = jax.sharding.PartitionSpec(*[None] * (2 if groups_in_rhs else 3)) if _on_explicit_axes() else None

    def run(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        if 0 in (*lhs.shape, *rhs.shape):
            return jnp.zeros(jax.eval_shape(ragged, lhs, rhs, sizes).shape, dtype)
        return ragged(lhs, rhs, sizes).astype(dtype)

    def ragged(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        return lax.ragged_dot_general(lhs, rhs, sizes, numbers, inputs.precision, wide, out_sharding=spec)

    return _mapped_together(run)(lhs, rhs, sizes)


def _on_explicit_axes() -> bool:
    kinds = jax.sharding.get_abstract_mesh().axis_types
    return any(kind == jax.sharding.AxisType.Explicit for kind in kinds)


def _one_by_one(run: Any) -> Any:
    return lambda *operands: lax.map(lambda each: run(*each), operands)


def _mapped_together(run: Any) -> Any:
    """Under ``vmap`` maps all operands: JAX can map ``ragged_dot`` only along the first axes of all of them."""

    @jax.custom_batching.custom_vmap
    def call(*operands: jax.Array) -> jax.Array:
        return run(*operands)

    @call.def_vmap
    def _(size: int, batched: Any, *operands: jax.Array) -> Any:
        together = [
            x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
            for x, is_batched in zip(operands, batched, strict=True)
        ]
        # JAX's rule for vmap drops out_sharding, without which explicit axes are an error; and XLA compiles no batched
        # call for TPUs ("group_sizes with rank > 1 are not yet supported", libtpu 0.0.50).
        looped = _on_explicit_axes() or current_device().kind == "tpu"
        mapped = _one_by_one(run) if looped else jax.vmap(run)
        return _mapped_together(mapped)(*together), True

    return call
