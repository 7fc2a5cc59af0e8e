"""Configs of calls, compiled for GPUs that are not here."""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax

import tilewright
from tests.aot.compiler import KernelReport, compile_for_h100
from tilewright.kernels import kernel
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.cases import Case
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.op.inputs import OpInputs
from tilewright.kernels.triton import recorded_launches
from tilewright.kernels.triton.compiler import Report, report
from tilewright.ops.kernel.prepared import prepared
from tilewright.ops.types import Direction
from tilewright.ops.utils.known_devices import find_device

CARDS = {
    "a100": find_device("NVIDIA A100-SXM4-80GB").device,
    "rtx4090": find_device("NVIDIA GeForce RTX 4090").device,
    "h100": find_device("NVIDIA H100 80GB HBM3").device,
    "b200": find_device("NVIDIA B200").device,
    "rtx5090": find_device("NVIDIA GeForce RTX 5090").device,
}

type Reports = Sequence[KernelReport | Report]


@dataclasses.dataclass(frozen=True)
class Compilation:
    """One config of one call, as shapes, for a card."""

    op: str
    backend: Backend[Any, Any, Any, Any]
    call: str
    card: str
    direction: Direction
    number: int
    inputs: Any
    params: Any

    @property
    def name(self) -> str:
        return f"{self.op}-{self.backend.name}-{self.call}-{self.card}-{self.direction}-{self.number}"

    def program(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The function to compile, and its arguments' shapes."""
        op: Any = kernel(self.op)
        backend, params = self.backend, self.params
        if self.direction == "forward":
            return lambda inputs: backend.forward(inputs, params), (self.inputs,)
        results = op.results(self.inputs)
        outputs = tuple(jax.tree.leaves(jax.eval_shape(op.outputs, self.inputs, results)))

        def backward(inputs: Any, residuals: Any, outputs: Any) -> Any:
            return backend.backward(inputs, residuals, op.cotangents(inputs, residuals, outputs), params)

        return backward, (self.inputs, op.residuals(results), outputs)

    def reports(self) -> Reports:
        """What the compiler says of each kernel."""
        function, arguments = self.program()
        if self.backend.platform is not Platform.TRITON:
            return compile_for_h100(function, *arguments)
        device = CARDS[self.card]
        assert device.capability is not None
        with tilewright.target_device(device.name), recorded_launches() as launches:
            jax.eval_shape(function, *arguments)
        return [report(launch, device.capability) for launch in launches]


def _as_prepared(call: str, direction: Direction, inputs: Any) -> OpInputs:
    return inputs


def _none(compilation: Compilation) -> int:
    return 0


def _some(compilation: Compilation, reports: Reports) -> bool:
    return bool(reports)


@dataclasses.dataclass(frozen=True)
class Shipped:
    """Calls of an op by one backend, and what may be said of their kernels.

    Attributes:
      cases: the calls by name.
      tuned: the names of calls of which every candidate is compiled, of the others only the first choice; ``None`` for
        all.
      changed: the inputs of a call for a direction, from those that are prepared.
      distinct: what decides of which params a kernel is compiled; the first of those that are alike is.
      spills: bytes that a kernel may spill.
      counted: which bytes these are.
      expected: True if the kernels are those that the config should have.
    """

    op: str
    backend: Backend[Any, Any, Any, Any]
    cases: Mapping[str, Case]
    cards: Sequence[str] = ("h100",)
    directions: Sequence[Direction] = ("forward", "backward")
    tuned: Sequence[str] | None = None
    changed: Callable[[str, Direction, Any], OpInputs] = _as_prepared
    distinct: Callable[[Any], Hashable] = lambda params: params
    spills: Callable[[Compilation], int] = _none
    counted: Literal["spill_loads", "spill_stores"] = "spill_stores"
    expected: Callable[[Compilation, Any], bool] = _some

    def compilations(self) -> Iterator[Compilation]:
        """Every config that selection or tuning can take for the calls.

        Raises:
          ValueError: the backend does not serve one of them.
        """
        for (call, case), direction in itertools.product(self.cases.items(), self.directions):
            args, kwargs = case.abstract_arguments()
            # There, and not on the devices of this process, over which XLA might split a call.
            with tilewright.target_device(CARDS[self.cards[0]].name):
                inv, _ = prepared(kernel(self.op), args, kwargs, concrete=False)
            inputs = self.changed(call, direction, kernel(self.op).inputs_of(inv))
            for card in self.cards:
                for number, params in enumerate(self._params(call, inputs, card, direction)):
                    yield Compilation(self.op, self.backend, call, card, direction, number, inputs, params)

    def _params(self, call: str, inputs: Any, card: str, direction: Direction) -> list[Any]:
        device = CARDS[card]
        with tilewright.target_device(device.name):
            if why := self.backend.not_supported_reasons(inputs, device, direction):
                if direction == "backward":  # as of operands in float8
                    return []
                raise ValueError(f"{self.backend.name} does not serve {call!r}: {why}")
            first = self.backend.heuristic(inputs, device, direction)
            if self.tuned is not None and call not in self.tuned:
                return [first]
            every = [first, *self.backend.candidates(inputs, device, direction)]
        found: dict[Hashable, Any] = {}
        for params in every:
            found.setdefault(self.distinct(params), params)
        return list(found.values())

    def faults(self, compilation: Compilation) -> list[str]:
        """What is wrong with the kernels of one of the configs."""
        reports, allowed = compilation.reports(), self.spills(compilation)
        faulty = [each for each in reports if each.serialised or getattr(each, self.counted) > allowed]
        found = [fault for each in (faulty if allowed else reports) for fault in each.faults]
        if not self.expected(compilation, reports):
            found.append(f"its kernels are {[each.name for each in reports]}")
        return found
