"""The Triton backends of matmuls with groups or a gate, on NVIDIA GPUs from Ampere on."""

import abc
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import jax

from tilewright.kernels.matmul.backend import MatmulBackend, Products
from tilewright.kernels.matmul.inputs import MatmulInputs
from tilewright.kernels.matmul.triton.params import (
    Params,
    TritonGatedBackwardParams,
    TritonGatedForwardParams,
    TritonGroupedBackwardParams,
    TritonGroupedForwardParams,
    footprints,
    listed_params,
)
from tilewright.kernels.matmul.triton.products import TritonProducts
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.op.footprint import Footprint, launch_reasons
from tilewright.kernels.triton import unavailable
from tilewright.ops.types import Device, Direction

DTYPES = ("float16", "bfloat16", "float32")
MAX_INT32 = (1 << 31) - 1


class _TritonBackend(MatmulBackend[Any, Any], abc.ABC):
    """Serves float16, bfloat16 and float32 of one dtype without scales; sums are in float32, in one order.

    A gated op is one kernel forward, which reads the rows once. A call without groups has one of all rows.
    """

    name: ClassVar[str] = "triton"
    platform: ClassVar[Platform] = Platform.TRITON
    multiple: ClassVar[int] = 32
    late_import: ClassVar[str] = "triton"
    keeps_lowering: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset(
        {"up", "activation", "group_sizes", "group_offset", "transpose_rhs", "precision"}
    )

    def reasons(self, inputs: MatmulInputs, device: Device, direction: Direction) -> list[str]:
        dtypes = {name: x.dtype.name for name, x in inputs.operands.items()}
        reasons = unavailable(device)
        reasons += [
            f"{name} must be one of {DTYPES}, got {each}"
            for name, each in {**dtypes, "the result": inputs.out_dtype}.items()
            if each not in DTYPES
        ]
        if len(set(dtypes.values())) > 1:
            reasons.append(f"all must have one dtype, got {', '.join(f'{name} {x}' for name, x in dtypes.items())}")
        if direction == "backward" and inputs.out_dtype != inputs.lhs.dtype.name:
            reasons.append(f"backward the result must have the dtype of lhs, got {inputs.out_dtype}")
        if inputs.precision is not None and not isinstance(inputs.precision, jax.lax.Precision):
            reasons.append(f"it takes a jax.lax.Precision, got {inputs.precision}")
        if inputs.k * inputs.n > MAX_INT32:
            reasons.append(f"elements of a matrix must be counted by 32 bits, got k={inputs.k}, n={inputs.n}")
        return reasons

    def candidates(self, inputs: MatmulInputs, device: Device, direction: Direction) -> Iterable[Params]:
        inputs = self.padded(inputs)
        listed = listed_params(inputs, device, direction)
        fitting = [params for params in listed if not launch_reasons(footprints(inputs, params), device)]
        return fitting or listed[:1]

    def footprints(
        self, inputs: MatmulInputs, device: Device, direction: Direction, params: Params
    ) -> Sequence[Footprint]:
        return footprints(self.padded(inputs), params)

    def products(self, inputs: MatmulInputs, params: Any) -> Products:
        return TritonProducts(inputs, params)

    def recomputed_by(self, params: Any) -> Any:
        return None if params.recompute is None else TritonGatedForwardParams(params.recompute)


class TritonGlu(_TritonBackend):
    """Serves ``glu``.

    It comes behind XLA, whose matmuls are cuBLAS's: it reads the rows once and saves the pass over the pre-activations,
    and nothing has measured yet where that is more.
    """

    forward_params: ClassVar[type] = TritonGatedForwardParams
    backward_params: ClassVar[type] = TritonGatedBackwardParams

    def deprioritized(self, inputs: MatmulInputs, device: Device, direction: Direction) -> bool:
        return True


class TritonGroupedMatmul(_TritonBackend):
    """Serves ``grouped_matmul``."""

    forward_params: ClassVar[type] = TritonGroupedForwardParams
    backward_params: ClassVar[type] = TritonGroupedBackwardParams


class TritonGatedGroupedMatmul(_TritonBackend):
    """Serves ``gated_grouped_matmul``."""

    forward_params: ClassVar[type] = TritonGatedForwardParams
    backward_params: ClassVar[type] = TritonGatedBackwardParams
