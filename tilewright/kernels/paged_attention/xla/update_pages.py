"""Writes into pages by XLA's scatter, in place if the pages are donated."""

from collections.abc import Iterable
from typing import ClassVar

from tilewright.kernels.op.backend import InferenceBackend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.paged_attention.writing import Cache, WriteInputs, write_pages
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.datacarrier import FwdParams


class XlaUpdatePages(InferenceBackend[WriteInputs, Cache, FwdParams]):
    """Serves every call; has no params."""

    name: ClassVar[str] = "xla"
    platform: ClassVar[Platform] = Platform.XLA
    forward_params: ClassVar[type] = FwdParams
    symbolic_dimensions: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset({"key_scale", "value_scale"})

    def forward_reasons(self, inputs: WriteInputs, device: Device) -> list[str]:
        return []

    def candidates(self, inputs: WriteInputs, device: Device, direction: Direction) -> Iterable[FwdParams]:
        return [FwdParams()]

    def forward(self, inputs: WriteInputs, params: FwdParams) -> Cache:
        """The pages with the new tokens, and their scales."""
        return write_pages(inputs)
