"""What every backend of every op must do: an op says once what its cases and its oracle are, a backend where it runs.

The suite of an op subclasses `Conformance`. The test of a backend subclasses that suite, and names the backend, what
stands in for its device, and params.
"""

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.kernels.op.backend import Backend
from tilewright.ops.tuning.numerics import violations
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.device import current_device
from tilewright.ops.utils.serialize import tagged, untagged

type Found = dict[str, Any]
"""Results and gradients by name."""

QUICK: dict[str, bool | int | str] = {"xla_backend_optimization_level": 0}
"""Of programs that run once, such as oracles: most of their time is compilation, which optimising would lengthen."""


def check(
    got: Mapping[str, Any],
    exact: Mapping[str, Any],
    low: Mapping[str, Any] | None = None,
    factor: float = 2.0,
    where: object = "",
) -> None:
    """Fails if anything that the oracle has is not as near to it as the policy asks.

    Args:
      low: the oracle's results in the dtype of the inputs; without it only a rounding of the exact ones is allowed for.
    """
    found = {}
    for name, ref in exact.items():
        rounded = np.asarray(jnp.asarray(ref, got[name].dtype), np.float64) if low is None else low[name]
        found[name] = violations(got[name], ref, rounded, factor)
    wrong = {name: said for name, said in found.items() if said}
    assert not wrong, (where, wrong)


def check_same(got: Mapping[str, Any], want: Mapping[str, Any]) -> None:
    """Fails unless all results are the same, bit for bit but for the kind of a NaN."""
    assert got.keys() == want.keys()
    for name, x in want.items():
        np.testing.assert_array_equal(*(np.asarray(each).astype(np.float64) for each in (got[name], x)), err_msg=name)


def run_both(
    backend: Backend[Any, Any, Any, Any],
    inputs: Any,
    cotangents: Any,
    params: tuple[Any, Any],
    residuals: Callable[[Any], Any] = lambda results: results,
) -> tuple[Any, dict[str, Any]]:
    """The results of a call, and its gradients by the names of the inputs: none without params of the backward pass."""
    results = backend.forward(inputs, params[0])
    if params[1] is None:
        return results, {}
    gradients = backend.backward(inputs, residuals(results), cotangents, params[1])
    return results, {name: gradient for name, gradient in gradients.items() if gradient is not None}


def check_kinds(gradients: Mapping[str, Any], inputs: Any) -> None:
    """Every gradient has the shape and the dtype of what it is the gradient of."""
    for name, struct in inputs.gradients.items():
        assert (gradients[name].shape, gradients[name].dtype) == (struct.shape, struct.dtype), name


@dataclasses.dataclass(frozen=True)
class Poisoned:
    """A call beside the same with something in it that is not finite.

    Attributes:
      reached: the parts of results and gradients that are NaN because of it; all others must be as without.
      zero: parts that are zeros in any case.
    """

    clean: tuple[Any, Any]
    poisoned: tuple[Any, Any]
    reached: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    zero: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def check(self, run: Callable[[Any, Any], Found]) -> None:
        want, got = run(*self.clean), run(*self.poisoned)
        for name in got.keys() & self.zero.keys():
            assert not np.any(got[name][self.zero[name]]), name
        kept = {name: np.ones(x.shape, bool) for name, x in want.items()}
        for name in got.keys() & self.reached.keys():
            assert np.all(np.isnan(got[name][self.reached[name]])), name
            kept[name][self.reached[name]] = False
        check_same(*({name: np.asarray(x)[kept[name]] for name, x in each.items()} for each in (got, want)))


class Conformance[Case, Inputs](abc.ABC):
    """A backend gives what the oracle of the op gives, in every case and direction that it declares to support."""

    backend: ClassVar[Backend[Any, Any, Any, Any]]
    machine: ClassVar[Callable[[], AbstractContextManager[Any]]] = contextlib.nullcontext
    """What stands in for the device, if it is not there."""
    device: ClassVar[Device | None] = None
    """The device that the backend is asked about, if it is not the one in force."""
    deterministic: ClassVar[bool] = True
    together: ClassVar[bool] = False
    """A call of which one direction is declined is not run in the other one either."""

    cases: ClassVar[Sequence[Any]]
    repeated: ClassVar[Any]
    """The case that is run twice."""

    params: Callable[..., Any]
    """What to run with: something that makes several tiles of the cases' sizes."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.cases, ids=self.describe)

    @staticmethod
    def describe(case: Any) -> str:
        """The name of a case among the tests."""
        return str(case.name)

    @abc.abstractmethod
    def inputs(self, case: Case) -> Inputs:
        """What a backend gets of a case."""

    @abc.abstractmethod
    def cotangents(self, inputs: Inputs) -> Any:
        """Random cotangents of the results."""

    @staticmethod
    @abc.abstractmethod
    def named(results: Any, gradients: dict[str, Any]) -> Found:
        """What a backend returns, by the names of the oracle."""

    @staticmethod
    def residuals(results: Any) -> Any:
        """What of the results the backward pass takes."""
        return results

    @abc.abstractmethod
    def oracle(self, inputs: Inputs, cotangents: Any) -> tuple[Found, Found | None]:
        """The exact results, and those in the dtype of the inputs, if rounding the exact ones is too strict."""

    @abc.abstractmethod
    def dtypes(self, inputs: Inputs) -> dict[str, Any]:
        """The dtypes of the results, by the names of the oracle."""

    def adapted(self, case: Case) -> Case:
        """The case in dtypes and sizes that the backend serves."""
        return case

    def factor(self, case: Case) -> float:
        return 2.0

    def params_of(self, inputs: Inputs) -> tuple[Any, Any]:
        """Params of the forward and of the backward pass."""
        both: tuple[Any, Any] = self.params(inputs)
        return both

    def reasons(self, inputs: Any, direction: Direction) -> list[str]:
        return self.backend.not_supported_reasons(inputs.structs, self.device or current_device(), direction)

    def compiled(self, inputs: Any) -> Callable[[Any, Any], Found]:
        """All that the backend declares to support of a call, as a function; skips the test if that is nothing."""
        with type(self).machine():
            declined = {way: self.reasons(inputs, way) for way in ("forward", "backward")}
            if said := declined["forward"] or (declined["backward"] if self.together else []):
                pytest.skip("; ".join(said))
            forward, backward = self.params_of(inputs.structs)
        params = forward, None if declined["backward"] else backward

        @jax.jit
        def both(inputs: Any, cotangents: Any) -> Found:
            results, gradients = run_both(self.backend, inputs, cotangents, params, self.residuals)
            if params[1] is not None:
                check_kinds(gradients, inputs)
            return self.named(results, gradients)

        def run(inputs: Any, cotangents: Any) -> Found:
            with type(self).machine():
                return jax.block_until_ready(both(inputs, cotangents))

        return run

    def check(self, got: Found, inputs: Inputs, cotangents: Any, factor: float = 2.0, where: object = "") -> None:
        """Compares with the oracle what there is of results and gradients."""
        exact, low = self.oracle(inputs, cotangents)
        assert got.keys() <= exact.keys()
        check(got, {name: exact[name] for name in got}, low, factor, where)

    def run_and_check(self, inputs: Inputs, factor: float = 2.0) -> Found:
        cotangents = self.cotangents(inputs)
        got = self.compiled(inputs)(inputs, cotangents)
        for name, dtype in self.dtypes(inputs).items():
            assert got[name].dtype == dtype, name
        self.check(got, inputs, cotangents, factor)
        return got

    def test_results_and_gradients(self, case: Any):
        self.run_and_check(self.inputs(self.adapted(case)), self.factor(case))

    def test_repeats_bitwise(self):
        if not self.deterministic:
            pytest.skip("the backend says that it is not")
        inputs = self.inputs(self.adapted(self.repeated))
        run, cotangents = self.compiled(inputs), self.cotangents(inputs)
        first, second = (run(inputs, cotangents) for _ in range(2))
        assert {n: np.asarray(x).tobytes() for n, x in first.items()} == {
            n: np.asarray(x).tobytes() for n, x in second.items()
        }


class ContainedConformance[Case, Inputs](Conformance[Case, Inputs]):
    """Rows, groups or keys that have no part in a result, or only in some of it."""

    poisons: ClassVar[Sequence[str]]
    """Names of what `poisoned` makes."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        super().pytest_generate_tests(metafunc)
        if "poison" in metafunc.fixturenames:
            metafunc.parametrize("poison", self.poisons)

    @abc.abstractmethod
    def poisoned(self, poison: str) -> Poisoned:
        """A call with and without what is not finite."""

    def test_what_is_not_finite_goes_no_further(self, poison: str):
        call = self.poisoned(poison)
        call.check(self.compiled(call.clean[0]))


def check_candidates(
    backend: Backend[Any, Any, Any, Any], inputs: Any, device: Device, least: int = 2
) -> dict[Direction, list[Any]]:
    """Candidates of both directions: each once, the heuristic first; all serve the call, and survive a cache."""
    found: dict[Direction, list[Any]] = {}
    directions: tuple[Direction, ...] = ("forward", "backward")
    for direction in directions:
        found[direction] = listed = list(backend.candidates(inputs, device, direction))
        assert backend.heuristic(inputs, device, direction) == listed[0]
        assert len(listed) == len(set(listed)) >= least
        for params in listed:
            assert untagged(tagged(params)) == params
            assert not backend.config_reasons(inputs, device, direction, params), params
    return found
