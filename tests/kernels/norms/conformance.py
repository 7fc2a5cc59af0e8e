"""Conformance of the backends of the norms: cases, and the formula in float64."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.conformance import ContainedConformance, Found, Poisoned, run_both
from tilewright.kernels.norms.cases import LayerNormCase, NormCase, RmsNormCase
from tilewright.kernels.norms.inputs import NormInputs, NormResults
from tilewright.kernels.norms.op import norm_reference
from tilewright.kernels.op.backend import Backend

CASES: dict[str, NormCase] = {
    case.name: case
    for case in (
        RmsNormCase("rms", leading=(2,), rows=3, columns=64),
        RmsNormCase("rms_residual_gemma", rows=7, columns=130, dtype="bfloat16", residual=True, weight_offset=1.0),
        RmsNormCase("rms_float16", rows=5, columns=127, dtype="float16", weight_dtype="float32", residual=True),
        RmsNormCase("rms_bare", rows=3, columns=32, dtype="bfloat16", weight=False),
        RmsNormCase("rms_one_column", rows=9, columns=1, eps=0.1),
        RmsNormCase("rms_one_row", rows=1, columns=48, weight_dtype="float32", dtype="bfloat16"),
        RmsNormCase("rms_1025", rows=1, columns=1025, residual=True),
        RmsNormCase("rms_huge_eps", rows=4, columns=40, eps=1e6),
        RmsNormCase("rms_no_rows", leading=(0,), rows=2, columns=16, residual=True),
        RmsNormCase("rms_tiles", leading=(2,), rows=8, columns=128),
        RmsNormCase("rms_tiles_residual", rows=8, columns=128, dtype="bfloat16", residual=True, weight_offset=1.0),
        LayerNormCase("layer", rows=17, columns=64),
        LayerNormCase("layer_residual", leading=(3,), rows=2, columns=130, dtype="bfloat16", residual=True),
        LayerNormCase("layer_no_bias", rows=5, columns=127, dtype="float16", weight_dtype="float32", bias=False),
        LayerNormCase("layer_bias_alone", rows=5, columns=20, weight=False),
        LayerNormCase("layer_bare", rows=2, columns=33, weight=False, bias=False, residual=True),
        LayerNormCase("layer_one_column", rows=3, columns=1),
        LayerNormCase("layer_515", rows=1, columns=515),
        LayerNormCase("layer_mean_1000", rows=4, columns=600, shift=1000.0),
        LayerNormCase("layer_residual_mean_1000", rows=3, columns=515, residual=True, residual_shift=1000.0),
        LayerNormCase("layer_bfloat16_mean_1000", rows=3, columns=600, dtype="bfloat16", residual=True, shift=1000.0),
        LayerNormCase(
            "layer_means_cancel", rows=3, columns=130, dtype="bfloat16", residual=True,
            shift=-1000.0, residual_shift=1000.0,
        ),
        LayerNormCase("layer_no_rows", rows=0, columns=16),
        LayerNormCase("layer_tiles", rows=8, columns=128),
    )
}  # fmt: skip

KINDS: dict[str, type[NormCase]] = {"rms": RmsNormCase, "layer": LayerNormCase}


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


def named(results: NormResults, gradients: dict[str, Any]) -> Found:
    found = {"out": results.out, "total": results.total, **{f"d_{name}": x for name, x in gradients.items()}}
    return {name: x for name, x in found.items() if x is not None}


def run(
    backend: Backend[Any, Any, Any, Any], inputs: NormInputs, cotangents: NormResults, params: tuple[Any, Any]
) -> Found:
    """All that a backend computes of a call; results alone without params of the backward pass."""
    return jax.block_until_ready(jax.jit(lambda *call: named(*run_both(backend, *call, params)))(inputs, cotangents))


class NormConformance(ContainedConformance[NormCase, NormInputs]):
    """A backend of the norms; ``params`` gives those of the forward and of the backward pass."""

    cases = tuple(CASES.values())
    repeated = RmsNormCase("", rows=33, columns=40)
    poisons = ("a row",)
    named = staticmethod(named)

    def inputs(self, case: NormCase) -> NormInputs:
        return case.inputs()

    def cotangents(self, inputs: NormInputs) -> NormResults:
        return cotangents_of(inputs)

    def dtypes(self, inputs: NormInputs) -> dict[str, Any]:
        return {"out": inputs.x.dtype} | ({} if inputs.residual is None else {"total": inputs.x.dtype})

    def oracle(self, inputs: NormInputs, cotangents: NormResults) -> tuple[Found, None]:
        return oracle(inputs, cotangents), None

    def poisoned(self, poison: str) -> Poisoned:
        inputs = LayerNormCase("", rows=6, columns=70).inputs()
        cotangents = cotangents_of(inputs)
        spoiled = inputs.replace(x=inputs.x.at[2, 3].set(jnp.nan))
        return Poisoned((inputs, cotangents), (spoiled, cotangents), {"out": 2, "d_x": 2, "d_weight": ...})

    @pytest.mark.parametrize("kind", KINDS)
    def test_constant_rows(self, kind: str):
        inputs = KINDS[kind]("", rows=3, columns=50).inputs()
        inputs = inputs.replace(x=jnp.ones_like(inputs.x) * jnp.asarray([[0.0], [2.0], [-0.5]]))
        cotangents = cotangents_of(inputs)
        got, want = self.compiled(inputs)(inputs, cotangents), oracle(inputs, cotangents)
        assert all(np.all(np.isfinite(x)) for x in got.values())
        for name in got.keys() & {"out", "d_weight"}:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-5)

    def test_constant_rows_far_from_zero(self):
        """Their variance is the rounding of two equal sums: it may be anything small, but no negative number."""
        inputs = LayerNormCase("", rows=6, columns=1000, eps=1e-12).inputs()
        rows = [[23064.58], [24202.111], [1773239.2], [6633918.5], [7993844.0], [10562008.0]]
        inputs = inputs.replace(x=jnp.broadcast_to(jnp.asarray(rows), inputs.x.shape))
        got = self.compiled(inputs)(inputs, cotangents_of(inputs))
        assert all(np.all(np.isfinite(x)) for x in got.values())
