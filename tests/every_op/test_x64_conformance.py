"""Cases of the conformance suites with ``jax_enable_x64`` on, or no promotion: results as without; on an H100, too."""

import dataclasses
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
import pytest

import tilewright
from tests.every_op.matrix import OpCall, strict_promotion
from tests.every_op.test_x64 import every_implementation_lowers
from tests.kernels.flash_attention import conformance as of_attention
from tests.kernels.paged_attention import conformance as of_serving

ATTENTION = {
    each.case.name: dataclasses.replace(each, case=dataclasses.replace(each.case, dtype="bfloat16"))
    for each in of_attention.CASES
    if 0 not in (each.case.q_length, each.case.kv_length)
}
SERVING = {case.name: (op, dataclasses.replace(case, dtype="bfloat16")) for op, case in of_serving.CASES}


def first_of(kinds: Iterable[tuple[str, Any]]) -> list[str]:
    """The first name of each kind."""
    found: dict[Any, str] = {}
    for name, kind in kinds:
        found.setdefault(kind, name)
    return list(found.values())


def attention_kind(each: Any) -> Any:
    """Masks take different ways through the backends."""
    case = each.case
    return case.packed, case.segments, case.lengths, case.bias is not None, each.mask_object


attention_cases = pytest.mark.parametrize(
    "name",
    ATTENTION,
)
serving_cases = pytest.mark.parametrize(
    "name",
    SERVING,
)


def attention_call(name: str) -> OpCall:
    arrays, kwargs = ATTENTION[name].case.arguments()
    if ATTENTION[name].mask_object:
        kwargs["mask"] = of_attention.example_mask(ATTENTION[name].case.score_shape)
    return OpCall("flash_attention", arrays, kwargs)


def serving_call(name: str) -> OpCall:
    op, case = SERVING[name]
    return OpCall(op, *case.arguments())


def results_are_those_without(call: OpCall, setting: AbstractContextManager[None] | None = None) -> None:
    function, arrays = call.training()
    wanted = jax.jit(function)(*arrays)
    with setting or jax.enable_x64(True):
        got = jax.jit(function)(*arrays)
    assert [x.dtype for x in jax.tree.leaves(got)] == [x.dtype for x in jax.tree.leaves(wanted)]
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32)), got, wanted
    )


@attention_cases
def test_attention_gives_what_it_gives_without(name: str):
    results_are_those_without(attention_call(name))


@serving_cases
def test_serving_gives_what_it_gives_without(name: str):
    results_are_those_without(serving_call(name))


@attention_cases
def test_attention_gives_what_it_gives_without_strict_promotion(name: str):
    results_are_those_without(attention_call(name), strict_promotion())


@serving_cases
def test_serving_gives_what_it_gives_without_strict_promotion(name: str):
    results_are_those_without(serving_call(name), strict_promotion())


@attention_cases
def test_attention_lowers_on_an_h100_by_every_implementation(name: str, without_builds):
    call = attention_call(name)
    with tilewright.target_device("NVIDIA H100 80GB HBM3"), jax.enable_x64(True):
        lowered = every_implementation_lowers(call)
    assert len(lowered) > 1


@serving_cases
def test_serving_lowers_on_an_h100_by_every_implementation(name: str, without_builds):
    call = serving_call(name)
    with tilewright.target_device("NVIDIA H100 80GB HBM3"), jax.enable_x64(True):
        lowered = every_implementation_lowers(call)
    assert len(lowered) > 1
