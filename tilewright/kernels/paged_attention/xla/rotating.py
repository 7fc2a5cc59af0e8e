"""Rotates queries and keys and writes into pages in plain XLA, in place if the pages are donated."""

from collections.abc import Iterable
from typing import ClassVar

from tilewright.kernels.op.backend import InferenceBackend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.paged_attention.rotating import Rotated, RotateInputs, rotate_and_write
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.datacarrier import FwdParams


class XlaRopeUpdatePages(InferenceBackend[RotateInputs, Rotated, FwdParams]):
    """Serves every call; has no params."""

    name: ClassVar[str] = "xla"
    platform: ClassVar[Platform] = Platform.XLA
    forward_params: ClassVar[type] = FwdParams
    symbolic_dimensions: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset(
        {"key_scale", "value_scale", "base", "scaling", "interleaved", "rotary_dim"}
    )

    def forward_reasons(self, inputs: RotateInputs, device: Device) -> list[str]:
        return []

    def candidates(self, inputs: RotateInputs, device: Device, direction: Direction) -> Iterable[FwdParams]:
        return [FwdParams()]

    def forward(self, inputs: RotateInputs, params: FwdParams) -> Rotated:
        """The rotated query, the pages with the new tokens, and their scales."""
        return rotate_and_write(inputs)
