"""Conformance of the Hopper backend of the layer of experts, whose matmuls are interpreted on the CPU."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, ClassVar
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.conftest import H100
from tests.kernels.experts.conformance import CASES, ExpertsConformance, inputs_of
from tests.support.mosaic_interpret import interpret_mosaic
from tilewright.kernels.experts.cases import ExpertsCase
from tilewright.kernels.experts.hopper import HopperExperts
from tilewright.kernels.experts.inputs import ExpertsInputs, ExpertsResults
from tilewright.kernels.experts.params import ExpertsBackwardParams, ExpertsForwardParams
from tilewright.kernels.experts.triton import TritonExperts
from tilewright.kernels.experts.xla import XlaExperts
from tilewright.kernels.hopper.matmul.params import MatmulParams
from tilewright.kernels.matmul.hopper import products
from tilewright.kernels.matmul.hopper.params import HopperGatedBackwardParams, HopperGroupedBackwardParams
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.permutation.movements import MOVEMENTS
from tilewright.ops.types import Direction

_PAIR = MatmulParams(128, 128, 3, cluster_m=2, band=1)
_SIDE = MatmulParams(128, 128, 3, cluster_n=2, band=1)


_CASES = ("bfloat16", "float16", "gpt_oss_bfloat16", "capacity_of_one", "skewed", "one_token", "no_tokens", "no_n")


MOVEMENT = HopperExperts.movement
"""As it is without the fixture."""


@pytest.fixture(autouse=True)
def few_sms() -> Iterator[None]:
    """Few programs, so that each has several items; and rows that XLA moves."""
    with (
        mock.patch.object(products, "num_sms", return_value=4),
        mock.patch.object(HopperExperts, "movement", return_value=MOVEMENTS[Platform.XLA]),
    ):
        yield


class TestHopper(ExpertsConformance):
    """Two consumers, and clusters that share what the matmuls do not gather, in both passes."""

    # Activations and dtypes are those of the conformance of the matmuls, of which a case takes the interpreter seconds.
    cases = tuple(case for case in CASES if case.name in _CASES)
    backend = HopperExperts()
    device = H100
    machine = staticmethod(interpret_mosaic)
    gathers: ClassVar[bool] = True

    def adapted(self, case: ExpertsCase) -> ExpertsCase:
        return dataclasses.replace(case, dtype="float16" if case.dtype == "float16" else "bfloat16")

    def params(self, inputs: ExpertsInputs) -> tuple[Any, Any]:
        backward = HopperGatedBackwardParams(_PAIR, _PAIR)
        of_grouped = HopperGroupedBackwardParams(_PAIR, _SIDE)
        forward = ExpertsForwardParams(_PAIR, _PAIR, gathers=self.gathers)
        return forward, ExpertsBackwardParams(_PAIR, backward, of_grouped, gathers=self.gathers)


class TestCopiedRows(TestHopper):
    """The same of rows that are copied before."""

    cases = CASES[1:2]
    repeated = CASES[1]
    poisons = ("dropped",)
    gathers = False


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_both_ways_are_candidates(direction: Direction):
    """The one that gathers is first; without such a matmul it is declined."""
    inputs = inputs_of(dataclasses.replace(CASES[1], tokens=4096, d=512, n=256)).structs
    backend, other = HopperExperts(), XlaExperts()
    listed: list[Any] = list(backend.candidates(inputs, H100, direction))
    assert [params.gathers for params in listed[:4]] == [True, False] * 2
    assert not any(backend.config_reasons(inputs, H100, direction, params) for params in listed)
    first, *rest = list[Any](other.candidates(inputs, H100, direction))
    assert not any(params.gathers for params in (first, *rest))
    found = other.config_reasons(inputs, H100, direction, dataclasses.replace(first, gathers=True))
    assert found == ["its matmuls take rows that were copied"]


@pytest.mark.parametrize("name", ["bfloat16", "biases"])
def test_both_ways_give_the_same_gradients(name: str):
    """Bit for bit, and the one that gathers copies no rows."""
    case = next(case for case in CASES if case.name == name)
    backend, inputs = HopperExperts(), inputs_of(case)
    cotangents = ExpertsResults(jnp.asarray(np.random.default_rng(1).standard_normal(inputs.x.shape), case.dtype))
    forward, backward = TestHopper().params(inputs)
    copying = dataclasses.replace(backward, gathers=False)
    gather = mock.Mock(wraps=MOVEMENTS[Platform.XLA].gather)
    with interpret_mosaic(), mock.patch.object(type(MOVEMENTS[Platform.XLA]), "gather", gather):
        kept = jax.jit(functools.partial(backend.forward, params=forward))(inputs)
        run = lambda params: jax.jit(functools.partial(backend.backward, params=params))(inputs, kept, cotangents)
        got = jax.block_until_ready(run(backward))
        assert not gather.called
        want = jax.block_until_ready(run(copying))
        assert gather.call_count == 2
    assert got.keys() == want.keys() == inputs.gradients.keys()
    for name, x in want.items():
        np.testing.assert_array_equal(np.asarray(got[name]).view(np.uint8), np.asarray(x).view(np.uint8), err_msg=name)


def test_more_choices_than_the_kernels_that_move_rows_take():
    """Triton declines the call, and on Hopper XLA moves the rows."""
    inputs = inputs_of(dataclasses.replace(CASES[1], tokens=8, d=64, n=64, num_experts=128, k=65)).structs
    assert "a token may have 64 choices, got k=65" in TritonExperts().not_supported_reasons(inputs, H100, "forward")
    assert not HopperExperts().not_supported_reasons(inputs, H100, "forward")
    assert MOVEMENT(HopperExperts(), inputs, H100) is MOVEMENTS[Platform.XLA]
