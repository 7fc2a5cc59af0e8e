"""Matmuls with weights of few bits: the argument list, its checks and the public function."""

import functools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from tilewright.kernels.numerics.dots import result_dtype
from tilewright.kernels.op.arguments import (
    PlatformOption,
    apply,
    as_array,
    has_arithmetic,
    integer,
    is_integer,
    to_32_bit,
)
from tilewright.kernels.op.cases import OpCases, generator_of
from tilewright.kernels.op.contents import Check, Finder, Given, shape_of
from tilewright.kernels.op.portfolio import PortfolioKernel
from tilewright.kernels.op.public import public_function
from tilewright.kernels.weight_only.cases import CASES, WeightOnlyCase
from tilewright.kernels.weight_only.inputs import WeightOnlyInputs, weight_only_reference
from tilewright.kernels.weight_only.packing import FORMATS, MXFP4_GROUP, UNIT_BYTES, WeightFormat, groups_of
from tilewright.kernels.weight_only.weights import PackedWeight
from tilewright.ops.kernel.arrays import struct_like
from tilewright.ops.kernel.parts import Product
from tilewright.ops.utils.stable_ids import stable_id


def _range_of_zeros(given: Given) -> Finder | None:
    """Zero points that kernels subtract exactly in bfloat16, whatever the code is."""
    largest = 8 if given.get("format", "int4") == "int4" else 128
    return functools.partial(_faults, low=-largest, high=largest)


def _range_of_order(given: Given) -> Finder | None:
    """Columns of x."""
    shape = shape_of(given, "x")
    return functools.partial(_faults, low=0, high=shape[-1] - 1) if shape else None


def _faults(name: str, numbers: np.ndarray, low: int, high: int) -> Iterator[str]:
    if numbers.size and not low <= int(numbers.min()) <= int(numbers.max()) <= high:
        yield f"{name} must be from {low} to {high}, got numbers from {numbers.min()} to {numbers.max()}"


CONTENTS: Mapping[str, Check] = MappingProxyType({"zeros": _range_of_zeros, "order": _range_of_order})


@stable_id("tilewright/weight_only.WeightOnlyMatmul")
class WeightOnlyMatmul(PortfolioKernel[WeightOnlyInputs, jax.Array]):
    """A matmul with a weight of few bits; see ``weight_only_matmul`` for the arguments."""

    cases: ClassVar[OpCases[WeightOnlyCase]] = CASES
    core_dims: ClassVar[Mapping[str, int]] = {"x": 1}
    contents: ClassVar[Mapping[str, Check]] = CONTENTS

    def __init__(self) -> None:
        backends = (
            "tilewright.kernels.weight_only.triton.backend:TritonWeightOnly",
            "tilewright.kernels.weight_only.xla:XlaWeightOnly",
        )
        super().__init__("weight_only_matmul", version="1", backends=backends)

    def prepare(
        self,
        x: ArrayLike,
        codes: ArrayLike,
        *,
        scales: ArrayLike,
        zeros: ArrayLike | None = None,
        order: ArrayLike | None = None,
        format: WeightFormat = "int4",
        group: int | None = 128,
        preferred_element_type: DTypeLike | None = None,
        platform: PlatformOption = None,
        cfg: object = None,
    ) -> WeightOnlyInputs:
        """Checks a call; reads only types, shapes and dtypes."""
        rows, stored, scale = as_array("x", x), as_array("codes", codes), as_array("scales", scales)
        if not rows.shape or not has_arithmetic(rows.dtype):
            raise ValueError(
                f"x must be a floating-point array [..., k] of 16 bits or more, got {rows.shape=}, {rows.dtype=}"
            )
        if format not in FORMATS:
            raise ValueError(f"format must be one of {get_args(WeightFormat.__value__)}, got {format!r}")
        k, packing = rows.shape[-1], FORMATS[format]
        group = None if group is None else integer("group", group)
        if (group is not None and group < 1) or (format == "mxfp4" and group != MXFP4_GROUP):
            raise ValueError(f"group must be positive or None, and {MXFP4_GROUP} in mxfp4, got {group=}, {format=}")
        expected = (packing.units(k), UNIT_BYTES)
        if len(stored.shape) != 3 or (stored.shape[0], stored.shape[2]) != expected or stored.dtype != np.uint8:
            raise ValueError(
                f"codes must be uint8 of the shape ({expected[0]}, n, {UNIT_BYTES}) for x of {k=} in {format}, got "
                f"{stored.shape=}, {stored.dtype=}"
            )
        shape = (groups_of(k, group), stored.shape[1])
        is_scale = scale.dtype == np.uint8 if format == "mxfp4" else has_arithmetic(scale.dtype)
        if scale.shape != shape or not is_scale:
            kind = "uint8" if format == "mxfp4" else "floating-point of 16 bits or more"
            raise ValueError(
                f"scales must be {kind} of the shape {shape}, [groups, n] with {group=}, got {scale.shape=}, "
                f"{scale.dtype=}"
            )
        return WeightOnlyInputs(
            rows,
            stored,
            to_32_bit(scale, rows.dtype),
            result_dtype(preferred_element_type, rows.dtype).name,
            format,
            group,
            zeros=None if zeros is None else _zeros(zeros, shape, format, rows.dtype),
            order=None if order is None else _order(order, k),
            platform=self.backends.allowed(platform),
        )

    def results(self, inputs: WeightOnlyInputs) -> Any:
        return jax.ShapeDtypeStruct(inputs.out_shape, inputs.out_dtype)

    def residuals(self, results: jax.Array) -> None:
        """Nothing: the backward pass needs only the weight."""

    def cotangents(self, inputs: WeightOnlyInputs, residuals: None, cotangents: tuple[Any, ...]) -> jax.Array:
        found: jax.Array = cotangents[0]
        return found

    def reference(self, inputs: WeightOnlyInputs) -> jax.Array:
        return weight_only_reference(inputs).astype(inputs.out_dtype)

    def product(self, inputs: WeightOnlyInputs) -> Product:
        """Rows times a matrix."""
        matrix = jax.ShapeDtypeStruct((inputs.k, inputs.n), inputs.x.dtype)
        return Product(struct_like(inputs.x), matrix, ((len(inputs.x.shape) - 1,), (0,)), sources=(("x",), ("codes",)))

    def flops(self, inputs: WeightOnlyInputs, direction: Any) -> float:
        """Two for each product, in either direction: few callers want a gradient of scales."""
        return 2.0 * inputs.rows * inputs.k * inputs.n

    def sampled(self, inputs: WeightOnlyInputs, key: jax.Array) -> WeightOnlyInputs:
        """Any codes, with scales by which weights are about 1."""
        random, drawn = generator_of(key), dict[str, Any]()
        drawn["codes"] = random.integers(0, 256, inputs.codes.shape, np.uint8)
        if inputs.format == "mxfp4":
            drawn["scales"] = random.integers(124, 128, inputs.scales.shape, np.uint8)
        else:
            largest = 1 << (inputs.packing.bits - 1)
            drawn["scales"] = (random.uniform(0.5, 1.5, inputs.scales.shape) / largest).astype(inputs.scales.dtype)
        if inputs.zeros is not None:
            drawn["zeros"] = random.integers(-4, 4, inputs.zeros.shape).astype(inputs.zeros.dtype)
        if inputs.order is not None:
            drawn["order"] = random.permutation(inputs.k).astype(np.int32)
        return super().sampled(inputs, key).replace(**drawn)


def _zeros(zeros: ArrayLike, shape: tuple[Any, ...], format: str, dtype: Any) -> jax.Array:
    array = as_array("zeros", zeros)
    if format == "mxfp4":
        raise ValueError("mxfp4 has no zero points: leave out zeros")
    if array.shape != shape or not is_integer(array.dtype):
        raise ValueError(f"zeros must be integers of the shape of scales, {shape}, got {array.shape=}, {array.dtype=}")
    return array if array.dtype == np.int16 else apply(lambda x: jnp.clip(x, -256, 256).astype(jnp.int16), array)


def _order(order: ArrayLike, k: Any) -> jax.Array:
    array = as_array("order", order)
    if array.shape != (k,) or not is_integer(array.dtype):
        raise ValueError(f"order must be integers of the shape ({k},), got {array.shape=}, {array.dtype=}")
    return array if array.dtype == np.int32 else apply(lambda x: x.astype(jnp.int32), array)


WEIGHT_ONLY_MATMUL = WeightOnlyMatmul()
"""The one kernel behind the public functions."""


def packed_matmul(x: ArrayLike, weight: PackedWeight, **options: Any) -> jax.Array:
    """``weight_only_matmul`` of a packed weight with two axes."""
    if weight.codes.ndim != 3:
        raise ValueError(f"a packed weight must have the axes [k, n] in a matmul, got {weight.shape=}")
    if jnp.shape(x)[-1:] != (weight.k,):
        raise ValueError(f"the last axis of lhs must have the k={weight.k} of the weight, got {jnp.shape(x)}")
    return WEIGHT_ONLY_MATMUL(
        x,
        weight.codes,
        scales=weight.scales,
        zeros=weight.zeros,
        order=weight.order,
        format=weight.format,
        group=weight.group,
        **options,
    )


@public_function(WeightOnlyMatmul.prepare)
def weight_only_matmul(*args: Any, **kwargs: Any) -> jax.Array:
    """A matmul with a weight that is stored in four or eight bits, ``x · ((code − zero) · scale)``.

    ``matmul`` of x and a ``PackedWeight`` calls it. Sums are float32. The gradient of x is a matmul with the transposed
    weight; scales that are floating-point have one, too, codes and zero points have none.

    Args:
      x: ``[..., k]``, floating-point of 16 bits or more.
      codes: uint8 ``[units, n, 32]``, of a ``PackedWeight``.
      scales: ``[groups, n]``, floating-point; in mxfp4 uint8, exponents plus 127, of which 255 is NaN.
      zeros: ``[groups, n]``, the numbers that stand for zero, −8 to 8 in int4, −128 to 128 in int8; ``None`` for 0.
      order: ``[k]``, the column of x that meets each row of the stored weight; ``None`` for the same.
      format: "int4", "int8" or "mxfp4".
      group: rows of the weight that share a scale, the last group may be short; ``None`` for all rows.
      preferred_element_type: the dtype of the result; by default that of x.
      platform: None or "auto" takes the best that can serve the call; a name is strict, several are tried in order.
      cfg: a config to use instead of the selected one.

    Returns:
      ``[..., n]``.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    return WEIGHT_ONLY_MATMUL(*args, **kwargs)
