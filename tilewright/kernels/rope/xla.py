"""The rotary embedding in plain XLA, which runs at the speed of a copy: the backend for every device."""

from collections.abc import Iterable
from typing import Any, ClassVar

import jax

from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.rope.inputs import RopeInputs
from tilewright.kernels.rope.turning import turned
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams


class XlaRope(Backend[RopeInputs, jax.Array, FwdParams, BwdParams]):
    """Supports every floating-point dtype and shape; has no params."""

    name: ClassVar[str] = "xla"
    platform: ClassVar[Platform] = Platform.XLA
    forward_mode: ClassVar[bool] = True
    symbolic_dimensions: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset({"base", "scaling", "interleaved", "rotary_dim", "inverse"})

    def reasons(self, inputs: RopeInputs, device: Device, direction: Direction) -> list[str]:
        return []

    def candidates(self, inputs: RopeInputs, device: Device, direction: Direction) -> Iterable[FwdParams | BwdParams]:
        return [FwdParams() if direction == "forward" else BwdParams()]

    def forward(self, inputs: RopeInputs, params: FwdParams) -> jax.Array:
        return turned(inputs, inputs.x, -1.0 if inputs.inverse else 1.0)

    def backward(
        self, inputs: RopeInputs, results: Any, cotangents: jax.Array, params: BwdParams
    ) -> dict[str, jax.Array]:
        """Turns the cotangents back: what JAX derives from the forward pass pads and adds, in twice the time."""
        return {"x": turned(inputs, cotangents, 1.0 if inputs.inverse else -1.0)}
