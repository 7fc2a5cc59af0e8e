"""The Triton backend of the norms, on NVIDIA GPUs: one pass over memory forward, one backward."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tilewright.kernels.norms.inputs import NormInputs, NormResults, normed
from tilewright.kernels.norms.triton.params import (
    VECTOR_BYTES,
    NormBackwardParams,
    NormForwardParams,
    backward_params,
    candidates,
    footprint,
    forward_params,
    kept_elements,
    params_reasons,
)
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.op.footprint import Footprint, launch_reasons
from tilewright.kernels.triton import launch, unavailable
from tilewright.kernels.triton.batching import over_batch
from tilewright.kernels.triton.limits import power_of_two
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.device import current_device

MAX_ROWS = 1 << 30
"""Largest number of rows: kernels count them in 32 bits."""

EVICTION = {"forward": "", "backward": "evict_first"}
"""Cache hints of loads of rows. "evict_first" forward: 188 µs instead of 182 for 16384 × 8192 bfloat16 on an H100."""

MAX_UNPACKED = {"forward": 32, "backward": 20}
"""Elements of rows that a thread may hold in float32; if it has more, 16-bit ones stay packed."""

type Params = NormForwardParams | NormBackwardParams


class TritonNorm(Backend[NormInputs, NormResults, NormForwardParams, NormBackwardParams]):
    """Serves float16, bfloat16 and float32; sums are in float32, in one order."""

    name: ClassVar[str] = "triton"
    platform: ClassVar[Platform] = Platform.TRITON
    forward_params: ClassVar[type] = NormForwardParams
    backward_params: ClassVar[type] = NormBackwardParams
    late_import: ClassVar[str] = "triton"
    keeps_lowering: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset({"residual", "weight", "bias", "eps", "weight_offset"})

    def reasons(self, inputs: NormInputs, device: Device, direction: Direction) -> list[str]:
        reasons = unavailable(device)
        for name in ("x", "weight", "bias"):
            x = inputs.arrays[name]
            if x is not None and x.dtype.name not in ("float16", "bfloat16", "float32"):
                reasons.append(f"{name} must be float16, bfloat16 or float32, not {x.dtype}")
        if inputs.rows > MAX_ROWS:
            reasons.append(f"rows={inputs.rows} must be at most {MAX_ROWS}")
        if 0 in inputs.x.shape:
            reasons.append(f"its kernels need elements, got x of the shape {inputs.x.shape}")
        return reasons

    def heuristic(self, inputs: NormInputs, device: Device, direction: Direction) -> Params:
        return forward_params(inputs, device) if direction == "forward" else backward_params(inputs, device)

    def candidates(self, inputs: NormInputs, device: Device, direction: Direction) -> Iterable[Params]:
        return candidates(inputs, device, direction)

    def config_reasons(self, inputs: NormInputs, device: Device, direction: Direction, params: Params) -> list[str]:
        footprints = self.footprints(inputs, device, direction, params)
        return params_reasons(inputs, direction, params) + launch_reasons(footprints, device)

    def footprints(
        self, inputs: NormInputs, device: Device, direction: Direction, params: Params
    ) -> Sequence[Footprint]:
        return [footprint(inputs, direction, params)]

    def forward(self, inputs: NormInputs, params: NormForwardParams) -> NormResults:
        shape, columns = inputs.x.shape, inputs.x.shape[-1]
        by_row = [None if x is None else x.reshape(1, inputs.rows, columns) for x in (inputs.x, inputs.residual)]
        shared = [None if x is None else x[None] for x in (inputs.weight, inputs.bias)]
        call = functools.partial(_forward, options=inputs.options, params=params)
        out, total = over_batch(call, by_row, shared)
        return NormResults(out.reshape(shape), None if total is None else total.reshape(shape))

    def backward(
        self, inputs: NormInputs, results: NormResults, cotangents: NormResults, params: NormBackwardParams
    ) -> dict[str, Any]:
        """Gradients by name; those of x and of the residual are the same array."""
        shape, columns = inputs.x.shape, inputs.x.shape[-1]
        arrays = (normed(inputs, results), cotangents.out, cotangents.total)
        by_row = [None if x is None else x.reshape(1, inputs.rows, columns) for x in arrays]
        shared = [None if x is None else x[None] for x in (inputs.weight, inputs.bias)]
        call = functools.partial(_backward, options=inputs.options, params=params)
        d_x, d_weight, d_bias = over_batch(call, by_row, shared)
        gradients = {"x": d_x.reshape(shape)}
        if inputs.residual is not None:
            gradients["residual"] = gradients["x"]
        if inputs.weight is not None:
            gradients["weight"] = d_weight[0]
        if inputs.bias is not None:
            gradients["bias"] = d_bias[0]
        return gradients


def _packed(x: jax.Array, params: Params, direction: Direction) -> bool:
    """True if threads hold 16-bit rows as they are stored: in float32 they would not fit into registers."""
    return x.dtype.itemsize == 2 and kept_elements(NormInputs(x, "rms"), params) > MAX_UNPACKED[direction]


def _struct(shape: tuple[int, ...], dtype: object, present: bool = True) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an output; without elements if it is not ``present``."""
    return jax.ShapeDtypeStruct(shape if present else (0,), dtype)


def _forward(by_row: Any, shared: Any, options: dict[str, Any], params: NormForwardParams) -> Any:
    """``(out, total)``, [groups, rows, columns] each; total is None without a residual."""
    from tilewright.kernels.norms.triton import kernels

    (x, residual), (weight, bias) = by_row, shared
    shape = x.shape
    # Groups that share weight and bias are one group of more rows.
    if all(array.shape[0] == 1 for array in jax.tree.leaves(shared)):
        x, residual = jax.tree.map(lambda array: array.reshape(1, shape[0] * shape[1], shape[2]), (x, residual))
    groups, rows, columns = x.shape
    # Params were chosen for one group before vmap.
    if shape[0] > 1:
        inputs = NormInputs(x, residual=residual, weight=weight, bias=bias, **options)
        params = forward_params(inputs, current_device())
    absent = jnp.zeros((0,), x.dtype)
    tiles = -(-rows // params.rows_per_program)
    one_pass = {"even": rows % params.rows_per_program == 0, "packed": _packed(x, params, "forward")}
    one_pass |= {"eviction": EVICTION["forward"]}
    out, total = launch(
        kernels.forward if params.passes == 1 else kernels.forward_wide,
        [x, *(absent if array is None else array for array in (residual, weight, bias))],
        [_struct(x.shape, x.dtype), _struct(x.shape, x.dtype, residual is not None)],
        grid=[groups * tiles],
        scalars={"rows": rows, "tiles": tiles},
        constants={
            "columns": columns,
            "block_rows": params.rows_per_program,
            "block_columns": params.block_columns,
            "layer": options["kind"] == "layer",
            "has_residual": residual is not None,
            "has_weight": weight is not None,
            "has_bias": bias is not None,
            "eps": float(options["eps"]),
            "weight_offset": float(options["weight_offset"]),
            "weight_stride": columns if groups > 1 else 0,
        }
        | (one_pass if params.passes == 1 else {}),
        num_warps=params.num_warps,
        num_stages=2,
    )
    return out.reshape(shape), None if residual is None else total.reshape(shape)


def _backward(by_row: Any, shared: Any, options: dict[str, Any], params: NormBackwardParams) -> Any:
    """``(d_x, d_weight, d_bias)``: [groups, rows, columns], then [groups, columns] or None without such an input."""
    from tilewright.kernels.norms.triton import kernels

    (x, d_out, d_total), (weight, bias) = by_row, shared
    groups, rows, columns = x.shape
    if groups > 1:
        params = backward_params(NormInputs(x, weight=weight, bias=bias, **options), current_device())
    tiles = -(-rows // params.rows_per_program)
    programs = max(min(params.num_programs // groups, tiles), 1)
    whole, layer, f32 = params.passes == 1, options["kind"] == "layer", jnp.float32
    absent = jnp.zeros((0,), f32)
    weight_stride = 0 if weight is None or weight.shape[0] == 1 else columns
    common = {
        "columns": columns,
        "layer": layer,
        "has_weight": weight is not None,
        "eps": float(options["eps"]),
        "weight_offset": float(options["weight_offset"]),
        "weight_stride": weight_stride,
    }
    scale = absent if weight is None else weight
    statistics = absent if whole else _row_statistics(x, scale, d_out, common)
    partials = (groups, programs, columns)
    d_x, d_weight, d_bias = launch(
        kernels.backward,
        [x, scale, d_out, absent if d_total is None else d_total, statistics],
        [
            _struct(x.shape, x.dtype),
            *(
                _struct(partials, f32, False)
                if array is None
                else _struct(partials, f32 if programs > 1 else array.dtype)
                for array in (weight, bias)
            ),
        ],
        grid=[groups * programs, 1 if whole else -(-columns // params.block_columns)],
        scalars={"rows": rows, "programs": programs},
        constants=common
        | {
            "grouped": groups > 1,
            "block_rows": params.rows_per_program,
            "block_columns": params.block_columns,
            "whole": whole,
            "even": rows % params.rows_per_program == 0,
            "packed": whole and _packed(x, params, "backward"),
            "eviction": EVICTION["backward"],
            "has_bias": bias is not None,
            "has_d_total": d_total is not None,
            "stages": params.num_stages,
        },
        num_warps=params.num_warps,
        num_stages=params.num_stages,
    )
    given = weight is not None, bias is not None
    # One program has written the sums themselves, in their own dtypes.
    if programs > 1 and any(given):
        d_weight, d_bias = _sum_partials(d_weight, d_bias, weight, bias)
    gradients = zip((d_weight, d_bias), given, strict=True)
    return d_x, *(gradient.reshape(groups, columns) if is_given else None for gradient, is_given in gradients)


def _row_statistics(x: jax.Array, scale: jax.Array | None, d_out: jax.Array, constants: dict[str, Any]) -> Any:
    """Statistics of rows for the backward kernel, float32 [5, groups, rows], where it works on blocks of columns."""
    from tilewright.kernels.norms.triton import kernels

    groups, rows, _ = x.shape
    (statistics,) = launch(
        kernels.row_statistics,
        [x, scale, d_out],
        [_struct((5, groups, rows), jnp.float32)],
        grid=[groups * rows],
        scalars={"rows": rows},
        # One load for each of the 512 threads.
        constants=constants | {"block_columns": 512 * VECTOR_BYTES // x.dtype.itemsize},
        num_warps=16,
    )
    return statistics


def _sum_partials(
    weight_parts: jax.Array, bias_parts: jax.Array, weight: jax.Array | None, bias: jax.Array | None
) -> Any:
    """Gradients of weight and bias, from the programs' partial sums [groups, programs, columns]."""
    from tilewright.kernels.norms.triton import kernels

    groups, programs, columns = (bias_parts if weight is None else weight_parts).shape
    block_columns = min(max(power_of_two(columns) // 256, 16), 64)
    return launch(
        kernels.sum_partials,
        [weight_parts, bias_parts],
        [
            _struct((groups, columns), jnp.float32, False) if array is None else _struct((groups, columns), array.dtype)
            for array in (weight, bias)
        ],
        grid=[-(-columns // block_columns), groups],
        constants={
            "columns": columns,
            "programs": programs,
            "block_programs": min(power_of_two(programs), 4096 // block_columns),
            "block_columns": block_columns,
            "has_weight": weight is not None,
            "has_bias": bias is not None,
        },
        num_warps=8,
    )
