"""Quantising in plain XLA: the backend for every device."""

from collections.abc import Iterable
from typing import ClassVar

from tilewright.kernels.op.backend import InferenceBackend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.quantize.inputs import QuantizeInputs, QuantizeResults
from tilewright.kernels.quantize.reference import quantize_reference
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.datacarrier import FwdParams


class XlaQuantize(InferenceBackend[QuantizeInputs, QuantizeResults, FwdParams]):
    """Supports every floating-point dtype and shape; has no params."""

    name: ClassVar[str] = "xla"
    platform: ClassVar[Platform] = Platform.XLA
    symbolic_dimensions: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset({"format", "scaling", "axis", "block", "power_of_two", "transposed"})

    def forward_reasons(self, inputs: QuantizeInputs, device: Device) -> list[str]:
        return []

    def candidates(self, inputs: QuantizeInputs, device: Device, direction: Direction) -> Iterable[FwdParams]:
        return [FwdParams()]

    def forward(self, inputs: QuantizeInputs, params: FwdParams) -> QuantizeResults:
        return quantize_reference(inputs)
