"""Matmuls with groups or gates and their gradients by their definition, in NumPy and float64, group by group."""

import math
from typing import Any

import numpy as np

from tests.kernels.conformance import Found
from tests.kernels.matmul.gates import gate_oracle
from tilewright.kernels.matmul.inputs import MatmulInputs


def segments(sizes: Any, rows: int, matrices: int, offset: int = 0) -> list[tuple[int, slice]]:
    """Each matrix that has rows, and these: what the contract says about sizes of any kind, in Python's integers."""
    found, start = [], 0
    for group, size in enumerate(int(each) for each in np.asarray(sizes)):
        end = min(start + max(size, 0), rows)
        if 0 <= group - offset < matrices and end > start:
            found.append((group - offset, slice(start, end)))
        start = end
    return found


def _scaled(array: Any, scale: Any, axes: tuple[int, ...]) -> Any:
    if scale is None:
        return np.ones(array.shape)
    scale = np.asarray(scale, np.float64)
    for axis in axes if scale.ndim else ():
        scale = np.repeat(scale, 128, axis=axis).take(np.arange(array.shape[axis]), axis=axis)
    return np.broadcast_to(scale, array.shape)


def _groups(inputs: MatmulInputs, rows: int, matrices: int) -> list[tuple[int, slice]]:
    if inputs.group_sizes is None:
        return [(0, slice(rows))]
    offset = 0 if inputs.group_offset is None else int(inputs.group_offset)
    return segments(inputs.group_sizes, rows, matrices, offset)


def oracle(inputs: MatmulInputs, d_out: Any) -> Found:
    """The result, and the gradients of lhs and rhs, for a cotangent of the result."""
    if inputs.up is not None:
        return _gated(inputs, d_out)
    lhs, rhs, d_out = (np.asarray(x).astype(np.float64) for x in (inputs.lhs, inputs.rhs, d_out))
    of_lhs, of_rhs = _scaled(lhs, inputs.lhs_scale, (1,)), _scaled(rhs, inputs.rhs_scale, (1, 2))
    lhs, rhs = lhs * of_lhs, rhs * of_rhs
    transposed = inputs.transpose_rhs
    matrices = rhs.transpose(0, 2, 1) if transposed else rhs
    out = np.zeros((lhs.shape[0], matrices.shape[2]))
    d_lhs, d_matrices = np.zeros_like(lhs), np.zeros_like(matrices)
    for matrix, rows in _groups(inputs, len(lhs), len(rhs)):
        out[rows] = lhs[rows] @ matrices[matrix]
        d_lhs[rows] = d_out[rows] @ matrices[matrix].T
        d_matrices[matrix] = lhs[rows].T @ d_out[rows]
    d_rhs = d_matrices.transpose(0, 2, 1) if transposed else d_matrices
    with np.errstate(invalid="ignore"):  # scales behind the last group may be anything
        owned = d_lhs != 0
        return {"out": out, "d_lhs": np.where(owned, d_lhs * of_lhs, 0), "d_rhs": d_rhs * of_rhs}


def _gated(inputs: MatmulInputs, d_out: Any) -> Found:
    """The same of a gated op, of which rhs is the gate's matrix; without groups rows have any leading dimensions."""
    arrays = inputs.lhs, d_out
    lhs, d_out = (np.asarray(x).astype(np.float64).reshape(math.prod(x.shape[:-1]), x.shape[-1]) for x in arrays)
    turned: Any = (lambda x: x.swapaxes(-1, -2)) if inputs.transpose_rhs else (lambda x: x)
    gate, up = (turned(np.asarray(x).reshape(math.prod(x.shape[:-2]), *x.shape[-2:])) for x in (inputs.rhs, inputs.up))
    of_lhs, of_gate, of_up = np.zeros(lhs.shape), np.zeros(gate.shape), np.zeros(up.shape)
    out = np.zeros(d_out.shape)
    for matrix, rows in _groups(inputs, len(lhs), len(gate)):
        one = gate_oracle(str(inputs.activation), lhs[rows], gate[matrix], up[matrix], d_out[rows])
        out[rows], of_lhs[rows], of_gate[matrix], of_up[matrix] = (one[x] for x in ("out", "d_x", "d_gate", "d_up"))
    found = {"out": out.reshape(arrays[1].shape), "d_lhs": of_lhs.reshape(arrays[0].shape)}
    return found | {"d_rhs": turned(of_gate).reshape(inputs.rhs.shape), "d_up": turned(of_up).reshape(inputs.rhs.shape)}
