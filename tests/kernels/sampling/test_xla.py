"""Conformance of the XLA backend of ``sample``, and its sums of integers."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.sampling.conformance import SampleConformance, strange
from tilewright.kernels.sampling.inputs import SampleInputs
from tilewright.kernels.sampling.ordered import mass, ordered, value_of
from tilewright.kernels.sampling.xla.sample import XlaSample
from tilewright.ops.utils.datacarrier import FwdParams


class TestXla(SampleConformance):
    backend = XlaSample()

    def params(self, problem: SampleInputs) -> tuple[Any, Any]:
        return FwdParams(), None


def test_integers_in_the_order_of_numbers():
    x = np.unique(np.where(np.isnan(strange()), -np.inf, strange()))
    x = [*x[x != 0.0].tolist(), 0.0]
    found = np.asarray(ordered(jnp.asarray(sorted(x), jnp.float32)))
    assert (np.diff(found.astype(np.int64)) > 0).all()
    assert np.asarray(value_of(jnp.asarray(found))).tobytes() == np.array(sorted(x), np.float32).tobytes()
    zeros = np.asarray(ordered(jnp.array([0.0, -0.0, np.nan, -np.nan, -np.inf], jnp.float32)))
    assert len(set(zeros[:2].tolist())) == len(set(zeros[2:].tolist())) == 1


@pytest.mark.parametrize("size", [1, 2, 100, 5000, 70000])
def test_masses_are_those_of_any_order(size: int):
    random = np.random.default_rng(size)
    weights = np.exp(-3 * np.abs(random.standard_normal((2, size)))).astype(np.float32)
    kept = random.random((2, size)) < 0.7
    weights[1] = 1.0
    got = np.asarray(mass(jnp.asarray(weights), jnp.asarray(kept)))
    np.testing.assert_allclose(got, np.where(kept, weights, 0).sum(-1, dtype=np.float64), rtol=2e-7)
    order = random.permutation(size)
    again = np.asarray(mass(jnp.asarray(weights[:, order]), jnp.asarray(kept[:, order])))
    assert again.tobytes() == got.tobytes()


def test_a_mass_of_many_small_weights_beside_a_large_one():
    weights = np.full((1, 1 << 17), 2.0**-30, np.float32)
    weights[0, 77] = 1.0
    got = np.asarray(mass(jnp.asarray(weights), jnp.ones(weights.shape, bool)))
    np.testing.assert_allclose(got, weights.sum(-1, dtype=np.float64), rtol=1e-7)
