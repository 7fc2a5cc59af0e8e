"""Conformance of the Triton backend of the grouped matmul, by Triton's interpreter; its schedule and its params."""

import dataclasses
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from tests.kernels.conftest import A100, H100
from tests.kernels.matmul.grouped_conformance import CASES, FUZZED, GroupedConformance, check, inputs_of, random_sizes
from tests.kernels.matmul.grouped_oracle import oracle, segments
from tilewright.kernels.matmul.cases import GroupedMatmulCase
from tilewright.kernels.matmul.groups import row_tiles
from tilewright.kernels.matmul.inputs import MatmulInputs
from tilewright.kernels.matmul.triton.backend import TritonGroupedMatmul
from tilewright.kernels.matmul.triton.params import TritonGroupedBackwardParams, TritonGroupedForwardParams
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.triton.interpreter import interpret_triton
from tilewright.kernels.triton.matmul import TritonTile
from tilewright.ops.types import Device
from tilewright.ops.utils.serialize import tagged, untagged

pytestmark = pytest.mark.usefixtures("unoptimised")

BACKEND = TritonGroupedMatmul()
TILE = TritonTile(16, 16, 16, 1, 1)


class TestTriton(GroupedConformance):
    """Tiles that are smaller than the arrays, so that there are several along each dimension."""

    backend: ClassVar[Backend[Any, Any, Any, Any]] = BACKEND

    def machine(self) -> AbstractContextManager[Any]:
        return interpret_triton()

    def device(self) -> Device:
        return H100

    def params(self, inputs: MatmulInputs) -> tuple[Any, Any]:
        return TritonGroupedForwardParams(TILE), TritonGroupedBackwardParams(TILE, TILE)


def test_first_choices():
    """Tiles that are larger than the arrays in every direction, and several columns."""
    inputs = inputs_of(GroupedMatmulCase("", rows=150, k=70, n=300, groups=3, dtype="bfloat16"))
    d_out = jnp.asarray(np.random.default_rng(0).standard_normal(inputs.out_shape), jnp.bfloat16)
    forward, backward = (BACKEND.heuristic(inputs, A100, each) for each in ("forward", "backward"))

    def both(inputs: MatmulInputs, d_out: Any) -> dict[str, Any]:
        gradients = BACKEND.backward(inputs, None, d_out, backward)
        return {"out": BACKEND.forward(inputs, forward).out} | {f"d_{name}": x for name, x in gradients.items()}

    with interpret_triton():
        got = jax.block_until_ready(jax.jit(both)(inputs, d_out))
    check(got, oracle(inputs, d_out))


def test_vmap_is_one_launch_of_more_rows():
    inputs = inputs_of(FUZZED)
    random = np.random.default_rng(5)
    sizes = jnp.asarray([random_sizes(random, FUZZED.rows, FUZZED.groups) for _ in range(3)])
    lhs, rhs = (jnp.stack([x, 2 * x, -x]) for x in (inputs.lhs, inputs.rhs))
    d_out = jnp.asarray(random.standard_normal(inputs.out_shape), jnp.float32)
    params = TritonGroupedForwardParams(TILE), TritonGroupedBackwardParams(TILE, TILE)

    def both(lhs: Any, rhs: Any, sizes: Any) -> dict[str, Any]:
        given = inputs.replace(lhs=lhs, rhs=rhs, group_sizes=sizes)
        gradients = BACKEND.backward(given, None, d_out, params[1])
        return {"out": BACKEND.forward(given, params[0]).out} | {f"d_{name}": x for name, x in gradients.items()}

    for axes in ((0, 0, 0), (None, None, 0), (0, None, None), (None, 0, 0)):
        given = [
            stack if axis == 0 else one
            for axis, one, stack in zip(axes, (inputs.lhs, inputs.rhs, sizes[0]), (lhs, rhs, sizes), strict=True)
        ]
        with interpret_triton():
            got = jax.block_until_ready(jax.jit(jax.vmap(both, axes))(*given))
        for i in range(3):
            one = [x[i] if axis == 0 else x for x, axis in zip(given, axes, strict=True)]
            each = inputs.replace(lhs=one[0], rhs=one[1], group_sizes=one[2])
            check({name: x[i] for name, x in got.items()}, oracle(each, d_out), str(axes))


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
    def reasons(name: str, direction: Any = "forward", device: Device = A100, **fields: Any) -> str:
        inputs = inputs_of(dataclasses.replace(CASES[name], **fields))
        return "; ".join(BACKEND.not_supported_reasons(inputs, device, direction))

    assert not reasons("bfloat16")
    assert not reasons("offset", "backward")
    assert not reasons("float32_from_bfloat16")
    assert "must have the dtype of lhs, got float32" in reasons("float32_from_bfloat16", "backward")
    assert reasons("blocks") == "does not serve lhs_scale; does not serve rhs_scale"
    assert "all must have one dtype, got lhs bfloat16, rhs float32" in reasons("two_dtypes")
    assert "lhs must be one of" in reasons("float32", dtype="float8_e4m3fn")
    assert "needs a CUDA GPU" in reasons("float32", device=Device("cpu", "cpu"))
    lhs, rhs = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((37, 1 << 16), (4, 1 << 16, 1 << 15)))
    large = inputs_of(CASES["float32"]).replace(lhs=lhs, rhs=rhs)
    assert "counted by 32 bits" in "; ".join(BACKEND.not_supported_reasons(large, A100, "forward"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("groups", [2, 64])
def test_params(dtype: str, groups: int):
    inputs = inputs_of(GroupedMatmulCase("", rows=512, k=16, n=16, groups=groups, dtype=dtype))
    for direction in ("forward", "backward"):
        listed = list(BACKEND.candidates(inputs, A100, direction))
        assert len(listed) == len(set(listed)) > 1
        assert BACKEND.heuristic(inputs, A100, direction) == listed[0]
        for params in listed:
            assert untagged(tagged(params)) == params
            assert not BACKEND.config_reasons(inputs, A100, direction, params)
    for wrong in ({"rows": 24}, {"columns": 8}, {"depth": 512}, {"num_stages": 0}, {"num_warps": True}):
        with pytest.raises(ValueError, match="must be"):
            dataclasses.replace(TILE, **wrong)
