"""Every option of every op: a backend computes it or declines it by name, in both directions, and a case has it."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from tilewright.kernels import OPS, kernel
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.inputs import OpInputs
from tilewright.ops.kernel.prepared import prepared
from tilewright.ops.types import Direction
from tilewright.ops.utils.device import current_device

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")

WITHOUT_EFFECT = frozenset(
    {
        "precision", "transpose_lhs", "transpose_rhs", "vocab_first", "kv_starts", "left", "right", "q_length",
        "gradient_epsilon", "activation", "group_sizes",
    }
)  # fmt: skip
"""Options that change no result on a CPU, or whose default is not a call of the same arrays."""

WITHOUT_CASE: dict[str, Any] = {
    "precision": jax.lax.Precision.HIGHEST,
    "is_part": True,
    "keeps_gradients": True,
    "mask": jax.ShapeDtypeStruct((2, 5), np.bool_),
}
"""Values of options that no case has: the mask of kl's small case, and what only an op's own code passes."""


def options_of(op: str) -> set[str]:
    """The names of the options of an op."""
    fields = kernel(op).inputs_type.optional_fields()
    return {field.name for field in fields if field.metadata.get("role", "option") == "option"}


def backends_of(op: str) -> list[Backend[Any, Any, Any, Any]]:
    return list(kernel(op).backends.usable)


@functools.cache
def calls_of(kind: type[OpInputs]) -> dict[str, tuple[str, OpInputs]]:
    """For each option of a class of inputs an op and an abstract call that has it, as far as cases do."""
    found: dict[str, tuple[str, OpInputs]] = {}
    for op in OPS:
        if kernel(op).inputs_type is kind:
            for case in cases_of(op):
                args, kwargs = case.arguments()
                inputs = kernel(op).inputs_of(prepared(kernel(op), args, kwargs, concrete=False)[0])
                for name in inputs.given():
                    found.setdefault(name, (op, inputs))
    op = next(each for each in OPS if kernel(each).inputs_type is kind)
    for name in WITHOUT_CASE.keys() & options_of(op) - found.keys():
        args, kwargs = kernel(op).cases.small.arguments()
        inputs = kernel(op).inputs_of(prepared(kernel(op), args, kwargs, concrete=False)[0])
        found[name] = (op, inputs.replace(**{name: WITHOUT_CASE[name]}))
    return found


def cases_of(op: str) -> Iterator[Any]:
    """The small case, the rows of the capability table, and the small case with each number that is an option."""
    cases = kernel(op).cases
    yield cases.small
    for case in (cases.options or cases.by_device["cpu"]).values():
        yield dataclasses.replace(case, **cases.brief)
    fields = {field.name for field in dataclasses.fields(cases.small)}
    for field in kernel(op).inputs_type.optional_fields():
        if field.name in fields and type(field.default) is float:
            yield dataclasses.replace(cases.small, **{field.name: field.default + 0.25})


@pytest.mark.parametrize("op", OPS)
def test_a_backend_names_options_of_its_op(op: str) -> None:
    for backend in backends_of(op):
        for direction in DIRECTIONS:
            assert backend.served(direction) <= options_of(op), type(backend)


@pytest.mark.parametrize("op", OPS)
def test_every_option_has_a_case(op: str) -> None:
    assert options_of(op) == calls_of(kernel(op).inputs_type).keys()


@pytest.mark.parametrize("op", OPS)
def test_what_a_backend_does_not_name_it_declines(op: str) -> None:
    device = current_device()
    for name, (_, inputs) in calls_of(kernel(op).inputs_type).items():
        for backend in backends_of(op):
            for direction in DIRECTIONS:
                why = backend.not_supported_reasons(inputs, device, direction)
                declined = [each for each in why if each.startswith(f"does not serve {name}")]
                assert bool(declined) == (name not in backend.served(direction)), (type(backend), direction, name)


@pytest.mark.parametrize("op", OPS)
def test_the_backend_for_every_device_serves_every_option(op: str) -> None:
    backend = next(each for each in backends_of(op) if each.name == "xla")
    for direction in DIRECTIONS if kernel(op).differentiable else DIRECTIONS[:1]:
        assert backend.served(direction) == options_of(op)


@pytest.mark.parametrize("op", OPS)
def test_an_option_that_is_served_changes_the_results(op: str) -> None:
    """With the option at its default, the same arrays give other results, so the backend does read it."""
    found = {name: case for case in cases_of(op) for name in _inputs(op, case).given() if name not in WITHOUT_EFFECT}
    for name, case in found.items():
        inputs = _inputs(op, case)
        default = next(field.default for field in inputs.optional_fields() if field.name == name)
        without = inputs.replace(**{name: default})
        if kernel(op).results(inputs.structs) != kernel(op).results(without.structs):
            continue
        with_option, at_default = (_results(op, each) for each in (inputs, without))
        same = [np.array_equal(a, b, equal_nan=True) for a, b in zip(with_option, at_default, strict=True)]
        assert not all(same), name


def _inputs(op: str, case: Any) -> Any:
    args, kwargs = case.arguments()
    (inputs,), _ = kernel(op).bind(args, kwargs)
    return inputs


def _results(op: str, inputs: Any) -> list[np.ndarray]:
    backend = next(each for each in backends_of(op) if each.name == "xla")
    params = backend.heuristic(inputs.structs, current_device(), "forward")
    run = jax.jit(lambda inputs: backend.forward(kernel(op).completed(inputs), params))
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(run(inputs))]
