"""The Triton backend of matmuls with weights of few bits, on NVIDIA GPUs from Ampere on."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.op.footprint import Footprint, launch_reasons
from tilewright.kernels.triton import launch, unavailable
from tilewright.kernels.triton.batching import over_batch
from tilewright.kernels.weight_only.inputs import WeightOnlyInputs
from tilewright.kernels.weight_only.triton.params import (
    TritonWeightOnlyParams,
    candidates,
    fits_groups,
    fitted_span,
    footprint,
)
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.datacarrier import BwdParams

MAX_INT32 = (1 << 31) - 1

GROUP_ROWS = 8
"""Tiles of rows whose programs are beside each other for the same columns of the weight."""


type Params = TritonWeightOnlyParams | BwdParams


class TritonWeightOnly(Backend[WeightOnlyInputs, jax.Array, TritonWeightOnlyParams, BwdParams]):
    """Serves float16 and bfloat16 forward; sums are in float32, in one order."""

    name: ClassVar[str] = "triton"
    platform: ClassVar[Platform] = Platform.TRITON
    forward_params: ClassVar[type] = TritonWeightOnlyParams
    late_import: ClassVar[str] = "triton"
    keeps_lowering: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset({"zeros", "order"})

    def reasons(self, inputs: WeightOnlyInputs, device: Device, direction: Direction) -> list[str]:
        reasons = unavailable(device)
        if direction == "backward":
            reasons.append("it has no backward pass")
        if inputs.x.dtype.name not in ("float16", "bfloat16"):
            reasons.append(f"x must be float16 or bfloat16, got {inputs.x.dtype}")
        if inputs.out_dtype not in ("float16", "bfloat16", "float32"):
            reasons.append(f"the result must be float16, bfloat16 or float32, got {inputs.out_dtype}")
        if inputs.format != "mxfp4" and inputs.scales.dtype.name not in ("float16", "bfloat16", "float32"):
            reasons.append(f"scales must be float16, bfloat16 or float32, got {inputs.scales.dtype}")
        if not fits_groups(inputs):
            unit = inputs.packing.unit
            reasons.append(f"group must be {unit // 2}, a multiple of {unit}, or None, got {inputs.group}")
        if 0 in (*inputs.x.shape, *inputs.codes.shape):
            reasons.append(f"its kernel needs elements, got {inputs.x.shape=}, {inputs.codes.shape=}")
        elif inputs.k * inputs.n > MAX_INT32 or inputs.rows > MAX_INT32:
            reasons.append(
                f"rows and elements of the weight must be counted by 32 bits, got k={inputs.k}, n={inputs.n}"
            )
        return reasons

    def candidates(
        self, inputs: WeightOnlyInputs, device: Device, direction: Direction
    ) -> Iterable[TritonWeightOnlyParams]:
        listed = candidates(inputs, device)
        return [each for each in listed if not launch_reasons([footprint(inputs, each)], device)] or listed[-1:]

    def config_reasons(
        self, inputs: WeightOnlyInputs, device: Device, direction: Direction, params: Params
    ) -> list[str]:
        return launch_reasons(self.footprints(inputs, device, direction, params), device)

    def footprints(
        self, inputs: WeightOnlyInputs, device: Device, direction: Direction, params: Params
    ) -> Sequence[Footprint]:
        return [footprint(inputs, params)] if isinstance(params, TritonWeightOnlyParams) else []

    def forward(self, inputs: WeightOnlyInputs, params: TritonWeightOnlyParams) -> jax.Array:
        x = inputs.ordered.reshape(1, inputs.rows, inputs.k)
        weight = tuple(None if each is None else each[None] for each in (inputs.codes, inputs.scales, inputs.zeros))
        run = functools.partial(_launch, inputs.structs, params)
        return over_batch(run, [x], weight).reshape(inputs.out_shape)

    def backward(
        self, inputs: WeightOnlyInputs, results: Any, cotangents: jax.Array, params: BwdParams
    ) -> dict[str, jax.Array]:
        raise NotImplementedError("declined by its reasons")


def _launch(
    inputs: WeightOnlyInputs, params: TritonWeightOnlyParams, mapped: Sequence[jax.Array], weight: Sequence[Any]
) -> jax.Array:
    """``[batch, rows, n]``, of rows and weights of a batch; the weight may be one for all."""
    from tilewright.kernels.weight_only.triton import elements, kernels

    (x,), (codes, scales, zeros) = mapped, weight
    batch, rows, k = x.shape
    dtype, planes = x.dtype.name, inputs.packing.planes
    assembly = [elements.assembly(inputs.format, dtype, plane) for plane in range(planes)] + [""] * (4 - planes)
    splits = params.splits
    out_dtype = inputs.out_dtype if splits == 1 else "float32"
    (out,) = launch(
        kernels.rows_by_packed,
        [x, codes, scales, jnp.zeros((0,), jnp.int16) if zeros is None else zeros],
        [jax.ShapeDtypeStruct((batch, splits, rows, inputs.n), out_dtype)],
        grid=[-(-rows // params.rows) * -(-inputs.n // params.columns), splits, batch],
        scalars={"M": rows},
        constants={
            "K": k,
            "N": inputs.n,
            "UNIT": inputs.packing.unit,
            "GROUP": inputs.group or 0,
            "ZERO": elements.zero_offset(inputs.format, dtype),
            "HAS_ZEROS": zeros is not None,
            "E8M0": inputs.format == "mxfp4",
            "SHARED": codes.shape[0] == 1,
            **{f"ASM_{plane}": text for plane, text in enumerate(assembly)},
            "OPERAND_SCALES": params.operand_scales,
            "SPAN": fitted_span(inputs, params.span),
            "SPANS": params.spans,
            "SPLITS": splits,
            "BLOCK_M": params.rows,
            "BLOCK_N": params.columns,
            "GROUP_M": GROUP_ROWS,
            "STAGES": params.num_stages,
        },
        num_warps=params.num_warps,
        num_stages=params.num_stages,
    )
    # Added one after another, in one order: a reduction of XLA's may be in any.
    total = out[:, 0]
    for part in range(1, splits):
        total = total + out[:, part]
    return total.astype(inputs.out_dtype)
