"""Every option of every op: a backend computes it or declines it by name, in both directions, and a case has it."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from tests.kernels.conftest import H100
from tests.support.unoptimised import unoptimised
from tilewright.kernels import OPS, kernel
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import Choice
from tilewright.kernels.op.inputs import OpInputs
from tilewright.kernels.triton.interpreter import interpret_triton
from tilewright.ops.kernel.prepared import prepared
from tilewright.ops.types import Direction
from tilewright.ops.utils.device import current_device

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")

WITHOUT_EFFECT = frozenset(
    {
        "precision", "transpose_lhs", "transpose_rhs", "vocab_first", "kv_starts", "left", "right", "q_length",
        "gradient_epsilon", "activation", "group_sizes", "row_format", "state_indices",
    }
)  # fmt: skip
"""Options that change no result on a CPU, or whose default is not a call of the same arrays."""

WITHOUT_CASE: dict[str, Any] = {
    "precision": jax.lax.Precision.HIGHEST,
    "is_part": True,
    "keeps_gradients": True,
    "only_maps": True,
    "mask": jax.ShapeDtypeStruct((2, 5), np.bool_),
}
"""Values of options that no case has: the mask of kl's small case, and what only an op's own code passes."""

WITHOUT_ROW: dict[str, frozenset[str]] = {
    "precision": frozenset({"hopper", "triton", "xla", "ragged_dot", "cuda", "cudnn", "fa4", "tpu"}),
    "kv_starts": frozenset({"triton", "tpu", "xla"}),
    "eps": frozenset({"triton", "xla"}),
    "weight_offset": frozenset({"triton", "xla"}),
    "is_part": frozenset({"hopper", "triton", "tpu", "xla"}),
    "keeps_gradients": frozenset({"hopper", "triton", "tpu", "xla"}),
    "only_maps": frozenset({"triton", "xla"}),
    "mask": frozenset({"xla"}),
    "key_scale": frozenset({"xla"}),
    "value_scale": frozenset({"xla"}),
}
"""The backends that serve an option which no row of an op's capability table has."""


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


@functools.cache
def options_with_a_row(kind: type[OpInputs]) -> set[str]:
    """The options of the capability tables of a class of inputs, which say who serves them."""
    found: set[str] = set()
    for op in OPS:
        if kernel(op).inputs_type is kind:
            for case in kernel(op).cases.options.values():
                args, kwargs = dataclasses.replace(case, **kernel(op).cases.brief).arguments()
                inputs = kernel(op).inputs_of(prepared(kernel(op), args, kwargs, concrete=False)[0])
                found |= set(inputs.given())
    return found


@pytest.mark.parametrize("op", OPS)
def test_who_serves_the_options_that_no_capability_table_has(op: str) -> None:
    directions = DIRECTIONS if kernel(op).differentiable else DIRECTIONS[:1]
    for name in options_of(op) - options_with_a_row(kernel(op).inputs_type):
        assert name in WITHOUT_ROW, f"{name} needs a row in the capability table of {op}, or an entry of WITHOUT_ROW"
        for backend in backends_of(op):
            for direction in directions:
                is_served = name in backend.served(direction)
                assert is_served == (backend.name in WITHOUT_ROW[name]), (type(backend), direction, name)


@pytest.mark.parametrize("op", [op for op in OPS if any(".triton." in each for each in kernel(op).backends.where)])
def test_triton_multiplies_float32_as_precisely_as_jax_is_told_to(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each product of every kernel of both directions says so: the language's default is TensorFloat-32."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    backend = next(each for each in backends_of(op) if each.name == "triton")
    monkeypatch.setattr(jax, "device_count", lambda *_: 1)  # with several a vocabulary may be split
    builder, said = type(interpreter.interpreter_builder), set()
    multiply = builder.create_dot

    def create_dot(self: Any, left: Any, right: Any, sums: Any, precision: Any, *rest: Any) -> Any:
        said.add(str(precision).rpartition(".")[2])
        return multiply(self, left, right, sums, precision, *rest)

    monkeypatch.setattr(builder, "create_dot", create_dot)
    inputs = _inputs(op, kernel(op).cases.small)
    with unoptimised(), interpret_triton(), jax.default_matmul_precision("highest"):
        if why := backend.not_supported_reasons(inputs.structs, H100, "forward"):
            pytest.skip("; ".join(why))
        forward = Choice("triton", backend.heuristic(inputs.structs, H100, "forward"))
        run = jax.jit(lambda inputs: kernel(op).forward_results(kernel(op).completed(inputs), forward))
        results = jax.block_until_ready(run(inputs))
        if kernel(op).differentiable:
            backward = Choice("triton", backend.heuristic(inputs.structs, H100, "backward"))
            cotangents = tuple(jax.tree.leaves(kernel(op).outputs(inputs, results)))
            pull_back = jax.jit(functools.partial(kernel(op).backward, cfg=backward))
            jax.block_until_ready(pull_back(kernel(op).residuals(results), cotangents, inputs))
    assert said <= {"TF32x3", "IEEE"}


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
