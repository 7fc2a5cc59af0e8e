"""What every backend of the norms must do, on cases of any size and dtype; a backend's test is a subclass."""

import contextlib
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.kernels.norms.cases import NormCase
from tilewright.kernels.norms.inputs import NormInputs, NormProblem, NormResults
from tilewright.kernels.norms.reference import norm_reference
from tilewright.kernels.registry import Implementation
from tilewright.ops.execution.numerics import violations

CASES = {
    case.name: case
    for case in (
        NormCase("rms", rows=(2, 3), columns=64),
        NormCase("rms_residual_gemma", rows=(7,), columns=130, dtype="bfloat16", residual=True, weight_offset=1.0),
        NormCase("rms_float16", rows=(5,), columns=127, dtype="float16", weight_dtype="float32", residual=True),
        NormCase("rms_bare", rows=(3,), columns=32, dtype="bfloat16", weight=False),
        NormCase("rms_one_column", rows=(9,), columns=1, eps=0.1),
        NormCase("rms_one_row", rows=(), columns=48, weight_dtype="float32", dtype="bfloat16"),
        NormCase("rms_4097", rows=(1,), columns=4097, residual=True),
        NormCase("rms_huge_eps", rows=(4,), columns=40, eps=1e6),
        NormCase("rms_no_rows", rows=(0, 2), columns=16, residual=True),
        NormCase("layer", "layer", rows=(17,), columns=64, bias=True),
        NormCase("layer_residual", "layer", rows=(3, 2), columns=130, dtype="bfloat16", bias=True, residual=True),
        NormCase("layer_no_bias", "layer", rows=(5,), columns=127, dtype="float16", weight_dtype="float32"),
        NormCase("layer_bias_alone", "layer", rows=(5,), columns=20, weight=False, bias=True),
        NormCase("layer_bare", "layer", rows=(2,), columns=33, weight=False, residual=True),
        NormCase("layer_one_column", "layer", rows=(3,), columns=1, bias=True),
        NormCase("layer_2051", "layer", rows=(1,), columns=2051, bias=True),
        NormCase("layer_mean_1000", "layer", rows=(4,), columns=600, bias=True, shift=1000.0),
        NormCase("layer_no_rows", "layer", rows=(0,), columns=16, bias=True),
    )
}

type Found = dict[str, Any]


def oracle(inputs: NormInputs, cotangents: NormResults, dtype: Any = np.float64) -> Found:
    """Results and gradients of the formula in float64, by JAX's own derivative, of x + residual as it is rounded."""
    with jax.enable_x64(True):
        total = inputs.x if inputs.residual is None else inputs.x + inputs.residual
        exact = jax.tree.map(
            lambda x: jnp.asarray(np.asarray(x, dtype)), dataclasses.replace(inputs, x=total, residual=None)
        )
        (out, total), pull_back = jax.vjp(norm_reference, exact)
        d_total = np.zeros(total.shape) if cotangents.total is None else np.asarray(cotangents.total, dtype)
        (d,) = pull_back((jnp.asarray(np.asarray(cotangents.out, dtype)), jnp.asarray(d_total)))
        found = {"out": out, "total": total, "d_x": d.x, "d_residual": d.x, "d_weight": d.weight, "d_bias": d.bias}
    if inputs.residual is None:
        del found["total"], found["d_residual"]
    return {name: np.asarray(x) for name, x in found.items() if x is not None}


def cotangents_of(inputs: NormInputs, seed: int = 1) -> NormResults:
    random = np.random.default_rng(seed)
    d_out, d_total = (jnp.asarray(random.standard_normal(inputs.x.shape), inputs.x.dtype) for _ in range(2))
    return NormResults(d_out, None if inputs.residual is None else d_total)


def run(backend: Implementation, inputs: NormInputs, cotangents: NormResults, params: tuple[Any, Any]) -> Found:
    """All that a backend computes of a call."""

    @jax.jit
    def both(inputs: NormInputs, cotangents: NormResults) -> Found:
        results = backend.forward(inputs, params[0])
        gradients = backend.backward(inputs, results, cotangents, params[1])
        found = {"out": results.out, "total": results.total, **{f"d_{name}": x for name, x in gradients.items()}}
        return {name: x for name, x in found.items() if x is not None}

    return jax.block_until_ready(both(inputs, cotangents))


def check(got: Found, want: Found) -> None:
    assert got.keys() == want.keys()
    for name, exact in want.items():
        rounded = np.asarray(jnp.asarray(exact, got[name].dtype), np.float64)  # what no result can do better than
        said = violations(np.asarray(got[name]), exact, rounded)
        assert not said, f"{name}: {said}"


class NormConformance:
    """A backend gives what the formula gives in float64, for every case that it says it can serve."""

    backend: ClassVar[Implementation]
    machine: ClassVar[Callable[[], AbstractContextManager[Any]]] = staticmethod(contextlib.nullcontext)

    def params(self, problem: NormProblem) -> tuple[Any, Any]:
        raise NotImplementedError

    @pytest.mark.parametrize("name", CASES)
    def test_results_and_gradients(self, name: str):
        inputs = CASES[name].inputs()
        cotangents = cotangents_of(inputs)
        with self.machine():
            got = run(self.backend, inputs, cotangents, self.params(NormProblem.of(inputs)))
        check(got, oracle(inputs, cotangents))

    @pytest.mark.parametrize("kind", ["rms", "layer"])
    def test_constant_rows(self, kind: Any):
        inputs = NormCase("", kind, (3,), 50, bias=kind == "layer").inputs()
        inputs = dataclasses.replace(inputs, x=jnp.ones_like(inputs.x) * jnp.asarray([[0.0], [2.0], [-0.5]]))
        cotangents = cotangents_of(inputs)
        with self.machine():
            got = run(self.backend, inputs, cotangents, self.params(NormProblem.of(inputs)))
        want = oracle(inputs, cotangents)
        assert all(np.all(np.isfinite(x)) for x in got.values())
        for name in ("out", "d_weight"):
            np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-5)

    def test_a_row_that_is_not_finite_spoils_no_other(self):
        inputs = NormCase("", "layer", (6,), 70, bias=True).inputs()
        clean, cotangents = inputs.x, cotangents_of(inputs)
        with self.machine():
            params = self.params(NormProblem.of(inputs))
            want = run(self.backend, inputs, cotangents, params)
            spoiled = dataclasses.replace(inputs, x=clean.at[2, 3].set(jnp.nan))
            got = run(self.backend, spoiled, cotangents, params)
        others = np.asarray([0, 1, 3, 4, 5])
        for name in ("out", "d_x"):
            assert np.all(np.isnan(got[name][2]))
            np.testing.assert_array_equal(got[name][others], want[name][others])
