"""The split of a grouped matmul over explicit mesh axes: by rows, k, n and matrices, each by axes of its own."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from tilewright.kernels.grouped_matmul.gated_inputs import GatedInputs
from tilewright.kernels.grouped_matmul.groups import row_bounds
from tilewright.kernels.grouped_matmul.inputs import SCALE_BLOCK, GroupedInputs
from tilewright.kernels.numerics.dots import accumulator
from tilewright.kernels.op.sharding import (
    GradientParts,
    Partitioning,
    axis_names,
    explicit_mesh,
    typed_axes,
    typed_spec,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """The mesh axes, in the form of an entry of a ``PartitionSpec``, that split each dimension."""

    rows: Any
    k: Any
    n: Any
    matrices: Any

    def matrix_spec(self, transposed: bool) -> PartitionSpec:
        return PartitionSpec(self.matrices, *((self.n, self.k) if transposed else (self.k, self.n)))


def grouped_partitioning(inputs: GroupedInputs) -> Partitioning | None:
    """The partitioning that the types of the arrays imply; ``None`` without explicit axes.

    Partial results of parts of k, and rows that only one device has matrices for, are summed over the devices.

    Raises:
      ValueError: two dimensions are split by the same axis, or one in two ways.
    """
    lhs, rhs, transposed = inputs.lhs, inputs.rhs, inputs.transpose_rhs
    mesh = explicit_mesh(lhs, rhs)
    if mesh is None:
        return None
    split = _split(lhs, "rhs", rhs, transposed)
    _check_scales(inputs, split, mesh.shape)
    rows, matrices = PartitionSpec(split.rows, split.k), split.matrix_spec(transposed)
    whole, result = PartitionSpec(), PartitionSpec(split.rows, split.n)
    summed = axis_names(split.k) + axis_names(split.matrices)
    wide = accumulator(lhs.dtype, rhs.dtype, inputs.out_dtype)

    def on_part(part: GroupedInputs) -> GroupedInputs:
        part = _on_part(part, split, part.rhs.shape[0])
        return part.replace(out_dtype=wide.name) if split.k is not None else part

    def on_results(out: jax.Array) -> jax.Array:
        return (lax.psum(out, summed) if summed else out).astype(inputs.out_dtype)

    specs = inputs.replace(
        lhs=rows,
        rhs=matrices,
        group_sizes=whole,
        group_offset=None if inputs.group_offset is None else whole,
        lhs_scale=_scale_spec(inputs.lhs_scale, rows),
        rhs_scale=_scale_spec(inputs.rhs_scale, matrices),
    )
    return Partitioning(
        mesh=mesh,
        inputs=specs,
        results=result,
        gradients={
            "lhs": _of_rows(split, rows, lhs),
            "rhs": GradientParts(matrices, axis_names(split.rows), typed_spec(rhs)),
        },
        on_part=on_part,
        on_results=on_results,
        shared_with_xla=False,
    )


def gated_partitioning(inputs: GatedInputs) -> Partitioning | None:
    """The same for the gated grouped matmul, whose k must be whole: an activation needs the whole sum.

    Raises:
      ValueError: k is split, or gate and up in two ways, or two dimensions are split by the same axis.
    """
    mesh = explicit_mesh(inputs.lhs, inputs.gate, inputs.up)
    if mesh is None:
        return None
    splits = [_split(inputs.lhs, name, x, False) for name, x in (("gate", inputs.gate), ("up", inputs.up))]
    split = splits[0]
    if split != splits[1] or split.k is not None:
        specs = ", ".join(f"{name}: {typed_spec(getattr(inputs, name))}" for name in ("lhs", "gate", "up"))
        raise ValueError(f"gate and up must be split alike, and k be whole ({specs}); reshard them first")
    rows, matrices, whole = PartitionSpec(split.rows, None), split.matrix_spec(False), PartitionSpec()
    summed = axis_names(split.matrices)
    of_matrices = axis_names(split.rows)
    return Partitioning(
        mesh=mesh,
        inputs=inputs.replace(
            lhs=rows,
            gate=matrices,
            up=matrices,
            group_sizes=whole,
            group_offset=None if inputs.group_offset is None else whole,
        ),
        results=PartitionSpec(split.rows, split.n),
        gradients={
            "lhs": _of_rows(split, rows, inputs.lhs),
            "gate": GradientParts(matrices, of_matrices, typed_spec(inputs.gate)),
            "up": GradientParts(matrices, of_matrices, typed_spec(inputs.up)),
        },
        on_part=lambda part: _on_part(part, split, part.gate.shape[0]),
        on_results=lambda results: jax.lax.psum(results, summed) if summed else results,
        shared_with_xla=False,
    )


def _of_rows(split: Split, rows: PartitionSpec, lhs: jax.Array) -> GradientParts:
    """The gradient of the rows, of which each has a matrix on one device alone."""
    summed = axis_names(split.n) + axis_names(split.matrices)
    return GradientParts(rows, summed, typed_spec(lhs), disjoint=split.n is None)


def _on_part[T: (GroupedInputs, GatedInputs)](part: T, split: Split, matrices: int) -> T:
    """A device's part with the sizes of its rows' groups, and the group of its first matrix."""
    if split.rows is not None:
        part = part.replace(group_sizes=_sizes_of_part(part, split.rows))
    if split.matrices is not None:
        first = lax.axis_index(axis_names(split.matrices)).astype(jnp.int32) * matrices
        part = part.replace(group_offset=first if part.group_offset is None else part.group_offset + first)
    return part


def _sizes_of_part(part: GroupedInputs | GatedInputs, axes: Any) -> jax.Array:
    """The group sizes of a device's rows, from those of all rows."""
    rows, names = part.lhs.shape[0], axis_names(axes)
    bounds = row_bounds(part.group_sizes, rows * lax.axis_size(names))
    first = lax.axis_index(names).astype(jnp.int32) * rows
    starts, ends = (jnp.clip(bound - first, 0, rows) for bound in bounds)
    return ends - starts


def _split(lhs: jax.Array, name: str, matrices: jax.Array, transposed: bool) -> Split:
    described = f"lhs: {typed_spec(lhs)}, {name}: {typed_spec(matrices)}"
    rows, k = typed_axes(lhs)
    of_matrices, *last = typed_axes(matrices)
    n, other_k = last if transposed else reversed(last)
    if None not in (k, other_k) and k != other_k:
        raise ValueError(f"k must be split alike in lhs and {name}, or be whole in one ({described}); reshard it first")
    split = Split(rows, k or other_k, n, of_matrices)
    used: Sequence[str] = [name for axes in (split.rows, split.k, n, of_matrices) for name in axis_names(axes)]
    if len(set(used)) < len(used):
        raise ValueError(f"rows, k, n and matrices must be split by different axes ({described}); reshard one first")
    return split


def _check_scales(inputs: GroupedInputs, split: Split, sizes: Any) -> None:
    """Raises unless each device gets whole blocks of an operand with scales for blocks."""
    n = inputs.out_shape[1]
    for name, scale, dimensions in (
        ("lhs_scale", inputs.lhs_scale, {"k": (split.k, inputs.lhs.shape[1])}),
        ("rhs_scale", inputs.rhs_scale, {"k": (split.k, inputs.lhs.shape[1]), "n": (split.n, n)}),
    ):
        for dimension, (axes, size) in dimensions.items():
            devices = math.prod(sizes[axis] for axis in axis_names(axes))
            if scale is not None and scale.ndim and devices > 1 and size % (SCALE_BLOCK * devices):
                raise ValueError(
                    f"{name} has a scale for {SCALE_BLOCK} elements, so {dimension}={size} cannot be split among "
                    f"{devices} devices; reshard it first"
                )


def _scale_spec(scale: Any, spec: PartitionSpec) -> PartitionSpec | None:
    if scale is None:
        return None
    return spec if scale.ndim else PartitionSpec()
