"""The plans of matmuls over several devices, as backends.

The kernels of ``remote.py`` are imported for calls that may take them: Pallas, which they import, takes a third of a
second.
"""

import abc
from typing import Any, ClassVar

import jax
from jax import lax

from tilewright.kernels.matmul.distributed.inputs import CollectiveInputs
from tilewright.kernels.matmul.distributed.rings import (
    PartsStrategy,
    best_parts,
    gathered_by_parts,
    gathered_rhs_gradient,
    scattered_by_parts,
    scattered_gradients,
)
from tilewright.kernels.op.distributed import Plan, PlanParams
from tilewright.kernels.op.roofline import peaks_of
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.device import current_device

_REMOTE_DEVICES = ("NVIDIA H100 80GB HBM3", "NVIDIA H200")
"""Devices with NVLink between all of a host. Of two of the first one the kernels of ``remote.py`` were measured."""
_REMOTE_S = 80e-6
"""The time at its rated peak of the shortest matmul for which such a kernel was faster than collectives."""


class PartsPlan(Plan[CollectiveInputs, jax.Array], abc.ABC):
    """Calls of ``matmul`` on parts, and transfers around or beside them."""

    serves: ClassVar[frozenset[str]] = frozenset({"transpose_rhs", "precision"})
    stands_for: ClassVar[frozenset[str]] = frozenset({"remote"})
    name: ClassVar[PartsStrategy]

    def plan_reasons(self, inputs: CollectiveInputs, device: Device, direction: Direction) -> list[str]:
        return []

    def is_best(self, inputs: CollectiveInputs, device: Device, direction: Direction) -> bool:
        if direction == "forward" and takes_remote(inputs, device):
            return False
        return best_parts(inputs, device, direction) == self.name

    def forward(self, inputs: CollectiveInputs, params: PlanParams) -> jax.Array:
        return (scattered_by_parts if inputs.scatters else gathered_by_parts)(inputs, self.name)

    def backward(
        self, inputs: CollectiveInputs, results: object, cotangents: jax.Array, params: PlanParams
    ) -> dict[str, Any]:
        """Gradients of lhs and rhs, those that are used: of a gather that of lhs is the other op's."""
        if inputs.scatters:
            return dict(zip(("lhs", "rhs"), scattered_gradients(inputs, cotangents, self.name), strict=True))
        # Without a barrier XLA takes the gather of the forward pass for this one, and keeps its result for it.
        (lhs, rhs), d_out = lax.optimization_barrier(((inputs.lhs, inputs.rhs), cotangents))
        inputs, gradients = inputs.replace(lhs=lhs, rhs=rhs), {}
        if inputs.wants("lhs"):
            strategy = "auto" if inputs.strategy == "remote" else inputs.strategy
            gradients["lhs"] = inputs.kernel(
                d_out, rhs, axis_name=inputs.axis, transpose_rhs=not inputs.transpose_rhs,
                precision=inputs.precision, preferred_element_type=lhs.dtype, strategy=strategy,
                platform=inputs.platform,
            )  # fmt: skip
        if inputs.wants("rhs"):
            gradients["rhs"] = gathered_rhs_gradient(inputs, d_out, self.name)
        return gradients


class Collective(PartsPlan):
    """A collective, and one matmul before or after it."""

    name: ClassVar[PartsStrategy] = "collective"


class Ring(PartsPlan):
    """A part is multiplied while the next one comes from a neighbour."""

    name: ClassVar[PartsStrategy] = "ring"


class Bidirectional(PartsPlan):
    """The same from both neighbours."""

    name: ClassVar[PartsStrategy] = "bidirectional"


class Remote(Plan[CollectiveInputs, jax.Array]):
    """One kernel, whose devices send their rows or their products to each other."""

    name: ClassVar[str] = "remote"
    serves: ClassVar[frozenset[str]] = frozenset({"transpose_rhs", "precision"})

    def plan_reasons(self, inputs: CollectiveInputs, device: Device, direction: Direction) -> list[str]:
        if direction == "backward":
            return ["it has no kernel for gradients"]
        from tilewright.kernels.matmul.distributed.remote import remote_reasons

        return remote_reasons(inputs, device)

    def is_best(self, inputs: CollectiveInputs, device: Device, direction: Direction) -> bool:
        return takes_remote(inputs, device)

    def forward(self, inputs: CollectiveInputs, params: PlanParams) -> jax.Array:
        from tilewright.kernels.matmul.distributed.remote import remote_product

        return remote_product(inputs, best_parts(inputs, current_device(), "forward"))

    def backward(
        self, inputs: CollectiveInputs, results: object, cotangents: jax.Array, params: PlanParams
    ) -> dict[str, Any]:
        raise NotImplementedError("it has no kernel for gradients")


def takes_remote(inputs: CollectiveInputs, device: Device) -> bool:
    """True if a kernel of ``remote.py`` is probably the fastest.

    That is known of a mesh of two devices, as more have not been measured.
    """
    peaks, two = peaks_of(device), inputs.devices == inputs.mesh_size == 2 and not inputs.other_axes
    if not two or device.name not in _REMOTE_DEVICES or peaks is None:
        return False
    flops = 2.0 * inputs.lhs.size * inputs.n * (1 if inputs.scatters else inputs.devices)
    return flops >= peaks.flops * _REMOTE_S and not Remote().plan_reasons(inputs, device, "forward")
