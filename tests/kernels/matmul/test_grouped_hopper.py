"""Conformance of the Hopper backends of the grouped matmuls, interpreted on the CPU."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.conformance import check, check_candidates
from tests.kernels.conftest import A100, H100
from tests.kernels.matmul.gates import near
from tests.kernels.matmul.grouped_conformance import (
    GATED,
    GroupedConformance,
    cotangent_of,
    declined,
    inputs_of,
    run,
)
from tests.kernels.matmul.grouped_oracle import oracle
from tests.support.mosaic_interpret import interpret_mosaic
from tilewright.kernels.hopper.matmul.params import MatmulParams
from tilewright.kernels.hopper.matmul.schedule import RaggedReductionSchedule, TileShape, longest_first
from tilewright.kernels.hopper.schedule import Rounds
from tilewright.kernels.matmul.cases import GroupedMatmulCase
from tilewright.kernels.matmul.hopper import products
from tilewright.kernels.matmul.hopper.backend import HopperGatedGroupedMatmul, HopperGroupedMatmul
from tilewright.kernels.matmul.hopper.params import HopperGatedBackwardParams, HopperGroupedBackwardParams
from tilewright.kernels.matmul.inputs import MatmulInputs
from tilewright.kernels.matmul.ops.grouped_matmul import GroupedMatmul
from tilewright.kernels.numerics.activations import ACTIVATIONS

BACKEND = HopperGroupedMatmul()
SMALL = MatmulParams(64, 64, 2, band=2)
PAIR = MatmulParams(128, 64, 3, cluster_m=2, band=1)
SIDE = MatmulParams(128, 64, 2, cluster_n=2, band=2)
TURNS = MatmulParams(128, 64, 3, cluster_m=2, band=1, turns=True)


@pytest.fixture(autouse=True)
def few_sms() -> Iterator[None]:
    """Few programs, so that each has several items."""
    with mock.patch.object(products, "num_sms", return_value=4):
        yield


class TestHopper(GroupedConformance):
    """Two consumers, and a cluster along the rows."""

    backend = BACKEND
    device = H100
    machine = staticmethod(interpret_mosaic)

    def adapted(self, case: GroupedMatmulCase) -> GroupedMatmulCase:
        return dataclasses.replace(case, dtype="float16" if case.dtype == "float16" else "bfloat16", rhs_dtype=None)

    def params(self, inputs: MatmulInputs) -> tuple[Any, Any]:
        return PAIR, HopperGroupedBackwardParams(SIDE, PAIR)


def everything(case: GroupedMatmulCase, forward: MatmulParams, backward: HopperGroupedBackwardParams) -> None:
    inputs = inputs_of(case)
    d_out, params = cotangent_of(inputs), (forward, backward)
    with interpret_mosaic(detect_races=case.rows < 200):
        got = jax.block_until_ready(jax.jit(lambda *call: run(BACKEND, *call, params))(inputs, d_out))
    check(got, oracle(inputs, d_out))


TILES = {
    "one consumer": (SMALL, HopperGroupedBackwardParams(SMALL, SMALL)),
    "three consumers": (MatmulParams(192, 64, 2), HopperGroupedBackwardParams(SMALL, MatmulParams(192, 64, 2))),
    "two rows of tiles of a consumer": (
        MatmulParams(256, 64, 2),
        HopperGroupedBackwardParams(MatmulParams(256, 128, 2, cluster_n=2), MatmulParams(256, 64, 2)),
    ),
    "many buffers": (
        MatmulParams(128, 256, 2),
        HopperGroupedBackwardParams(MatmulParams(128, 256, 2), MatmulParams(128, 192, 2)),
    ),
    "turns": (
        MatmulParams(128, 128, 3, turns=True),
        HopperGroupedBackwardParams(
            MatmulParams(64, 256, 2, cluster_n=2, turns=True), MatmulParams(128, 192, 2, cluster_m=2, turns=True)
        ),
    ),
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", list(TILES))
def test_tiles(name: str, transposed: bool):
    """Sizes that no tile divides, arrays with and without whole atoms, groups without and with rows of many tiles."""
    sizes = (70, 0, 3, 290, 1, 20)
    case = GroupedMatmulCase("", rows=400, k=136, n=320, groups=6, dtype="bfloat16", sizes=sizes)
    everything(dataclasses.replace(case, transpose_rhs=transposed), *TILES[name])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("k", "n"), [(72, 133), (65, 136), (67, 129)])
def test_unaligned_rows(k: int, n: int, transposed: bool):
    """Operands are copied with rows of whole 16 bytes, results and gradients cut."""
    case = GroupedMatmulCase("", rows=600, k=k, n=n, groups=2, dtype="bfloat16", sizes=(290, 300))
    everything(dataclasses.replace(case, transpose_rhs=transposed), SMALL, HopperGroupedBackwardParams(SMALL, SMALL))


@pytest.mark.parametrize("params", [SMALL, PAIR, SIDE, TURNS])
def test_no_races(params: MatmulParams):
    case = GroupedMatmulCase("", rows=130, k=72, n=136, groups=3, dtype="bfloat16", sizes=(50, 70, 2))
    everything(case, params, HopperGroupedBackwardParams(params, params))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("recompute", [None, MatmulParams(128, 128, 2)])
def test_gated(activation: Any, recompute: MatmulParams | None):
    params = MatmulParams(128, 128, 2), HopperGatedBackwardParams(SMALL, SMALL, recompute)
    case = dataclasses.replace(GATED, rows=200, k=72, n=136, groups=3, dtype="bfloat16", activation=activation)
    inputs = inputs_of(case)
    d_out, kernel = cotangent_of(inputs), HopperGatedGroupedMatmul()
    with interpret_mosaic():
        got = jax.block_until_ready(jax.jit(lambda *call: run(kernel, *call, params))(inputs, d_out))
    near(got, oracle(inputs, d_out))


@pytest.mark.parametrize("activation", ["sigmoid", "tanh"])
def test_gated_with_transposed_matrices(activation: Any):
    params = MatmulParams(128, 128, 2), HopperGatedBackwardParams(SMALL, SMALL, None)
    case = dataclasses.replace(GATED, rows=200, k=72, n=136, groups=3, dtype="bfloat16", transpose_rhs=True)
    inputs = inputs_of(dataclasses.replace(case, activation=activation))
    d_out, kernel = cotangent_of(inputs), HopperGatedGroupedMatmul()
    assert kernel.not_supported_reasons(inputs.structs, H100, "backward") == []
    with interpret_mosaic():
        got = jax.block_until_ready(jax.jit(lambda *call: run(kernel, *call, params))(inputs, d_out))
    near(got, oracle(inputs, d_out))


def test_gated_without_gradients_stores_one_array():
    inputs = inputs_of(dataclasses.replace(GATED, rows=64, k=72, n=136, groups=2, dtype="bfloat16"))
    with interpret_mosaic():
        out, *rest = HopperGatedGroupedMatmul().forward(inputs.replace(keeps=False), MatmulParams(64, 128, 2))
    assert rest == [None, None]
    near({"out": out}, {"out": oracle(inputs, jnp.zeros_like(out))["out"]})


def test_what_it_declines():
    reasons = functools.partial(declined, BACKEND)
    assert not reasons(H100, "bfloat16")
    assert not reasons(H100, "offset", "backward")
    assert not reasons(H100, "float32_from_bfloat16")
    assert "must have the dtype of lhs, got float32" in reasons(H100, "float32_from_bfloat16", "backward")
    assert "scale operands of float8 alone" in reasons(H100, "blocks", k=256, n=136)
    assert "one dtype, got lhs: bfloat16, rhs: float32" in reasons(H100, "two_dtypes")
    assert "lhs must be one of" in reasons(H100, "float32")
    assert "multiples of 16 bytes, got n=20" in reasons(H100, "bfloat16", n=20)
    assert "compute capability 9.0" in reasons(A100, "bfloat16")


SCALES = {
    "blocks": {"lhs_scale": "blocks", "rhs_scale": "blocks"},
    "of rhs": {"rhs_scale": "blocks", "lhs_scale": "number"},
    "numbers": {"lhs_scale": "number", "rhs_scale": "number"},
    "none": {},
}


@pytest.mark.parametrize("name", list(SCALES))
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8(name: str, dtype: str):
    """Blocks that no K step and no tile of columns fills, and rows of nobody."""
    case = GroupedMatmulCase(
        "", rows=150, k=272, n=200, groups=3, dtype=dtype, sizes=(37, 90, 4), transpose_rhs=True,
        preferred_element_type="float32", **SCALES[name],
    )  # fmt: skip
    inputs = inputs_of(case)
    assert not BACKEND.not_supported_reasons(inputs, H100, "forward")
    assert BACKEND.config_reasons(inputs, H100, "forward", MatmulParams(64, 128, 2, turns=True))
    assert BACKEND.not_supported_reasons(inputs, H100, "backward")
    for params in (MatmulParams(128, 256, 2, cluster_m=2), MatmulParams(64, 128, 2)):
        with interpret_mosaic():
            out = jax.block_until_ready(jax.jit(functools.partial(BACKEND.forward, params=params))(inputs)).out
        check({"out": out}, {"out": oracle(inputs, jnp.zeros_like(out))["out"]})
    assert BACKEND.config_reasons(inputs, H100, "forward", MatmulParams(128, 64, 2))
    listed = list(BACKEND.candidates(inputs, H100, "forward"))
    assert listed
    assert all(not BACKEND.config_reasons(inputs, H100, "forward", params) for params in listed)


@pytest.mark.parametrize("params", [MatmulParams(128, 256, 2, cluster_m=2, band=1), MatmulParams(192, 128, 3, band=2)])
def test_no_races_of_float8(params: MatmulParams):
    case = GroupedMatmulCase(
        "", rows=150, k=272, n=200, groups=2, dtype="float8_e4m3fn", sizes=(70, 60), transpose_rhs=True,
        preferred_element_type="float32", **SCALES["blocks"],
    )  # fmt: skip
    inputs = inputs_of(case)
    with interpret_mosaic(detect_races=True):
        out = jax.block_until_ready(jax.jit(functools.partial(BACKEND.forward, params=params))(inputs)).out
    check({"out": out}, {"out": oracle(inputs, jnp.zeros_like(out))["out"]})


@pytest.mark.parametrize("groups", [1, 8, 64, 300])
@pytest.mark.parametrize("rows", [1, 64, 8192])
def test_params(rows: int, groups: int):
    struct = jax.ShapeDtypeStruct
    arrays = struct((rows, 64), "bfloat16"), struct((groups, 64, 4096), "bfloat16"), struct((groups,), "int32")
    inputs = GroupedMatmul().prepare(*arrays)  # type: ignore[arg-type]
    check_candidates(BACKEND, inputs, H100)
    assert BACKEND.config_reasons(inputs, H100, "forward", MatmulParams(128, 256, 5))


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_m": 32}, {"block_n": 100}, {"block_m": 256, "block_n": 256}, {"block_m": 192, "block_n": 256},
        {"cluster_m": 2, "cluster_n": 2}, {"num_stages": 1}, {"band": 0}, {"turns": True, "block_n": 256},
    ],
)  # fmt: skip
def test_wrong_params(wrong: dict[str, int]):
    with pytest.raises(ValueError):
        dataclasses.replace(MatmulParams(), **wrong)


@pytest.mark.parametrize(("groups", "programs"), [(128, 132), (128, 66), (5, 132), (64, 66), (3, 4), (1, 132)])
def test_sums_over_skewed_groups_are_shared_out_evenly(groups: int, programs: int):
    """Clusters end within a tenth of each other, or of an item; every item is some cluster's."""
    sizes = np.maximum(20672 / np.arange(1, groups + 1) ** 0.8, 100).astype(np.int32)
    ends = jnp.cumsum(jnp.asarray(np.random.default_rng(0).permutation(sizes)))
    starts = ends - jnp.diff(ends, prepend=0)
    tile = TileShape(128, 128, 1, 1, 1)
    schedule = RaggedReductionSchedule(longest_first(starts, ends), starts, ends, 1536, 256, 64, tile)
    work = jax.vmap(lambda item: schedule.work(item, 0))(jnp.arange(schedule.items(), dtype=jnp.int32))
    places = set(zip(*(x.tolist() for x in (work.matrix, work.row, work.column)), strict=True))
    assert len(places) == schedule.items() == groups * 24
    rounds, steps, taken = Rounds.in_waves(schedule.items(), programs), np.asarray(work.steps), list[int]()
    ends_of = [0] * rounds.programs  # as the hardware starts them: the next one where one ends first
    for program in range(rounds.grid(schedule.items())):
        first, count = map(int, rounds.of(program, schedule.items()))
        own = [first + i * rounds.programs for i in range(count)]
        taken += own
        ends_of[ends_of.index(min(ends_of))] += int(steps[own].sum())
    assert sorted(taken) == list(range(schedule.items()))
    assert max(ends_of) < 1.1 * max(np.mean(ends_of), steps.max())
