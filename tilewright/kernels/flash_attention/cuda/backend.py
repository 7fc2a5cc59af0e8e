"""Flash attention in CUDA C++: support reasons, selection of a variant, and launch."""

import dataclasses
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Array

from tilewright.kernels.cuda.build import groups_of
from tilewright.kernels.cuda.devices import capability_of
from tilewright.kernels.flash_attention.cuda import selection
from tilewright.kernels.flash_attention.cuda.call import CudaCall
from tilewright.kernels.flash_attention.cuda.selection import (
    DTYPES,
    TABLES,
    VECTOR_BYTES,
    each_variant,
    padded_fields,
    problem_fields,
    queries_per_block,
    worth_measuring,
)
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.mask_terms import score_arrays
from tilewright.kernels.flash_attention.operands import (
    INT32_LIMIT,
    backward_arrays,
    bias_gradient,
    with_cleared_rows,
    with_cleared_values,
    with_positive_scale,
)
from tilewright.kernels.flash_attention.results import Results, empty_backward, empty_forward, row_terms, sinks_gradient
from tilewright.kernels.numerics.softmax import sinks_lse
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.op.footprint import Footprint
from tilewright.ops.kernel.builds import Build
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.stable_ids import stable_id


@stable_id(
    "tilewright/flash_attention.CudaForwardParams",
    formerly=("tilewright.kernels.flash_attention.cuda:CudaForwardParams",),
)
@dataclasses.dataclass(frozen=True, slots=True)
class CudaForwardParams:
    """Params of the forward pass: a variant by name, or the first that fits."""

    variant: str | None = None


@stable_id(
    "tilewright/flash_attention.CudaBackwardParams",
    formerly=("tilewright.kernels.flash_attention.cuda:CudaBackwardParams",),
)
@dataclasses.dataclass(frozen=True, slots=True)
class CudaBackwardParams:
    """Params of the backward pass: a variant by name, or the first that fits; and bitwise repeatability."""

    variant: str | None = None
    deterministic: bool = False


class CudaFlashAttention(Backend[AttentionInputs, Results, CudaForwardParams, CudaBackwardParams]):
    """Supports float32, float16 and bfloat16, any head dim and all but biases of positions, from capability 5.0 on."""

    name: ClassVar[str] = "cuda"
    platform: ClassVar[Platform] = Platform.CUDA
    forward_params: ClassVar[type] = CudaForwardParams
    backward_params: ClassVar[type] = CudaBackwardParams
    serves: ClassVar[frozenset[str]] = frozenset(
        {"bias", "mask", "softmax_aux", "dropout_seed", "logits_soft_cap", "dropout_prob", "precision"}
    )

    def reasons(self, inputs: AttentionInputs, device: Device, direction: Direction) -> list[str]:
        if device.kind != "gpu" or device.capability is None:
            return [f"needs a CUDA GPU whose compute capability is known, got {device.described}"]
        reasons = []
        if inputs.dtype not in DTYPES:
            reasons.append(f"computes in float32, float16 or bfloat16, got dtype={inputs.dtype}")
        if inputs.bias is not None and inputs.bias.dtype == np.float64:
            reasons.append("a bias is added in float32, got float64")
        widest = max(inputs.head_dim, inputs.value_dim) + VECTOR_BYTES
        if inputs.heads * widest >= INT32_LIMIT or max(inputs.q_length, inputs.kv_length) >= 1 << 29:
            reasons.append(
                f"rows and lengths must be counted by 32 bits, got score_shape={inputs.score_shape}, {widest=}"
            )
        # Without elements no kernel runs, so no variant has to fit.
        if reasons or 0 in (*inputs.score_shape, inputs.head_dim, inputs.value_dim):
            return reasons
        fields = problem_fields(inputs, False)
        capability = capability_of(device) or 0
        kernels_here = [kernel for kernel in selection.kernels(direction) if kernel.table.for_capability(capability)]
        if not kernels_here:
            return [f"no variant is for compute capability {capability / 10}"]
        by_num_unmet: dict[int, list[str]] = {}  # reasons of the tables by their fewest unmet requirements
        for each in padded_fields(fields, inputs.dtype.itemsize):
            for kernel in kernels_here:
                fewest, kernel_reasons = kernel.closest(each, device)
                if not kernel_reasons:
                    return []
                by_num_unmet.setdefault(fewest, []).extend(kernel_reasons)
        return list(dict.fromkeys(by_num_unmet[min(by_num_unmet)]))

    def heuristic(
        self, inputs: AttentionInputs, device: Device, direction: Direction
    ) -> CudaForwardParams | CudaBackwardParams:
        return CudaForwardParams() if direction == "forward" else CudaBackwardParams()

    def candidates(
        self, inputs: AttentionInputs, device: Device, direction: Direction
    ) -> list[CudaForwardParams | CudaBackwardParams]:
        """The variants worth measuring among those that may fit; for the backward pass also the deterministic form."""
        fields = problem_fields(inputs, False)
        fitting = [
            (kernel.table.name, variant)
            for kernel, variant, each in each_variant(direction, fields, inputs.dtype.itemsize)
            if not kernel.variant_reasons(variant, each, device)
        ]
        names = dict.fromkeys(variant.name for variant in worth_measuring(fitting))
        if direction == "forward":
            return [CudaForwardParams(name) for name in names]
        return [CudaBackwardParams(), CudaBackwardParams(None, True), *(CudaBackwardParams(name) for name in names)]

    def config_reasons(
        self,
        inputs: AttentionInputs,
        device: Device,
        direction: Direction,
        params: CudaForwardParams | CudaBackwardParams,
    ) -> list[str]:
        if params.variant is None:
            return []
        fields = problem_fields(inputs, getattr(params, "deterministic", False))
        reasons_by_variant = [
            kernel.variant_reasons(variant, each, device)
            for kernel, variant, each in each_variant(direction, fields, inputs.dtype.itemsize, params.variant)
        ]
        if not reasons_by_variant:
            return [f"there is no variant {params.variant!r}"]
        # A name may stand for several attempts, unpadded and padded: empty if one of them fits.
        return min(reasons_by_variant, key=len)

    def footprints(
        self,
        inputs: AttentionInputs,
        device: Device,
        direction: Direction,
        params: CudaForwardParams | CudaBackwardParams,
    ) -> list[Footprint]:
        """The grid of a forward variant; its requirements check shared memory, compiled libraries the rest."""
        if direction == "backward" or params.variant is None:
            return []
        fields = problem_fields(inputs, False)
        variants = (each for _, each, _ in each_variant(direction, fields, inputs.dtype.itemsize, params.variant))
        rows = [queries_per_block(variant) for variant in variants]
        if not rows or rows[0] is None:
            return []
        return [Footprint(-(-inputs.q_length // rows[0]) * inputs.batch * inputs.heads)]

    def builds(
        self,
        inputs: AttentionInputs,
        device: Device,
        direction: Direction,
        params: CudaForwardParams | CudaBackwardParams,
    ) -> list[Build]:
        if 0 in (*inputs.score_shape, inputs.head_dim, inputs.value_dim):
            return []
        fields = problem_fields(inputs, getattr(params, "deterministic", False))
        for each in padded_fields(fields, inputs.dtype.itemsize):
            for kernel in selection.kernels(direction):
                allowed = [v for v in kernel.table.variants if params.variant in (None, v.name)]
                if (group := kernel.needed(each, device, allowed)) is not None:
                    return [group]
        return []

    def all_builds(self, device: Device) -> list[Build]:
        capability = capability_of(device) or 0
        return [group for tables in TABLES.values() for table in tables for group in groups_of(table, capability)]

    def forward(self, inputs: AttentionInputs, params: CudaForwardParams) -> Results:
        """``(out, lse)``."""
        if inputs.is_empty:
            return empty_forward(inputs)
        inputs = with_cleared_values(with_positive_scale(inputs))
        call = CudaCall.of(inputs, "forward", params.variant, False)
        arrays = {
            "query": inputs.query, "key": inputs.key, "value": inputs.value, "sinks": sinks_lse(inputs.softmax_aux),
        }  # fmt: skip
        out, lse = call.run(arrays | score_arrays(inputs, backward=False))
        return out, lse

    def backward(
        self,
        inputs: AttentionInputs,
        results: Results,
        cotangents: tuple[Array, Array | None],
        params: CudaBackwardParams,
    ) -> dict[str, Any]:
        """Gradients for query, key, value, bias and softmax_aux, from any backend's ``(out, lse)``."""
        if inputs.is_empty:
            return empty_backward(inputs, *results, *cotangents)
        out, lse = results
        negated, inputs = inputs.softmax_scale < 0, with_positive_scale(inputs)
        inputs, d_out = with_cleared_rows(inputs, cotangents[0])
        cotangents = d_out, cotangents[1]
        call = CudaCall.of(inputs, "backward", params.variant, params.deterministic)
        arrays = backward_arrays(inputs, results, cotangents) | score_arrays(inputs, backward=True)
        d_query, d_key, d_value, d_bias = call.run(arrays)
        sinks = None
        if inputs.softmax_aux is not None:
            sinks = sinks_gradient(inputs, *row_terms(inputs, out, lse, *cotangents))
        # The deterministic form stores the bias gradient unreduced.
        bias = None if inputs.bias is None else bias_gradient(d_bias, inputs.bias)
        return {
            "query": -d_query if negated else d_query,
            "key": d_key,
            "value": d_value,
            "bias": bias,
            "softmax_aux": sinks,
        }
