"""The split of a dense matmul over explicit mesh axes: by rows, k and n, each by axes of its own."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from tilewright.kernels.matmul.inputs import GluInputs, MatmulInputs
from tilewright.kernels.numerics.dots import accumulator
from tilewright.kernels.op.sharding import (
    GradientParts,
    Partitioning,
    axis_names,
    explicit_mesh,
    typed_axes,
    typed_spec,
)


def matmul_partitioning(inputs: MatmulInputs) -> Partitioning | None:
    """The partitioning that the types of the arrays imply; ``None`` without explicit axes.

    Partial results of parts of k are summed over the devices before they are rounded.

    Raises:
      ValueError: two dimensions are split by the same axis, or k in two ways.
    """
    lhs, rhs = inputs.lhs, inputs.rhs
    mesh = explicit_mesh(lhs, rhs)
    if mesh is None:
        return None
    k_axis, rhs_axis = inputs.k_axes
    rows, of_rhs = list(typed_axes(lhs)), typed_axes(rhs)
    k = _common(rows.pop(k_axis), of_rhs[rhs_axis], {"lhs": lhs, "rhs": rhs})
    n = of_rhs[1 - rhs_axis]
    _check_distinct((*rows, k, n), {"lhs": lhs, "rhs": rhs})
    lhs_axes = [*rows]
    lhs_axes.insert(k_axis, k)
    of_lhs = PartitionSpec(*lhs_axes)
    of_matrix = PartitionSpec(*((n, k) if rhs_axis else (k, n)))
    summed, row_names = axis_names(k), tuple(name for axes in rows for name in axis_names(axes))
    wide = accumulator(lhs.dtype, rhs.dtype, inputs.out_dtype)
    return Partitioning(
        mesh=mesh,
        inputs=inputs.replace(lhs=of_lhs, rhs=of_matrix),
        results=PartitionSpec(*rows, n),
        gradients={
            "lhs": GradientParts(of_lhs, axis_names(n), typed_spec(lhs)),
            "rhs": GradientParts(of_matrix, row_names, typed_spec(rhs)),
        },
        on_part=lambda part: part.replace(out_dtype=wide.name) if summed else part,
        on_results=lambda out: jax.lax.psum(out, summed).astype(inputs.out_dtype) if summed else out,
    )


def glu_partitioning(inputs: GluInputs) -> Partitioning | None:
    """The same for a gated linear unit, whose k must be whole: an activation needs the whole sum.

    Raises:
      ValueError: k is split, or gate and up in two ways, or two dimensions are split by the same axis.
    """
    arrays = {"x": inputs.x, "gate": inputs.gate, "up": inputs.up}
    mesh = explicit_mesh(*arrays.values())
    if mesh is None:
        return None
    *rows, k = typed_axes(inputs.x)
    (gate_k, n), of_up = typed_axes(inputs.gate), typed_axes(inputs.up)
    if of_up != (gate_k, n) or k is not None or gate_k is not None:
        raise ValueError(f"gate and up must be split alike, and k be whole ({_described(arrays)}); reshard them first")
    _check_distinct((*rows, n), arrays)
    of_x, of_matrix = PartitionSpec(*rows, None), PartitionSpec(None, n)
    row_names = tuple(name for axes in rows for name in axis_names(axes))
    return Partitioning(
        mesh=mesh,
        inputs=inputs.replace(x=of_x, gate=of_matrix, up=of_matrix),
        results=PartitionSpec(*rows, n),
        gradients={
            "x": GradientParts(of_x, axis_names(n), typed_spec(inputs.x)),
            "gate": GradientParts(of_matrix, row_names, typed_spec(inputs.gate)),
            "up": GradientParts(of_matrix, row_names, typed_spec(inputs.up)),
        },
    )


def _common(k: Any, other_k: Any, arrays: dict[str, jax.Array]) -> Any:
    if None not in (k, other_k) and k != other_k:
        raise ValueError(f"k must be split alike, or be whole in one operand ({_described(arrays)}); reshard it first")
    return k or other_k


def _check_distinct(dimensions: Sequence[Any], arrays: dict[str, jax.Array]) -> None:
    used = [name for axes in dimensions for name in axis_names(axes)]
    if len(set(used)) < len(used):
        raise ValueError(f"dimensions must be split by different axes ({_described(arrays)}); reshard an operand first")


def _described(arrays: dict[str, jax.Array]) -> str:
    return ", ".join(f"{name}: {typed_spec(array)}" for name, array in arrays.items())
