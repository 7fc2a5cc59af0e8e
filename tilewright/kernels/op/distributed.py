"""Ops over the devices of a mesh axis, called inside ``shard_map`` by each of them with its part of the arrays.

Their backends are plans: ways to move data between the devices, by collectives or by a kernel, around calls of other
ops on the parts. A plan is chosen like any backend: explained, measured on a mesh, locked, agreed by all processes.
"""

import abc
import contextlib
import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import numpy as np
from jax import lax

from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import Choice, Platform
from tilewright.kernels.op.choosing import ChoosingOp
from tilewright.kernels.op.inputs import OpInputs, static
from tilewright.kernels.op.portfolio import Portfolio
from tilewright.kernels.op.sharding import AxisName, Partitioning, axis_names, vary_over, varying_axes
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.stable_ids import stable_id


class DistributedInputs(OpInputs):
    """A device's part of a call over the devices of a mesh axis.

    Attributes:
      devices: the number of devices along the axis.
      strategy: the name of the plan that the caller wants; "auto" for any.
      axis: the mesh axis, or several. Its name changes no program, so it is in no key.
      kernel: that of the calls that a plan makes; set before a plan runs.
    """

    devices: int = static(kw_only=True)
    strategy: str = static(default="auto", role="call", kw_only=True)
    axis: AxisName = static(default="devices", role="stage", kw_only=True)
    kernel: Any = static(default=None, role="stage", kw_only=True)


@stable_id("tilewright/distributed.PlanParams")
@dataclasses.dataclass(frozen=True, slots=True)
class PlanParams:
    """The config of a plan.

    Attributes:
      parts: the config of every call that a device makes; ``None`` chooses one for each.
    """

    parts: Any = None


class Plan[Inputs: DistributedInputs, Results](Backend[Inputs, Results, PlanParams, PlanParams], abc.ABC):
    """A way to compute a call over several devices; its name is a strategy.

    Attributes:
      stands_for: strategies without a backward pass, for whose gradients this plan may be taken.
    """

    platform: ClassVar[Platform] = Platform.MESH
    forward_params: ClassVar[type] = PlanParams
    backward_params: ClassVar[type] = PlanParams
    forward_mode: ClassVar[bool] = True
    symbolic_dimensions: ClassVar[bool] = True
    stands_for: ClassVar[frozenset[str]] = frozenset()

    @abc.abstractmethod
    def plan_reasons(self, inputs: Inputs, device: Device, direction: Direction) -> list[str]:
        """Every reason why the plan cannot serve a call, beside the caller's wish for another one."""

    @abc.abstractmethod
    def is_best(self, inputs: Inputs, device: Device, direction: Direction) -> bool:
        """True if a model predicts the least time for it."""

    def reasons(self, inputs: Inputs, device: Device, direction: Direction) -> list[str]:
        why = self.plan_reasons(inputs, device, direction)
        wanted = {"auto", self.name} | (self.stands_for if direction == "backward" else frozenset())
        return why if inputs.strategy in wanted else [f"the caller wants strategy={inputs.strategy!r}", *why]

    def candidates(self, inputs: Inputs, device: Device, direction: Direction) -> Iterable[PlanParams]:
        return [PlanParams()]

    def deprioritized(self, inputs: Inputs, device: Device, direction: Direction) -> bool:
        return not self.is_best(inputs, device, direction)


class TracedPlan[Inputs: DistributedInputs, Results](Plan[Inputs, Results], abc.ABC):
    """A plan that JAX differentiates: an op of such plans has no gradients of its own."""

    def backward(self, inputs: Inputs, results: Results, cotangents: Results, params: PlanParams) -> dict[str, Any]:
        raise NotImplementedError("JAX differentiates the forward pass of this plan")


class DistributedOp[Inputs: DistributedInputs, Results](ChoosingOp[Inputs, Results], abc.ABC):
    """An op whose backends are plans; ``platform`` of its inputs is that of the calls on the parts.

    Attributes:
      kernel: the op whose calls a plan makes; ``None`` if it needs none.
    """

    kernel: ClassVar[ChoosingOp[Any, Any] | None] = None

    def check_strategy(self, inputs: Inputs, device: Device) -> None:
        """Raises unless there is a plan of the name that the caller gave, which can serve the call.

        Raises:
          ValueError: no plan has the name, or it cannot serve the call.
        """
        if inputs.strategy == "auto":
            return
        plans = {each.name: each for each in self.backends.usable}
        if inputs.strategy not in plans:
            names = ", ".join(map(repr, ("auto", *plans)))
            raise ValueError(f"strategy={inputs.strategy!r} must be one of {names}")
        why = plans[inputs.strategy].not_supported_reasons(inputs, device, "forward")
        if why:
            raise ValueError(f"strategy={inputs.strategy!r} cannot serve this call: {'; '.join(why)}")

    def completed(self, inputs: Inputs) -> Inputs:
        """The inputs with the kernel of a plan's calls, and with types that vary over the axis, as all results do."""
        axes = frozenset[str]()
        with contextlib.suppress(NameError):  # while a program is only described, there is no axis
            axes = varying_axes(lax.axis_index(inputs.axis))
        return vary_over(axes | varying_axes(inputs), inputs).replace(kernel=self.kernel)

    def partitioning(self, inputs: Inputs) -> Partitioning | None:
        """None: the caller's ``shard_map`` has split the call."""
        return None

    def _allowed(self, inv: Invocation[Choice, Any]) -> tuple[str, ...] | None:
        return None

    def unmeasurable(self, inv: Invocation[Choice, Any]) -> str:
        found, wanted = len(jax.local_devices(backend=inv.target.kind)), self.inputs_of(inv).devices
        return "" if found >= wanted else f"needs {wanted} devices of this process, which has {found}"

    def measured_on(self, inv: Invocation[Choice, Any]) -> jax.sharding.Mesh:
        """A mesh of this process's devices with the axes of the call."""
        inputs = self.inputs_of(inv)
        names = axis_names(inputs.axis)
        devices = np.array(jax.local_devices(backend=inv.target.kind)[: inputs.devices])
        # Of several axes a call sees only the product, so all devices are along the first one.
        return jax.sharding.Mesh(devices.reshape(-1, *(1 for _ in names[1:])), names)


class TracedOp[Inputs: DistributedInputs, Results](DistributedOp[Inputs, Results], Portfolio[Inputs, Results], abc.ABC):
    """An op whose plans JAX differentiates: one choice is for both passes, and is measured with both."""

    differentiable: ClassVar[bool] = True
    measured_with_gradients: ClassVar[bool] = True

    def resolve_config(self, cfg: object, inv: Invocation[Choice, Any]) -> Choice | None:
        """A plan as it is; any other config is for every call that a device makes, in the plan that the model takes."""
        if isinstance(cfg, Choice) and self.backends.find(cfg) is not None:
            return super().resolve_config(cfg, inv)
        best = self.heuristic_cfg(inv)
        return dataclasses.replace(best, params=PlanParams(cfg))
