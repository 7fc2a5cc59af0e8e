"""Conformance of the Triton backends of matmuls with groups or gates, by Triton's interpreter; schedule and params."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from tests.kernels.conformance import check, check_candidates
from tests.kernels.conftest import A100, H100
from tests.kernels.matmul.grouped_conformance import (
    CASES,
    FUZZED,
    GATED,
    GLU,
    GLU_CASES,
    GatedConformance,
    GluConformance,
    GroupedConformance,
    cotangent_of,
    declined,
    inputs_of,
    random_sizes,
    run,
)
from tests.kernels.matmul.grouped_oracle import oracle, segments
from tilewright.kernels.matmul.cases import GroupedMatmulCase
from tilewright.kernels.matmul.groups import row_tiles
from tilewright.kernels.matmul.inputs import MatmulInputs
from tilewright.kernels.matmul.ops.gated_grouped_matmul import GatedGroupedMatmul
from tilewright.kernels.matmul.ops.glu import Glu
from tilewright.kernels.matmul.triton.backend import TritonGatedGroupedMatmul, TritonGlu, TritonGroupedMatmul
from tilewright.kernels.matmul.triton.params import (
    TritonGatedBackwardParams,
    TritonGatedForwardParams,
    TritonGroupedBackwardParams,
    TritonGroupedForwardParams,
)
from tilewright.kernels.matmul.xla.backend import XlaGlu
from tilewright.kernels.op.choice import Choice
from tilewright.kernels.triton import recorded_launches
from tilewright.kernels.triton.interpreter import interpret_triton
from tilewright.kernels.triton.matmul import TritonTile
from tilewright.ops.types import Device

pytestmark = pytest.mark.usefixtures("unoptimised")

BACKEND = TritonGroupedMatmul()
TILE = TritonTile(16, 16, 16, 1, 1)
FORWARD, BACKWARD = TritonGatedForwardParams(TILE), TritonGatedBackwardParams(TILE, TILE)


class TestTriton(GroupedConformance):
    """Tiles that are smaller than the arrays, so that there are several along each dimension."""

    backend = BACKEND
    device = H100
    machine = staticmethod(interpret_triton)

    def params(self, inputs: MatmulInputs) -> tuple[Any, Any]:
        return TritonGroupedForwardParams(TILE), TritonGroupedBackwardParams(TILE, TILE)

    def test_vmap_is_one_launch_of_more_rows(self):
        every = ((1, 1, 1), (0, 0, 1), (1, 0, 0), (0, 1, 1))
        self.check_mapped(inputs_of(FUZZED), ("lhs", "rhs", "group_sizes"), every)


class TestGated(GatedConformance):
    backend = TritonGatedGroupedMatmul()
    device = H100
    machine = staticmethod(interpret_triton)
    recomputing = dataclasses.replace(BACKWARD, recompute=TILE)

    def params(self, inputs: MatmulInputs) -> tuple[Any, Any]:
        return FORWARD, BACKWARD

    def test_vmap_over_any_operand(self):
        every = ((1, 0, 0, 1), (0, 1, 0, 0), (0, 0, 0, 1), (1, 1, 1, 1))
        self.check_mapped(inputs_of(GATED), ("lhs", "rhs", "up", "group_sizes"), every)


class TestGlu(GluConformance):
    backend = TritonGlu()
    device = H100
    machine = staticmethod(interpret_triton)
    cases = tuple(case for case in GLU_CASES if case.name in ("silu-float32", "leading"))

    def params(self, inputs: MatmulInputs) -> tuple[Any, Any]:
        return FORWARD, BACKWARD


def test_first_choices():
    """Tiles that are larger than the arrays in every direction, and several columns."""
    inputs = inputs_of(GroupedMatmulCase("", rows=150, k=70, n=300, groups=3, dtype="bfloat16"))
    d_out = cotangent_of(inputs)
    params = BACKEND.heuristic(inputs, A100, "forward"), BACKEND.heuristic(inputs, A100, "backward")
    with interpret_triton():
        got = jax.block_until_ready(jax.jit(lambda *call: run(BACKEND, *call, params))(inputs, d_out))
    check(got, oracle(inputs, d_out))


def test_the_schedule_has_every_row_once():
    random = np.random.default_rng(6)
    schedule = jax.jit(row_tiles, static_argnums=(3, 4))
    for rows, groups in [(1, 1), (5, 3), (64, 2), (79, 8)] * 10:
        sizes = random_sizes(random, rows, groups)
        found = segments(sizes, rows, groups)
        starts, ends = np.zeros(groups, np.int32), np.zeros(groups, np.int32)
        for matrix, each in found:
            starts[matrix], ends[matrix] = each.start, each.stop
        behind, which, first, end = map(
            np.asarray, schedule(jnp.asarray(starts), jnp.asarray(ends), jnp.arange(groups), rows, 16)
        )
        assert np.all(first[: behind[-1]] < end[: behind[-1]])
        assert np.all(first[behind[-1] :] >= end[behind[-1] :])
        seen = np.full(rows, -1)
        for matrix, begin, stop in zip(which, first, end, strict=True):
            assert np.all(seen[begin : min(begin + 16, stop)] == -1)
            seen[begin : min(begin + 16, stop)] = matrix
        want = np.full(rows, -1)
        for matrix, each in found:
            want[each] = matrix
        np.testing.assert_array_equal(seen, want)


def test_what_it_declines():
    reasons = functools.partial(declined, BACKEND)
    assert not reasons(A100, "bfloat16")
    assert not reasons(A100, "offset", "backward")
    assert not reasons(A100, "float32_from_bfloat16")
    assert "must have the dtype of lhs, got float32" in reasons(A100, "float32_from_bfloat16", "backward")
    assert reasons(A100, "blocks") == "does not serve lhs_scale; does not serve rhs_scale"
    assert "all must have one dtype, got lhs bfloat16, rhs float32" in reasons(A100, "two_dtypes")
    assert "lhs must be one of" in reasons(A100, "float32", dtype="float8_e4m3fn")
    assert "needs a CUDA GPU" in reasons(Device("cpu", "cpu"), "float32")
    given = lambda precision: inputs_of(CASES["float32"]).replace(precision=precision)
    assert not BACKEND.not_supported_reasons(given(jax.lax.Precision.HIGHEST), A100, "forward")
    said = "; ".join(BACKEND.not_supported_reasons(given(jax.lax.DotAlgorithmPreset.BF16_BF16_F32), A100, "forward"))
    assert "it takes a jax.lax.Precision" in said
    lhs, rhs = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((37, 1 << 16), (4, 1 << 16, 1 << 15)))
    large = inputs_of(CASES["float32"]).replace(lhs=lhs, rhs=rhs)
    assert "counted by 32 bits" in "; ".join(BACKEND.not_supported_reasons(large, A100, "forward"))


@pytest.mark.parametrize("name", ["gated", "glu"])
def test_pre_activations_are_written_for_gradients_alone(name: Any):
    """By the kernels' stages: a call without gradients, and one from which gradients are to come."""
    case, kernel = {"gated": (GATED, GatedGroupedMatmul()), "glu": (GLU, Glu())}[name]
    inputs: Any = inputs_of(case)
    cfg, shape = Choice("triton", FORWARD), (1, case.rows, case.n)
    with interpret_triton(), recorded_launches() as launches:
        out = jax.block_until_ready(kernel.run(inputs, cfg=cfg))
        again, kept = jax.block_until_ready(kernel.forward_with_residuals(inputs, cfg=cfg))
    assert [[x.shape for x in each.outputs] for each in launches] == [[shape, (0,), (0,)], [shape] * 3]
    np.testing.assert_array_equal(again, out)
    np.testing.assert_allclose(jax.nn.silu(kept[0]) * kept[1], out, rtol=1e-5, atol=1e-6)


def test_glu_comes_behind_xla():
    inputs = inputs_of(GLU)
    assert TritonGlu().deprioritized(inputs, H100, "forward")
    assert not XlaGlu().deprioritized(inputs, H100, "forward")


def test_what_gated_ones_decline():
    def reasons(device: Device = A100, **dtypes: Any) -> str:
        inputs = inputs_of(GATED).structs
        changed = {name: jax.ShapeDtypeStruct(inputs.arrays[name].shape, dtype) for name, dtype in dtypes.items()}
        return "; ".join(TestGated.backend.not_supported_reasons(inputs.replace(**changed), device, "forward"))

    assert not reasons()
    assert "up must be one of" in reasons(up="float8_e4m3fn")
    assert "lhs must be one of" in reasons(lhs="float64", rhs="float64", up="float64")
    assert "all must have one dtype, got lhs float32, gate bfloat16, up float32" in reasons(rhs="bfloat16")
    assert "needs a CUDA GPU" in reasons(Device("cpu", "cpu"))
    rows, matrix = jax.ShapeDtypeStruct((4, 1 << 16), "bfloat16"), jax.ShapeDtypeStruct((1 << 16, 1 << 15), "float32")
    large = MatmulInputs(rows, matrix, "float32", matrix, activation="silu")  # type: ignore[arg-type]
    said = "; ".join(TritonGlu().not_supported_reasons(large, A100, "forward"))
    assert "counted by 32 bits" in said
    assert "all must have one dtype, got x bfloat16" in said


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("groups", [2, 64])
def test_params(dtype: str, groups: int):
    sizes: dict[str, Any] = {"rows": 512, "k": 32, "n": 32, "groups": groups, "dtype": dtype}
    check_candidates(BACKEND, inputs_of(GroupedMatmulCase("", **sizes | {"k": 16, "n": 16})), A100)
    inputs = inputs_of(dataclasses.replace(GATED, **sizes))
    for direction, listed in check_candidates(TestGated.backend, inputs, A100).items():
        assert all(TestGated.backend.footprints(inputs, A100, direction, params) for params in listed)
    for wrong in ({"rows": 24}, {"columns": 8}, {"depth": 512}, {"num_stages": 0}, {"num_warps": True}):
        with pytest.raises(ValueError, match="must be"):
            dataclasses.replace(TILE, **wrong)
