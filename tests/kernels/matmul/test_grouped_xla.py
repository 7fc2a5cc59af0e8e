"""Conformance of the XLA backends of matmuls with groups or gates; of grouped ones float64, float8, blocks, memory."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.conformance import Found, check
from tests.kernels.conftest import H100
from tests.kernels.matmul import grouped_conformance
from tests.kernels.matmul.grouped_conformance import (
    FUZZED,
    GLU_CASES,
    GatedConformance,
    GluConformance,
    GroupedConformance,
    cotangent_of,
    inputs_of,
)
from tests.kernels.matmul.grouped_oracle import oracle
from tilewright.kernels.matmul.cases import GroupedMatmulCase
from tilewright.kernels.matmul.inputs import MatmulInputs
from tilewright.kernels.matmul.xla.backend import XlaGatedGroupedMatmul, XlaGlu, XlaGroupedMatmul
from tilewright.kernels.matmul.xla.blocks import Blocks
from tilewright.kernels.matmul.xla.params import XlaBlockParams, XlaGatedBackwardParams, XlaGluBackwardParams
from tilewright.ops.utils import device as devices
from tilewright.ops.utils.device import current_device
from tilewright.ops.utils.serialize import tagged, untagged

BACKEND = XlaGroupedMatmul()


def run(inputs: MatmulInputs, d_out: Any, rows: int = 8) -> Found:
    return grouped_conformance.run(BACKEND, inputs, d_out, (XlaBlockParams(rows), XlaBlockParams(rows)))


class TestXla(GroupedConformance):
    backend = BACKEND

    def params(self, inputs: MatmulInputs) -> tuple[Any, Any]:
        return XlaBlockParams(8), XlaBlockParams(8)


class TestGated(GatedConformance):
    backend = XlaGatedGroupedMatmul()
    recomputing = XlaGatedBackwardParams(8, recompute=True)
    recomputed_within = 1e-6

    def params(self, inputs: MatmulInputs) -> tuple[Any, Any]:
        return XlaBlockParams(8), XlaGatedBackwardParams(8)


class TestGlu(GluConformance):
    backend = XlaGlu()

    def params(self, inputs: MatmulInputs) -> tuple[Any, Any]:
        return self.backend.heuristic(inputs, current_device(), "forward"), XlaGluBackwardParams()


class TestRecomputingGlu(TestGlu):
    cases = GLU_CASES[-1:]

    def params(self, inputs: MatmulInputs) -> tuple[Any, Any]:
        return super().params(inputs)[0], XlaGluBackwardParams(recompute=True)


@pytest.mark.parametrize("rows", [1, 5, 16, 64])
def test_blocks_of_any_size(rows: int):
    """Those that divide nothing, and those that are larger than all rows."""
    inputs = inputs_of(dataclasses.replace(FUZZED, sizes=(9, 0, 13, 8, 4, 4, 6)))
    d_out = cotangent_of(inputs)
    check(jax.jit(lambda *xs: run(*xs, rows=rows))(inputs, d_out), oracle(inputs, d_out))


@pytest.mark.parametrize("sizes", [(9, 0, 13, 8, 4, 4, 0), (53, 0, 0, 0, 0, 0, 0), (0, 1, 1, 1, 1, 1, 48), (0,) * 7])
def test_on_an_accelerator_there_are_as_many_blocks_as_there_may_be(sizes: Any, monkeypatch: pytest.MonkeyPatch):
    """Most have no rows, and change nothing."""
    monkeypatch.setattr(devices, "_device", lambda *_: H100)
    inputs = inputs_of(dataclasses.replace(FUZZED, sizes=sizes))
    d_out = cotangent_of(inputs)
    lowered = jax.jit(run).lower(inputs, d_out)
    assert "dynamic_slice" in lowered.as_text()
    check(lowered.compile()(inputs, d_out), oracle(inputs, d_out))


def test_the_number_of_blocks_has_a_bound():
    random = np.random.default_rng(0)
    for _ in range(40):
        rows, groups, size = (int(random.integers(1, high)) for high in (60, 20, 12))
        cuts = np.sort(random.integers(0, rows + 1, groups))
        starts, ends = np.concatenate([[0], cuts[:-1]]).astype(np.int32), cuts.astype(np.int32)
        blocks = Blocks(jnp.asarray(starts), jnp.asarray(ends), rows, min(size, rows))
        assert int(blocks.last[-1]) == sum(-(-int(n) // min(size, rows)) for n in ends - starts) <= blocks.max_count


def test_float64():
    inputs = inputs_of(FUZZED)
    with jax.enable_x64(True):
        wide = lambda x: jnp.asarray(np.asarray(x, np.float64))
        inputs = inputs.replace(lhs=wide(inputs.lhs), rhs=wide(inputs.rhs), out_dtype="float64")
        d_out = cotangent_of(inputs)
        got = run(inputs, d_out)
    for name, exact in oracle(inputs, d_out).items():
        assert got[name].dtype == np.float64
        np.testing.assert_allclose(got[name], exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scaling", ["number", "blocks"])
def test_float8(scaling: Any):
    case = GroupedMatmulCase("", rows=19, k=130, n=140, groups=3, lhs_scale=scaling, rhs_scale=scaling)
    inputs = inputs_of(dataclasses.replace(case, dtype="float8_e4m3fn", rhs_dtype="float8_e5m2"))
    assert inputs.out_dtype == "bfloat16"
    d_out = cotangent_of(inputs)
    got, want = BACKEND.forward(inputs, XlaBlockParams(8)).out, oracle(inputs, d_out)
    check({"out": got}, {"out": want["out"]})


def test_scales_of_rows_of_nobody_reach_nothing():
    case = GroupedMatmulCase("", rows=19, k=130, n=140, groups=2, lhs_scale="blocks", sizes=(4, 7))
    inputs = inputs_of(case)
    d_out = cotangent_of(inputs)
    want = run(inputs, d_out)
    assert inputs.lhs_scale is not None
    got = run(inputs.replace(lhs_scale=inputs.lhs_scale.at[11:].set(jnp.nan)), d_out)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_matrix_that_is_not_finite_spoils_its_own_rows_alone():
    inputs = inputs_of(dataclasses.replace(FUZZED, sizes=(9, 0, 13, 8, 4, 4, 6)))
    d_out = cotangent_of(inputs)
    want = run(inputs, d_out)
    got = run(inputs.replace(rhs=inputs.rhs.at[:3].set(jnp.nan)), d_out)  # one of these has no rows
    for name in ("out", "d_lhs"):
        assert np.all(np.isnan(got[name][:22]))
        np.testing.assert_array_equal(got[name][22:], want[name][22:])
    np.testing.assert_array_equal(got["d_rhs"], want["d_rhs"])


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_memory_is_bounded(direction: str):
    """Neither a copy of lhs for every group nor a matrix for every row."""
    inputs = inputs_of(GroupedMatmulCase("", rows=256, k=64, n=64, groups=32))
    params = XlaBlockParams(8)
    if direction == "forward":
        compiled = jax.jit(lambda x: BACKEND.forward(x, params)).lower(inputs).compile()
    else:
        compiled = (
            jax.jit(lambda x, d: BACKEND.backward(x, None, d, params)).lower(inputs, cotangent_of(inputs)).compile()
        )
    operands = 4 * (256 * 64 + 32 * 64 * 64)
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * operands


def test_symbolic_rows_and_groups():
    rows, groups = jax.export.symbolic_shape("rows, groups")
    inputs = inputs_of(FUZZED)
    abstract = inputs.replace(
        lhs=jax.ShapeDtypeStruct((rows, 16), jnp.float32),
        rhs=jax.ShapeDtypeStruct((groups, 16, 24), jnp.float32),
        group_sizes=jax.ShapeDtypeStruct((groups,), jnp.int32),
    )
    exported = jax.export.export(jax.jit(run))(abstract, jax.ShapeDtypeStruct((rows, 24), jnp.float32))
    for case in (FUZZED, dataclasses.replace(FUZZED, rows=3, groups=2)):
        inputs = inputs_of(case)
        d_out = cotangent_of(inputs)
        check(exported.call(inputs, d_out), oracle(inputs, d_out))


def test_params():
    inputs = inputs_of(GroupedMatmulCase("", rows=1024, k=8, n=8, groups=8))
    best = BACKEND.heuristic(inputs, current_device(), "forward")
    assert best == XlaBlockParams(128)
    candidates = list(BACKEND.candidates(inputs, current_device(), "forward"))
    assert candidates[0] == best
    assert len(candidates) == len(set(candidates)) > 2
    assert untagged(tagged(best)) == best
    for wrong in (0, 2.0, True):
        with pytest.raises(ValueError, match=r"positive integer, got params\.block_rows="):
            XlaBlockParams(wrong)  # type: ignore[arg-type]
