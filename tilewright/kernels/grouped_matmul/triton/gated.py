"""The Triton backend of the gated grouped matmul, on NVIDIA GPUs from Ampere on."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tilewright.kernels.grouped_matmul.gated_inputs import GatedInputs, GatedResults
from tilewright.kernels.grouped_matmul.groups import matrix_bounds, row_segments, row_tiles
from tilewright.kernels.grouped_matmul.triton.backend import DTYPES, GROUP, MAX_INT32, outer_products, over_batch
from tilewright.kernels.grouped_matmul.triton.gated_params import (
    GatedParams,
    TritonGatedBackwardParams,
    TritonGatedForwardParams,
    footprints,
    listed_params,
)
from tilewright.kernels.numerics.activations import gated_gradients, kept_apart
from tilewright.kernels.op.backend import Implementation
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.op.footprint import Footprint, launch_reasons
from tilewright.kernels.triton import launch, unavailable
from tilewright.kernels.triton.matmul import TritonTile, fitted, tl_precision
from tilewright.ops.types import Device, Direction


class TritonGatedGroupedMatmul(Implementation[GatedInputs, Any, TritonGatedForwardParams, TritonGatedBackwardParams]):
    """Serves float16, bfloat16 and float32 of one dtype: forward in one kernel, which reads the rows once."""

    platform: ClassVar[Platform] = Platform.TRITON
    forward_params: ClassVar[type] = TritonGatedForwardParams
    backward_params: ClassVar[type] = TritonGatedBackwardParams
    late_import: ClassVar[str] = "triton"
    serves: ClassVar[frozenset[str]] = frozenset({"group_offset"})

    def reasons(self, inputs: GatedInputs, device: Device, direction: Direction) -> list[str]:
        reasons = unavailable(device)
        dtypes = {"lhs": inputs.lhs.dtype, "gate": inputs.gate.dtype, "up": inputs.up.dtype}
        reasons += [f"{name} must be one of {DTYPES}, got {x}" for name, x in dtypes.items() if x.name not in DTYPES]
        if len(set(dtypes.values())) > 1:
            reasons.append(f"all must have one dtype, got {', '.join(f'{name} {x}' for name, x in dtypes.items())}")
        if inputs.k * inputs.n > MAX_INT32:
            reasons.append(f"elements of a matrix must be counted by 32 bits, got {inputs.k=}, {inputs.n=}")
        return reasons

    def candidates(self, inputs: GatedInputs, device: Device, direction: Direction) -> Iterable[GatedParams]:
        listed = listed_params(inputs, device, direction)
        fitting = [params for params in listed if not launch_reasons(footprints(inputs, params), device)]
        return fitting or listed[:1]

    def footprints(
        self, inputs: GatedInputs, device: Device, direction: Direction, params: GatedParams
    ) -> Sequence[Footprint]:
        return footprints(inputs, params)

    def forward(self, inputs: GatedInputs, params: TritonGatedForwardParams) -> GatedResults:
        if inputs.is_empty:
            zeros = jnp.zeros(inputs.out_shape, inputs.out_dtype)
            return zeros, zeros, zeros
        run = functools.partial(_launch_forward, params.tile, inputs.activation, inputs.keeps, tl_precision())
        mapped = [each[None] for each in (inputs.lhs, *_segments(inputs))]
        results = over_batch(run, mapped, (inputs.gate[None], inputs.up[None]))
        out, gate, up = (*(x[0] for x in results), None, None)[:3]
        return out, gate, up

    def backward(
        self, inputs: GatedInputs, results: Any, cotangents: jax.Array, params: TritonGatedBackwardParams
    ) -> dict[str, Any]:
        """Gradients of lhs, gate and up, of those that are used, from both pre-activations."""
        if inputs.is_empty:
            return {name: jnp.zeros_like(getattr(inputs, name)) for name in ("lhs", "gate", "up")}
        if params.recompute is not None:
            forward = TritonGatedForwardParams(params.recompute)
            results = self.forward(kept_apart(inputs, cotangents), forward)[1:]
        # What XLA computes here is bound by memory, and rows without a matrix may get NaN: no kernel below reads these.
        d_both = gated_gradients(inputs.activation, results[0], results[1], cotangents, jnp.float32)
        gradients = {}
        if inputs.wants("lhs"):
            run = functools.partial(_launch_gradient_of_rows, params.lhs, tl_precision())
            mapped = [each[None] for each in (*d_both, *_segments(inputs))]
            gradients["lhs"] = over_batch(run, mapped, (inputs.gate[None], inputs.up[None]))[0]
        for name, d in zip(("gate", "up"), d_both, strict=True):
            if inputs.wants(name):
                gradients[name] = outer_products(inputs.product(getattr(inputs, name)), d, params.rhs)
        return gradients


def _segments(inputs: GatedInputs) -> tuple[jax.Array, jax.Array, jax.Array]:
    size, matrices = inputs.lhs.shape[0], inputs.gate.shape[0]
    bounds = matrix_bounds(inputs.group_sizes, inputs.group_offset, size, matrices)
    return row_segments(*bounds, size, inputs.group_offset is not None)


def _schedule(
    segments: Sequence[jax.Array], batch: int, size: int, matrices: jax.Array, block_rows: int
) -> tuple[jax.Array, ...]:
    """Matrix, first row and the row behind the segment of each tile of a batch."""
    starts, ends, which = segments
    index = jnp.arange(batch, dtype=jnp.int32)[:, None]
    if matrices.shape[0] > 1:
        which = jnp.where(which < 0, which, which + index * matrices.shape[1])
    flat = (starts + index * size).ravel(), (ends + index * size).ravel(), which.ravel()
    _, *schedule = row_tiles(*flat, batch * size, block_rows)
    return tuple(schedule)


def _launch_forward(
    tile: TritonTile, activation: str, keeps: bool, precision: str, mapped: Sequence[jax.Array],
    matrices: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, ...]:  # fmt: skip
    """``[batch, rows, columns]`` of the output, and of the pre-activations if they are kept."""
    from tilewright.kernels.grouped_matmul.triton import gated_kernels

    rows, *segments = mapped
    batch, size, depth = rows.shape
    columns = matrices[0].shape[3]
    tile = fitted(tile, columns, depth)
    schedule = _schedule(segments, batch, size, matrices[0], tile.rows)
    tiles = schedule[0].shape[0]
    shape = (batch, size, columns)
    results = launch(
        gated_kernels.gated_rows_by_matrices,
        [rows, *matrices, *schedule],
        [jax.ShapeDtypeStruct(each, rows.dtype) for each in (shape, *(shape if keeps else (0,),) * 2)],
        grid=[tiles * -(-columns // tile.columns)],
        scalars={"tiles": tiles},
        constants={
            "K": depth,
            "N": columns,
            "BLOCK_ROWS": tile.rows,
            "BLOCK_N": tile.columns,
            "BLOCK_K": tile.depth,
            "GROUP": GROUP,
            "ACTIVATION": activation,
            "KEEP": keeps,
            "PRECISION": precision,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return results if keeps else results[:1]


def _launch_gradient_of_rows(
    tile: TritonTile, precision: str, mapped: Sequence[jax.Array], matrices: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """``[batch, rows, k]``."""
    from tilewright.kernels.grouped_matmul.triton import gated_kernels

    d_gate, d_up, *segments = mapped
    batch, size, depth = d_gate.shape
    columns = matrices[0].shape[2]
    tile = fitted(tile, columns, depth)
    schedule = _schedule(segments, batch, size, matrices[0], tile.rows)
    tiles = schedule[0].shape[0]
    (out,) = launch(
        gated_kernels.gradient_of_rows,
        [d_gate, d_up, *matrices, *schedule],
        [jax.ShapeDtypeStruct((batch, size, columns), d_gate.dtype)],
        grid=[tiles * -(-columns // tile.columns)],
        scalars={"tiles": tiles},
        constants={
            "K": columns,
            "N": depth,
            "BLOCK_ROWS": tile.rows,
            "BLOCK_K": tile.columns,
            "BLOCK_N": tile.depth,
            "GROUP": GROUP,
            "PRECISION": precision,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out
