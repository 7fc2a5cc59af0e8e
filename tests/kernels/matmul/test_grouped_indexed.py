"""Grouped matmuls on Hopper of rows that an index names, interpreted on the CPU."""

import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.conftest import H100
from tests.kernels.matmul.gates import near
from tests.kernels.matmul.grouped_conformance import GATED, cotangent_of, inputs_of
from tests.kernels.matmul.grouped_oracle import oracle
from tests.support.mosaic_interpret import interpret_mosaic
from tilewright.kernels.hopper.matmul.params import MatmulParams
from tilewright.kernels.matmul.cases import GroupedMatmulCase
from tilewright.kernels.matmul.hopper import products
from tilewright.kernels.matmul.hopper.backend import HopperGatedGroupedMatmul, HopperGroupedMatmul
from tilewright.kernels.matmul.inputs import MatmulInputs

TILES = {
    "one consumer": MatmulParams(64, 128, 2, band=2),
    "two consumers": MatmulParams(128, 128, 3, band=1),
    "cluster along the rows": MatmulParams(128, 128, 3, cluster_m=2, band=1),
    "cluster along the columns": MatmulParams(64, 128, 2, cluster_n=2),
    "turns": MatmulParams(128, 128, 3, turns=True),
    "turns of a cluster": MatmulParams(64, 256, 2, cluster_m=2, band=1, turns=True),
}
CASE = GroupedMatmulCase("", rows=400, k=136, n=200, groups=6, dtype="bfloat16", sizes=(70, 0, 3, 290, 1, 20))


@pytest.fixture(autouse=True)
def few_sms() -> Iterator[None]:
    """Few programs, so that each has several items."""
    with mock.patch.object(products, "num_sms", return_value=4):
        yield


def indexed(case: Any, tokens: int) -> tuple[MatmulInputs, MatmulInputs]:
    """A call whose rows are those of fewer tokens in any order, some of them none; and the same with the rows.

    Tokens that no row is of hold NaN.
    """
    inputs, random = inputs_of(case), np.random.default_rng(3)
    index = random.integers(-1, tokens, case.rows).astype(np.int32)
    index[5:9] = (-1, 0, tokens - 1, -1)
    unused = np.isin(np.arange(tokens), index, invert=True)
    array = jnp.where(unused[:, None], jnp.nan, inputs.lhs[:tokens])
    rows = jnp.where((index >= 0)[:, None], array[np.maximum(index, 0)], 0)
    return inputs.replace(lhs=array, row_index=jnp.asarray(index)), inputs.replace(lhs=rows)


def check(backend: Any, case: Any, params: MatmulParams, tokens: int, races: bool = False) -> None:
    inputs, plain = indexed(case, tokens)
    with interpret_mosaic(detect_races=races):
        got = jax.block_until_ready(jax.jit(lambda inputs: backend.forward(inputs, params))(inputs))
    near({"out": got.out}, {"out": oracle(plain, cotangent_of(plain))["out"]})


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", list(TILES))
def test_tiles(name: str, transposed: bool):
    """Groups without rows and with those of many tiles, rows behind the last group, and a part of a step of K."""
    check(HopperGroupedMatmul(), dataclasses.replace(CASE, transpose_rhs=transposed), TILES[name], 50)


@pytest.mark.parametrize("name", list(TILES))
def test_no_races(name: str):
    case = dataclasses.replace(CASE, rows=130, k=72, n=136, groups=3, sizes=(50, 70, 2))
    check(HopperGroupedMatmul(), case, TILES[name], 40, races=True)


@pytest.mark.parametrize("k", [72, 67])
def test_gated(k: int):
    """Also with rows that are not at multiples of 16 bytes, of which copies are."""
    case = dataclasses.replace(GATED, rows=600, k=k, n=136, groups=2, dtype="bfloat16", sizes=(290, 300))
    check(HopperGatedGroupedMatmul(), case, TILES["two consumers"], 90)


def test_what_is_declined():
    inputs, _ = indexed(CASE, 50)
    serving = HopperGroupedMatmul()
    assert serving.not_supported_reasons(inputs.structs, H100, "forward") == []
    assert serving.not_supported_reasons(inputs.structs, H100, "backward") == []
    narrow = inputs.structs.replace(
        transpose_rhs=True,
        **{x: jax.ShapeDtypeStruct(inputs.arrays[x].shape, "float8_e4m3fn") for x in ("lhs", "rhs")},
    )
    assert "in 16 bits" in serving.not_supported_reasons(narrow, H100, "forward")[0]


def test_tiles_of_few_rows_alone():
    """Of more rows the producer's threads have no registers."""
    inputs, _ = indexed(CASE, 50)
    backend, structs = HopperGroupedMatmul(), inputs.structs
    listed = list(backend.candidates(structs, H100, "forward"))
    assert listed
    assert not any(backend.config_reasons(structs, H100, "forward", params) for params in listed)
    wide = MatmulParams(256, 128, 2)
    assert "up to 128 rows" in backend.config_reasons(structs, H100, "forward", wide)[0]
    assert not backend.config_reasons(structs.replace(row_index=None), H100, "forward", wide)
