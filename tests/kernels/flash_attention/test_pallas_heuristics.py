"""What the model of work chooses on Hopper, where runs on the card tell which config is the fastest."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.conftest import H100
from tilewright.kernels.flash_attention.hopper import heuristics
from tilewright.kernels.flash_attention.hopper.backend import PallasGpuFlashAttention, plan_of
from tilewright.kernels.flash_attention.hopper.call import GroupParts
from tilewright.kernels.flash_attention.hopper.params import HopperForwardParams
from tilewright.kernels.flash_attention.hopper.plans import BackwardPlan
from tilewright.kernels.flash_attention.hopper.wide.plans import WideBackwardPlan
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.op import FlashAttention
from tilewright.kernels.hopper.schedule import makespan
from tilewright.ops.types import Direction

BACKEND = PallasGpuFlashAttention()
SMS = 132


def call(
    batch: int, length: int, heads: int, head_dim: int, kv_heads: int = 0, kv_length: int = 0, **options: Any
) -> AttentionInputs:
    query = jax.ShapeDtypeStruct((batch, length, heads, head_dim), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((batch, kv_length or length, kv_heads or heads, head_dim), jnp.bfloat16)
    return FlashAttention().prepare(query, key, key, **options)


def first(of: AttentionInputs, direction: Direction) -> Any:
    return BACKEND.candidates(of, H100, direction)[0]


@pytest.mark.parametrize(
    ("batch", "length", "causal", "block_q"),
    [
        (64, 197, False, 128), (64, 256, False, 128), (16, 577, True, 128), (16, 1024, False, 192),
        (16, 1024, True, 128), (8, 1500, False, 192), (8, 1500, True, 192), (4, 4096, True, 192),
    ],
)  # fmt: skip
def test_rows_of_a_tile(batch: int, length: int, causal: bool, block_q: int):
    """The fastest of a sweep on an H100 at head_dim 64 with 16 heads."""
    assert first(call(batch, length, 16, 64, causal=causal), "forward").block_q == block_q


@pytest.mark.parametrize(
    ("length", "head_dim", "causal", "deterministic"),
    [
        (197, 64, False, True), (256, 64, False, True), (256, 64, True, True), (577, 64, False, False),
        (1024, 64, True, False), (1500, 64, False, False), (256, 128, False, True), (577, 128, True, True),
        (1024, 128, False, False), (1024, 128, True, True), (1500, 128, False, False),
    ],
)  # fmt: skip
def test_form_of_the_backward_pass(length: int, head_dim: int, causal: bool, deterministic: bool):
    """The faster of both in the same sweep."""
    assert first(call(8, length, 16, head_dim, causal=causal), "backward").deterministic == deterministic


def test_the_only_step_is_not_masked_by_three_consumers():
    short = call(4, 4096, 8, 64, kv_length=77)
    assert all(params.block_q == 128 for params in BACKEND.candidates(short, H100, "forward"))
    long = call(4, 4096, 8, 64)
    assert first(long, "forward") == HopperForwardParams(192, 128, 2, True, True)


@pytest.mark.parametrize(
    ("of", "params"),
    [
        (call(64, 197, 16, 64), HopperForwardParams(128, 208, 2, True, False, False)),
        (call(66, 256, 14, 64), HopperForwardParams(128, 128, 3, True, True)),
        (call(32, 1024, 20, 64, kv_length=77), HopperForwardParams(128, 80, 2, True, False, False)),
        (call(8, 4096, 16, 64, kv_length=120), HopperForwardParams(128, 128, 2, True, False, False)),
        (call(32, 512, 12, 64), HopperForwardParams(128, 128, 3, True, True)),
        (call(8, 4096, 16, 72, kv_length=120), HopperForwardParams(128, 128, 2, True, False)),
        (call(66, 256, 14, 80), HopperForwardParams(128, 128, 2, True, False)),
        (call(66, 256, 14, 160), HopperForwardParams(128, 128, 2, True, False)),
        (call(132, 64, 8, 160), HopperForwardParams(128, 64, 2, True, False)),
        (call(66, 256, 14, 256), HopperForwardParams(128, 64, 2, False, False)),
    ],
)
def test_few_keys(of: AttentionInputs, params: HopperForwardParams):
    """The fastest of sweeps on an H100, or within 2 % of it."""
    assert first(of, "forward") == params


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"bias": jax.ShapeDtypeStruct((1, 1, 256, 256), jnp.bfloat16)}, {"dropout_prob": 0.1}]
)
def test_scores_that_take_registers_are_not_in_one_step(options: dict[str, Any]):
    if "dropout_prob" in options:
        options = options | {"dropout_seed": jax.ShapeDtypeStruct((2,), jnp.uint32)}
    found = BACKEND.candidates(call(64, 256, 16, 64, **options), H100, "forward")
    assert all(params.ahead and params.block_k <= 128 for params in found)


@pytest.mark.parametrize("options", [{"heads": 71, "head_dim": 64}, {"heads": 48, "head_dim": 128}])
def test_one_key_head_is_split_among_all_sms(options: dict[str, int]):
    of = call(1, 2048, kv_heads=1, causal=True, **options)
    plan = plan_of(of, first(of, "backward"))
    assert isinstance(plan, BackwardPlan)
    group = heuristics.group_parts(of, plan, SMS)
    assert (group.parts - 1) * group.size < group.group <= group.parts * group.size
    assert group.parts * 16 >= 0.9 * SMS


def test_parts_of_wide_heads_are_of_one_size():
    of = call(4, 2047, 16, 256, kv_heads=1, causal=True)
    plan = plan_of(of, first(of, "backward"))
    assert isinstance(plan, WideBackwardPlan)
    parts = heuristics.group_parts(of, plan, SMS).parts
    assert parts > 1
    assert 16 % parts == 0


def test_many_key_heads_are_not_split():
    for options in ({"heads": 32, "kv_heads": 8}, {"heads": 16}):
        of = call(4, 4096, head_dim=128, causal=True, **options)
        plan = plan_of(of, first(of, "backward"))
        assert isinstance(plan, BackwardPlan)
        assert heuristics.group_parts(of, plan, SMS).parts == 1


def test_a_part_without_query_heads_is_refused():
    with pytest.raises(ValueError, match="every part needs a query head"):
        GroupParts(5, 4)


def test_makespan_of_few_items():
    costs = np.asarray([3.0, 2.0, 1.0])
    assert makespan(costs, 1, 8) == 3.0
    assert makespan(costs, 2, 3) == 4.0  # 3 + 1, 3 + 1, 2 + 2
    assert makespan(costs, 100, 3) == 200.0


def test_beside_a_transfer_no_cta_has_more_than_one_item():
    for head_dim in (72, 128, 256):
        found = []
        for told in (False, True):
            of = call(1, 4096, 8, head_dim, causal=True).replace(beside_transfer=told)
            found.append(first(of, "forward"))
        alone, beside = found
        assert dataclasses.replace(alone, persistent=False) == beside


@pytest.mark.parametrize("dims", [(128, 80), (128, 96), (112, 96), (96, 128)])
@pytest.mark.parametrize("length", [512, 16384])
def test_every_candidate_fits_heads_of_two_dims(length: int, dims: tuple[int, int]):
    """A value dim from 65 to 96 beside a head dim of 128 had a first backward candidate that took too much memory."""
    query, value = (jax.ShapeDtypeStruct((1, length, 8, dim), jnp.bfloat16) for dim in dims)
    of = AttentionInputs(query, query, value, 0.1)
    found = BACKEND.candidates(of, H100, "backward")
    assert found
    assert not [params for params in found if BACKEND.config_reasons(of, H100, "backward", params)]
