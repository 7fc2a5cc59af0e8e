"""Writes into pages by XLA's scatter, in place if the pages are donated."""

from collections.abc import Iterable
from typing import ClassVar

from tilewright.kernels.op.backend import InferenceImplementation, Platform
from tilewright.kernels.paged_attention.writing import Cache, WriteInputs, write_pages
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.datacarrier import FwdParams


class XlaUpdatePages(InferenceImplementation[WriteInputs, WriteInputs, Cache, FwdParams]):
    """Serves every problem; has no params."""

    platform: ClassVar[Platform] = Platform.XLA
    forward_params: ClassVar[type] = FwdParams
    symbolic_dimensions = True

    def forward_reasons(self, problem: WriteInputs, device: Device) -> list[str]:
        return []

    def heuristic(self, problem: WriteInputs, device: Device, direction: Direction) -> FwdParams:
        return FwdParams()

    def candidates(self, problem: WriteInputs, device: Device, direction: Direction) -> Iterable[FwdParams]:
        return []

    def forward(self, inputs: WriteInputs, params: FwdParams) -> Cache:
        """The pages with the new tokens, and their scales."""
        return write_pages(inputs)
