"""The Hopper backends of all matmuls."""

import abc
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import jax

from tilewright.kernels.hopper.device import device_reasons, num_sms
from tilewright.kernels.hopper.limits import MAX_INDEXED_ROWS, TMA_STRIDE_BYTES, WGMMA_M
from tilewright.kernels.hopper.matmul.heuristics import (
    dense_candidates,
    reduction_candidates,
    rows_candidates,
    shared_rows_reasons,
)
from tilewright.kernels.hopper.matmul.operands import NARROW_DTYPES, operand_reasons
from tilewright.kernels.hopper.matmul.params import MatmulParams
from tilewright.kernels.hopper.matmul.plan import plan_reasons
from tilewright.kernels.hopper.matmul.scaled import SCALE_BLOCK
from tilewright.kernels.matmul.backend import MatmulBackend, Products
from tilewright.kernels.matmul.hopper.params import (
    HopperGatedBackwardParams,
    HopperGluBackwardParams,
    HopperGroupedBackwardParams,
    HopperMatmulBackwardParams,
)
from tilewright.kernels.matmul.hopper.products import DenseProducts, GroupedProducts, indexed_factors, plans_of
from tilewright.kernels.matmul.inputs import MatmulInputs
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.op.footprint import Footprint
from tilewright.ops.types import Device, Direction


class _HopperBackend(MatmulBackend[MatmulParams, Any], abc.ABC):
    """Serves 16-bit operands of one dtype, with rows at multiples of 16 bytes or padded copies; ops differ in params.

    An activation is in the epilogue of the forward kernel, and all products of the gradient of lhs in one accumulator.
    """

    name: ClassVar[str] = "hopper"
    platform: ClassVar[Platform] = Platform.PALLAS
    multiple: ClassVar[int] = TMA_STRIDE_BYTES // 2
    keeps_lowering: ClassVar[bool] = True
    forward_params: ClassVar[type] = MatmulParams
    # Products of 8- and of 16-bit numbers are exact in float32, so all precisions are the same.
    serves: ClassVar[frozenset[str]] = frozenset(
        {
            "up", "activation", "group_sizes", "group_offset", "lhs_scale", "rhs_scale", "transpose_lhs",
            "transpose_rhs", "precision",
        }
    )  # fmt: skip

    def reasons(self, inputs: MatmulInputs, device: Device, direction: Direction) -> list[str]:
        reasons, dtypes = device_reasons(device), {name: x.dtype for name, x in inputs.operands.items()}
        if (inputs.row_index is not None or inputs.cotangent_index is not None) and _is_narrow(inputs):
            reasons.append("rows are gathered in 16 bits alone")
        if inputs.row_index is not None and inputs.cotangent_index is not None:
            reasons.append("rows of one operand alone are gathered: for both the producer lacks registers")
        if _is_narrow(inputs):
            reasons += operand_reasons(dtypes, inputs.out_dtype, {"k": inputs.k}, NARROW_DTYPES)
            reasons += operand_reasons({}, inputs.out_dtype, {"n": inputs.n})
            if not inputs.transpose_rhs or inputs.transpose_lhs:
                reasons.append(
                    "wgmma takes float8 operands with K in their rows alone: give lhs as [m, k], rhs as [n, k]"
                )
            return reasons + (["float8 has no gradients here"] if direction == "backward" else [])
        sizes = {} if self.pads(inputs) else {"k": inputs.k, "n": inputs.n}
        if inputs.group_sizes is None and inputs.up is None and (inputs.transpose_lhs or direction == "backward"):
            sizes["rows"] = inputs.rows
        reasons += operand_reasons(dtypes, inputs.out_dtype, sizes)
        if direction == "backward" and inputs.out_dtype != inputs.lhs.dtype.name:
            reasons.append(f"backward the result must have the dtype of lhs, got {inputs.out_dtype}")
        if inputs.lhs_scale is not None or inputs.rhs_scale is not None:
            reasons.append("its kernels scale operands of float8 alone")
        return reasons

    def candidates(self, inputs: MatmulInputs, device: Device, direction: Direction) -> Iterable[Any]:
        inputs = self.padded(inputs)
        sms, count, (m, n, k) = num_sms(device), len(inputs.weights), (inputs.rows, inputs.n, inputs.k)
        is_dense, groups = inputs.group_sizes is None, inputs.groups
        if _is_narrow(inputs):
            # A step has 128 bytes of K: of 8-bit elements half as many steps.
            listed = rows_candidates(m, groups, n, k // 2, sms)
            return [params for params in listed if not self.config_reasons(inputs, device, direction, params)]
        if direction == "forward":
            if is_dense:
                return dense_candidates(m, n, k, sms, accumulators=count)
            listed = rows_candidates(m, groups, n, k, sms, accumulators=count)
            return [params for params in listed if not _rows_reasons(inputs.row_index, params)]
        of_weight = (n, k) if inputs.transpose_rhs else (k, n)
        # All products of the gradient of lhs are in one kernel, of so many times as many steps.
        if is_dense:
            of_lhs = dense_candidates(*((k, m) if inputs.transpose_lhs else (m, k)), count * n, sms)
            of_rhs = dense_candidates(*of_weight, m, sms)
        else:
            of_lhs = rows_candidates(m, groups, k, count * n, sms)
            of_lhs = [params for params in of_lhs if not _rows_reasons(inputs.cotangent_index, params)]
            indexed = indexed_factors(inputs)
            of_rhs = reduction_candidates(m, inputs.matrices, *of_weight, sms, *indexed)
        pairs = range(max(len(of_lhs), len(of_rhs)))
        return [self.backward_params(of_lhs[i % len(of_lhs)], of_rhs[i % len(of_rhs)]) for i in pairs]

    def config_reasons(self, inputs: MatmulInputs, device: Device, direction: Direction, params: Any) -> list[str]:
        if _is_narrow(inputs):
            assert isinstance(params, MatmulParams)
            if params.turns or params.block_n % SCALE_BLOCK or params.consumer_rows != WGMMA_M:
                return [f"sums of float8 are of 64 rows and {SCALE_BLOCK} columns each, got {params}"]
        if direction == "forward":
            reasons = _rows_reasons(inputs.row_index, params)
        else:
            reasons = _rows_reasons(inputs.cotangent_index, params.lhs)
            reasons += shared_rows_reasons(params.rhs, *indexed_factors(inputs))
        return reasons + plan_reasons(lambda: self.footprints(inputs, device, direction, params))

    def footprints(
        self, inputs: MatmulInputs, device: Device, direction: Direction, params: Any
    ) -> Sequence[Footprint]:
        return [plan.footprint(num_sms(device)) for plan in plans_of(_as_run(self.padded(inputs)), params)]

    def products(self, inputs: MatmulInputs, params: Any) -> Products:
        inputs = _as_run(inputs)
        return (DenseProducts if inputs.group_sizes is None else GroupedProducts)(inputs, params)

    def recomputed_by(self, params: Any) -> MatmulParams | None:
        found: MatmulParams | None = params.recompute
        return found


def _is_narrow(inputs: MatmulInputs) -> bool:
    """True for the operands of 8 bits that its kernels take: those without a gate."""
    return inputs.up is None and 1 in (inputs.lhs.dtype.itemsize, inputs.rhs.dtype.itemsize)


def _as_run(inputs: MatmulInputs) -> MatmulInputs:
    """The inputs of the kernels: the one that scales float8 is of rows in groups."""
    return inputs.as_one_group() if _is_narrow(inputs) else inputs


def _rows_reasons(index: jax.Array | None, params: MatmulParams) -> list[str]:
    """The reason why a kernel cannot gather the rows of its tiles, if there is an index of them."""
    if index is None or params.block_m <= MAX_INDEXED_ROWS:
        return []
    return [f"a tile has up to {MAX_INDEXED_ROWS} rows that an index names, got {params}"]


class HopperMatmul(_HopperBackend):
    """Serves ``matmul``.

    cuBLAS, which XLA calls, is up to 3 % faster where it has a kernel for the shape, so this one runs if it is named or
    was measured as faster, and where rows are not aligned, for which cuBLAS takes two to three times as long; and
    forward for float8, of which XLA multiplies dequantised numbers if they have scales of blocks.
    """

    backward_params: ClassVar[type] = HopperMatmulBackwardParams

    def deprioritized(self, inputs: MatmulInputs, device: Device, direction: Direction) -> bool:
        return not self.pads(inputs) and not _is_narrow(inputs)


class HopperGlu(_HopperBackend):
    """Serves ``glu``."""

    backward_params: ClassVar[type] = HopperGluBackwardParams


class HopperGroupedMatmul(_HopperBackend):
    """Serves ``grouped_matmul``, forward also in float8."""

    backward_params: ClassVar[type] = HopperGroupedBackwardParams


class HopperGatedGroupedMatmul(_HopperBackend):
    """Serves ``gated_grouped_matmul``."""

    backward_params: ClassVar[type] = HopperGatedBackwardParams
