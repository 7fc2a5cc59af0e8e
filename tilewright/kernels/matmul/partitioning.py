"""The split of a matmul over explicit mesh axes: by rows, k, n and matrices, each by axes of its own."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from tilewright.kernels.matmul.groups import row_bounds
from tilewright.kernels.matmul.inputs import SCALE_BLOCK, MatmulInputs
from tilewright.kernels.op.sharding import (
    GradientParts,
    Partitioning,
    axis_names,
    explicit_mesh,
    typed_axes,
    typed_spec,
)

_WHOLE = PartitionSpec()


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """The mesh axes, in the form of an entry of a ``PartitionSpec``, that split each dimension.

    Attributes:
      rows: of each leading dimension of the result.
      matrices: ``None`` without groups, too.
    """

    rows: tuple[Any, ...]
    k: Any
    n: Any
    matrices: Any

    @property
    def row_names(self) -> tuple[str, ...]:
        return tuple(name for axes in self.rows for name in axis_names(axes))

    def lhs_spec(self, inputs: MatmulInputs) -> PartitionSpec:
        axes = [*self.rows]
        axes.insert(inputs.k_axes[0], self.k)
        return PartitionSpec(*axes)

    def matrix_spec(self, inputs: MatmulInputs) -> PartitionSpec:
        stacked = [] if inputs.group_sizes is None else [self.matrices]
        return PartitionSpec(*stacked, *((self.n, self.k) if inputs.transpose_rhs else (self.k, self.n)))


def matmul_partitioning(inputs: MatmulInputs) -> Partitioning | None:
    """The partitioning that the types of the arrays imply; ``None`` without explicit axes.

    Over axes that split the rows, too, the matrices are gathered, and their gradients are split again. Partial results
    of parts of k, and rows that only one device has matrices for, are summed over the devices. Of a gated op k must be
    whole: an activation needs the whole sum.

    Raises:
      ValueError: two dimensions are split by the same axis, or one in two ways, or k of a gated op is split.
    """
    mesh = explicit_mesh(*inputs.operands.values())
    if mesh is None:
        return None
    split = _split(inputs)
    _check_scales(inputs, split, mesh.shape)
    rows, matrices = split.lhs_spec(inputs), split.matrix_spec(inputs)
    # Where matrices are split, a row is zero on all devices but the one that has its matrix.
    summed = axis_names(split.k) + axis_names(split.matrices)

    def on_part(part: MatmulInputs) -> MatmulInputs:
        part = _on_part(part, split)
        # Sums over a part of k stay in the dtype of the accumulator: `on_results` adds them up before it rounds.
        return part.replace(out_dtype=inputs.accumulator.name) if split.k is not None else part

    def on_results(results: Any) -> Any:
        results = lax.psum(results, summed) if summed else results
        return jax.tree.map(lambda x: x.astype(inputs.out_dtype), results)

    weights = dict.fromkeys(inputs.weights, matrices)
    return Partitioning(
        mesh=mesh,
        inputs=inputs.replace(
            lhs=rows,
            **weights,
            group_sizes=None if inputs.group_sizes is None else _WHOLE,
            group_offset=None if inputs.group_offset is None else _WHOLE,
            lhs_scale=_scale_spec(inputs.lhs_scale, rows),
            rhs_scale=_scale_spec(inputs.rhs_scale, matrices),
        ),
        results=PartitionSpec(*split.rows, split.n),
        gradients={
            # Only one device has the matrix of a row.
            "lhs": GradientParts(
                rows, axis_names(split.n) + axis_names(split.matrices), typed_spec(inputs.lhs), disjoint=split.n is None
            ),
            **{name: GradientParts(matrices, split.row_names, typed_spec(x)) for name, x in inputs.weights.items()},
        },
        on_part=on_part,
        on_results=on_results,
        shared_with_xla=inputs.group_sizes is None,
    )


def _on_part(part: MatmulInputs, split: Split) -> MatmulInputs:
    """A device's part with the sizes of its rows' groups, and the group of its first matrix."""
    if part.group_sizes is not None and split.row_names:
        part = part.replace(group_sizes=_sizes_of_part(part, split.row_names))
    # The sizes stay those of all groups: an offset says which of them this device has matrices for.
    if split.matrices is not None:
        first = lax.axis_index(axis_names(split.matrices)).astype(jnp.int32) * part.matrices
        part = part.replace(group_offset=first if part.group_offset is None else part.group_offset + first)
    return part


def _sizes_of_part(part: MatmulInputs, names: tuple[str, ...]) -> jax.Array:
    """The group sizes of a device's rows, from those of all rows."""
    assert part.group_sizes is not None
    rows = part.rows
    # Groups and the rows of a device are both ranges of all rows, so a device has a range of each group.
    bounds = row_bounds(part.group_sizes, rows * lax.axis_size(names))
    first = lax.axis_index(names).astype(jnp.int32) * rows
    starts, ends = (jnp.clip(bound - first, 0, rows) for bound in bounds)
    return ends - starts


def _split(inputs: MatmulInputs) -> Split:
    """The split of the operands, which must be that of one matmul."""
    described = ", ".join(f"{name}: {typed_spec(x)}" for name, x in inputs.operands.items())
    k_axis, matrix_axis = inputs.k_axes
    rows = list(typed_axes(inputs.lhs))
    k = rows.pop(k_axis)
    of_rows = {name for axes in rows for name in axis_names(axes)}
    *stacked, first, second = (_without(axes, of_rows) for axes in typed_axes(inputs.rhs))
    other_k, n = (second, first) if matrix_axis else (first, second)
    if inputs.up is not None and (typed_axes(inputs.up) != typed_axes(inputs.rhs) or (k, other_k) != (None, None)):
        raise ValueError(f"gate and up must be split alike, and k be whole ({described}); reshard them first")
    if None not in (k, other_k) and k != other_k:
        raise ValueError(f"k must be split alike in lhs and rhs, or be whole in one ({described}); reshard it first")
    split = Split(tuple(rows), k or other_k, n, *(stacked or [None]))
    used = [*split.row_names, *(name for axes in (split.k, n, split.matrices) for name in axis_names(axes))]
    if len(set(used)) < len(used):
        raise ValueError(f"dimensions must be split by different axes ({described}); reshard an operand first")
    return split


def _without(axes: Any, names: set[str]) -> Any:
    """The axes of a dimension of a matrix that split no rows: of each of the others a device needs the whole."""
    kept = tuple(name for name in axis_names(axes) if name not in names)
    return axes if len(kept) == len(axis_names(axes)) else kept or None


def _check_scales(inputs: MatmulInputs, split: Split, sizes: Any) -> None:
    """Raises unless each device gets whole blocks of an operand with scales for blocks."""
    k, n = (split.k, inputs.k), (split.n, inputs.n)
    for name, scale, dimensions in (
        ("lhs_scale", inputs.lhs_scale, {"k": k}),
        ("rhs_scale", inputs.rhs_scale, {"k": k, "n": n}),
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
    return spec if scale.ndim else _WHOLE
