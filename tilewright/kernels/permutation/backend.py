"""The base classes of the backends of ``permute`` and ``unpermute``: each is a movement of rows."""

import abc
from collections.abc import Iterable
from typing import Any, ClassVar

import jax

from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.inputs import OpInputs
from tilewright.kernels.permutation.inputs import PermuteInputs, PermuteResults, UnpermuteInputs, UnpermuteResults
from tilewright.kernels.permutation.movement import Movement
from tilewright.kernels.permutation.routing import Routing, routing_of
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams


class MovingBackend[Inputs: OpInputs](Backend[Inputs, Any, FwdParams, BwdParams], abc.ABC):
    """A backend that only moves rows; has no params."""

    movement: ClassVar[Movement]

    def candidates(self, inputs: Inputs, device: Device, direction: Direction) -> Iterable[FwdParams | BwdParams]:
        return [FwdParams() if direction == "forward" else BwdParams()]


class PermuteBackend(MovingBackend[PermuteInputs], abc.ABC):
    serves: ClassVar[frozenset[str]] = frozenset({"capacity"})

    def forward(self, inputs: PermuteInputs, params: FwdParams) -> PermuteResults:
        routing = self.movement.route(inputs.experts, inputs.num_experts, inputs.capacity)
        return PermuteResults(self.movement.gather(inputs.x, routing), routing)

    def backward(
        self, inputs: PermuteInputs, results: Routing, cotangents: jax.Array, params: BwdParams
    ) -> dict[str, Any]:
        return {"x": self.movement.combine(cotangents, results)}


class UnpermuteBackend(MovingBackend[UnpermuteInputs], abc.ABC):
    def forward(self, inputs: UnpermuteInputs, params: FwdParams) -> UnpermuteResults:
        routing = routing_of(inputs.source, *inputs.weights.shape)
        return UnpermuteResults(self.movement.combine(inputs.rows, routing, inputs.weights), routing)

    def backward(
        self, inputs: UnpermuteInputs, results: Routing, cotangents: jax.Array, params: BwdParams
    ) -> dict[str, Any]:
        gradients = {}
        if inputs.wants("rows"):
            gradients["rows"] = self.movement.gather(cotangents, results, inputs.weights)
        if inputs.wants("weights"):
            gradients["weights"] = self.movement.dots(cotangents, inputs.rows, results).astype(inputs.weights.dtype)
        return gradients
