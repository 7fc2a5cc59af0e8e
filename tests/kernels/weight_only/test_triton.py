"""Conformance of the Triton backend of matmuls with weights of few bits, interpreted; what selection sees of it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from tests.kernels.conftest import A100, H100
from tests.kernels.weight_only.conformance import CASES, WeightOnlyConformance
from tilewright.kernels.triton import recorded_launches
from tilewright.kernels.triton.interpreter import interpret_triton
from tilewright.kernels.weight_only.inputs import WeightOnlyInputs
from tilewright.kernels.weight_only.op import WEIGHT_ONLY_MATMUL
from tilewright.kernels.weight_only.triton.backend import TritonWeightOnly
from tilewright.kernels.weight_only.triton.params import TritonWeightOnlyParams, fitted_span
from tilewright.ops.types import Device

pytestmark = pytest.mark.usefixtures("unoptimised")

BACKEND = TritonWeightOnly()


class TestScaledSums(WeightOnlyConformance):
    """Sums of groups are scaled; k is split."""

    backend = BACKEND
    device = H100
    machine = staticmethod(interpret_triton)

    def params(self, inputs: WeightOnlyInputs) -> tuple[TritonWeightOnlyParams, None]:
        return TritonWeightOnlyParams(8, 16, 64, 1, 2, num_warps=2, num_stages=2), None


class TestScaledElements(TestScaledSums):
    """Elements of the weight are scaled, in spans of two units; two tiles of rows."""

    cases = tuple(
        CASES[name] for name in ("int4", "groups_of_32", "one_group", "short_last_group", "int8", "mxfp4", "ordered")
    )

    def params(self, inputs: WeightOnlyInputs) -> tuple[TritonWeightOnlyParams, None]:
        return TritonWeightOnlyParams(8, 16, 128, 1, 1, True, num_warps=2, num_stages=2), None


def prepared(**fields: Any) -> WeightOnlyInputs:
    args, options = dataclasses.replace(CASES["int4"], **fields).abstract_arguments()
    return WEIGHT_ONLY_MATMUL.prepare(*args, **options).structs


@pytest.mark.parametrize("device", [H100, A100])
@pytest.mark.parametrize(
    "fields", [{"rows": 1}, {"rows": 8, "format": "mxfp4", "group": 32}, {"rows": 64}, {"rows": 4096}]
)
def test_candidates(fields: dict[str, Any], device: Device):
    inputs = prepared(**({"k": 8192, "n": 8192, "group": 128} | fields))
    listed = list(BACKEND.candidates(inputs, device, "forward"))
    assert len(listed) == len(set(listed)) >= 2
    for params in listed:
        assert not BACKEND.config_reasons(inputs, device, "forward", params), params
    # The weight is read once for few rows, by as many programs as keep every multiprocessor busy.
    best = listed[0]
    assert (best.rows >= inputs.rows) == (inputs.rows <= 64)
    programs = 8192 // best.columns * best.splits * -(-inputs.rows // best.rows)
    assert programs >= device.cores
    assert best.operand_scales == (inputs.rows > 64)


@pytest.mark.parametrize(("k", "n", "splits"), [(8192, 8192, 4), (64, 64, 1), (8192, 64, 16), (1024, 65536, 1)])
def test_k_is_split_until_every_processor_has_programs(k: int, n: int, splits: int):
    inputs = prepared(rows=8, k=k, n=n, group=None)
    assert next(iter(BACKEND.candidates(inputs, H100, "forward"))).splits == splits


@pytest.mark.parametrize(
    ("group", "format", "span"),
    [(128, "int4", 128), (64, "int4", 64), (32, "int4", 64), (None, "int4", 128), (32, "int8", 32)],
)
def test_a_span_is_in_one_group_or_is_two(group: int | None, format: str, span: int):
    assert fitted_span(prepared(k=1024, group=group, format=format), 128) == span


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"dtype": "float32"}, "x must be float16 or bfloat16"),
        ({"group": 100, "k": 200}, "group must be 32, a multiple of 64, or None"),
        ({"group": 16, "format": "int8"}, "group must be 16, a multiple of 32"),
        ({"rows": 0}, "needs elements"),
    ],
)
def test_reasons(fields: dict[str, Any], said: str):
    found = BACKEND.reasons(prepared(**fields), H100, "forward")
    if fields.get("group") == 16:
        assert found == []
    else:
        assert any(said in each for each in found), found
    assert "it has no backward pass" in BACKEND.reasons(prepared(), H100, "backward")


@pytest.mark.parametrize(
    "wrong", [{"rows": 4}, {"columns": 24}, {"splits": 0}, {"num_warps": 16}, {"operand_scales": 1}]
)
def test_wrong_params(wrong: dict[str, Any]):
    with pytest.raises((ValueError, TypeError)):
        TritonWeightOnlyParams(**({"rows": 8, "columns": 64} | wrong))


def test_mapped_over_rows_is_one_launch_and_over_weights_reads_each():
    args, options = dataclasses.replace(CASES["int4"], zeros=True).arguments()
    inputs = WEIGHT_ONLY_MATMUL.prepare(*args, **options)
    params, _ = TestScaledSums().params(inputs)
    x = jnp.stack([inputs.x, 2 * inputs.x])
    other = inputs.replace(codes=inputs.codes[:, ::-1], scales=2 * inputs.scales, zeros=inputs.zeros + 1)
    weights = jax.tree.map(lambda a, b: jnp.stack([a, b]), inputs.replace(x=None), other.replace(x=None))
    with interpret_triton(), recorded_launches() as launches:
        rows = jax.vmap(lambda x: BACKEND.forward(inputs.replace(x=x), params))(x)
        each = jax.vmap(lambda x, given: BACKEND.forward(given.replace(x=x), params))(x, weights)
        want = [BACKEND.forward(inputs, params), BACKEND.forward(other.replace(x=x[1]), params)]
    # A call is traced once before it is mapped, and then again.
    assert [launch.grid for launch in launches][1:4:2] == [(2, 2, 2)] * 2
    np.testing.assert_array_equal(rows, jnp.stack([want[0], 2 * want[0]]))
    np.testing.assert_array_equal(each, jnp.stack(want))
