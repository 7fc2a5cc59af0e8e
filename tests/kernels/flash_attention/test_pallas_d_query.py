"""dQ that is added up in global memory: the layout of the sums, and who converts which rows, and when."""

import dataclasses
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.conftest import H100
from tests.kernels.flash_attention.conformance import cotangents, inputs_of, judge, oracles
from tests.support.mosaic_interpret import interpret_mosaic
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.kernels.flash_attention.hopper import backend as pallas_gpu
from tilewright.kernels.flash_attention.hopper.d_query import (
    ROW,
    STRIP,
    OverlappedConversion,
    convert_kernel,
    dq_accumulator_shape,
)
from tilewright.kernels.flash_attention.hopper.params import HopperBackwardParams
from tilewright.kernels.hopper.schedule import ITEM_OVERHEAD, program_lists, program_order
from tilewright.kernels.hopper.shared import SharedTile
from tilewright.kernels.hopper.tiles import ROWS

ONE_PROGRAM = dataclasses.replace(H100, cores=1)


@pytest.mark.parametrize(("block_q", "q_length", "head_dim"), [(64, 136, 64), (128, 200, 64), (64, 104, 128)])
def test_conversion_of_all_sums(block_q: int, q_length: int, head_dim: int):
    shape = (2, q_length, 2, head_dim)
    batch, _, heads, _ = shape
    sums = np.zeros(dq_accumulator_shape(block_q, batch, heads, q_length, head_dim), np.float32)
    values = np.random.default_rng(0).standard_normal(shape, np.float32)
    rows_of_strip = block_q * STRIP // ROW
    for b, row, head, column in np.ndindex(*shape):
        tile, inside = divmod(row, block_q)
        first = tile * block_q * head_dim // ROW + column // STRIP * rows_of_strip
        place, rest = divmod(inside * STRIP + column % STRIP, ROW)
        sums[b, head, first + place, rest] = values[b, row, head, column]
    with interpret_mosaic():
        tile = SharedTile((ROWS, head_dim), jnp.bfloat16)
        found = convert_kernel(
            jnp.asarray(sums), shape, jnp.bfloat16, None, block_q=block_q, kv_heads=1, scale=0.5, tile=tile
        )
    assert np.array_equal(found, jnp.asarray(values * 0.5, jnp.bfloat16))


@pytest.mark.parametrize("programs", [1, 5, 132])
@pytest.mark.parametrize("row_steps", [np.full(32, 64), np.arange(2, 66, 2)[::-1]])
def test_only_what_is_complete_is_asked_for(programs: int, row_steps: np.ndarray):
    matrices, tiles, whole = 24, len(row_steps), 31
    lists = program_lists(program_order(row_steps, matrices, 4), row_steps, programs)
    plan = OverlappedConversion.plan(lists, row_steps, whole)
    assert plan is not None
    asked = plan.items[plan.items >= 0]
    assert len(np.unique(asked)) == len(asked)
    assert (asked % tiles < whole).all()
    # The same clock as the lists were made by: every item of the head has ended when one of its rows is asked for.
    ends, begins = np.zeros(matrices * tiles), np.zeros(len(plan.items))
    for start, end in zip(lists[0][:-1], lists[0][1:], strict=True):
        costs = row_steps[lists[1][start:end] % tiles] + ITEM_OVERHEAD
        ends[lists[1][start:end]] = np.cumsum(costs)
        begins[start:end] = np.cumsum(costs) - costs
    complete = ends.reshape(matrices, tiles).max(axis=1)
    places = np.flatnonzero(plan.items >= 0)
    assert (complete[plan.items[places] // tiles] < begins[places]).all()
    assert len(asked) > matrices * tiles * (0.7 if programs < 132 else 0.4)


def test_nothing_is_asked_for_of_one_head():
    row_steps = np.full(4, 8)
    assert OverlappedConversion.plan(program_lists(program_order(row_steps, 1, 1), row_steps, 2), row_steps, 4) is None


SIZES: dict[str, Any] = {"head_dim": 64, "dtype": "bfloat16"}


EARLY = [
    (AttentionCase("full", 4, 256, heads=1, **SIZES), 64),
    (AttentionCase("causal with a ragged end", 5, 300, heads=1, causal=True, **SIZES), 128),
    (AttentionCase("shared key heads", 4, 256, heads=2, kv_heads=1, causal=True, **SIZES), 128),
]


@pytest.mark.parametrize(("case", "block_q"), EARLY)
def test_rows_converted_early(case: AttentionCase, block_q: int):
    inputs = inputs_of(case)
    d_out, d_lse = cotangents(inputs)
    exact, low = oracles(inputs, d_out, d_lse)
    results = exact.results["out"].astype(inputs.query.dtype), exact.results["lse"].astype(jnp.float32)
    seen: list[Any] = []

    def spy(sums: Any, shape: Any, dtype: Any, early: Any, **kwargs: Any) -> Any:
        seen.append(early)
        return convert_kernel(sums, shape, dtype, early, **kwargs)

    with (
        # One program: all that it asks for is complete.
        mock.patch.object(pallas_gpu, "current_device", return_value=ONE_PROGRAM),
        mock.patch.object(pallas_gpu, "convert_kernel", spy),
        interpret_mosaic(),
    ):
        params = HopperBackwardParams(block_q, 2, False)
        got = pallas_gpu.PallasGpuFlashAttention().backward(inputs, results, (d_out, d_lse), params)
        got = jax.block_until_ready(got)
    conversions, converted, done = seen[0]
    asked = conversions.items[conversions.items >= 0]
    assert len(asked) > 0
    assert (np.asarray(done)[asked] == 1).all()
    # What the kernel for dK and dV wrote is the result already.
    kv_heads = case.kv_heads or case.heads
    for item in asked.tolist():
        matrix, tile = divmod(item, conversions.tiles)
        b, kv_head = divmod(matrix, kv_heads)
        rows = slice(tile * 128, tile * 128 + 128)
        group = slice(kv_head * (case.heads // kv_heads), (kv_head + 1) * (case.heads // kv_heads))
        assert np.array_equal(np.asarray(converted)[b, rows, group], np.asarray(got["query"])[b, rows, group])
    judge(got, exact.gradients, low.gradients, case.tolerance_factor)
