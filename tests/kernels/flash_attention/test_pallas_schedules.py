"""The barriers of the attention kernels: every order that their products and copies rely on is there."""

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from tests.kernels.conftest import H100
from tests.kernels.flash_attention.conformance import inputs_of
from tests.kernels.hopper.schedule import check_schedules
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.kernels.flash_attention.hopper import backend
from tilewright.kernels.flash_attention.hopper.backend import PallasGpuFlashAttention
from tilewright.kernels.flash_attention.hopper.params import (
    HopperBackwardParams,
    HopperForwardParams,
    WideBackwardParams,
)
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.ops.types import Direction

BACKEND = PallasGpuFlashAttention()

# More tiles than stages in the rings, so that every barrier is waited for a second time, and a ragged end.
_SIZES: dict[str, Any] = {"heads": 2, "dtype": "bfloat16"}
CASES = {
    "full": AttentionCase("", 1, 700, 650, head_dim=128, **_SIZES),
    "causal": AttentionCase("", 1, 700, 700, head_dim=128, causal=True, **_SIZES),
    "window": AttentionCase("", 1, 700, 700, head_dim=128, causal=True, sliding_window=(200, 0), **_SIZES),
    "gqa": AttentionCase("", 1, 520, 520, head_dim=64, kv_heads=1, causal=True, **_SIZES),
    "sinks, bias and soft cap": AttentionCase(
        "", 1, 390, 390, head_dim=128, sinks=1, bias="hqk", logits_soft_cap=9.0, **_SIZES
    ),
    "alibi": AttentionCase("", 1, 520, 520, head_dim=128, kv_heads=1, position_bias="alibi", causal=True, **_SIZES),
    "relative bias": AttentionCase("", 1, 390, 390, head_dim=64, position_bias="relative", **_SIZES),
    "relative bias, d256": AttentionCase("", 1, 390, 390, head_dim=256, position_bias="relative", **_SIZES),
    "d192, d128": AttentionCase("", 1, 390, 390, head_dim=192, value_dim=128, causal=True, **_SIZES),
    "packed": AttentionCase("", 1, 650, 650, head_dim=64, packed=True, causal=True, **_SIZES),
    "d256": AttentionCase("", 1, 390, 390, head_dim=256, causal=True, **_SIZES),
}


def candidates(case: AttentionCase, direction: Direction) -> list[Any]:
    inputs = inputs_of(case).structs
    if BACKEND.not_supported_reasons(inputs, H100, direction):
        return []
    return list(BACKEND.candidates(inputs, H100, direction))


def named(direction: Direction) -> list[Any]:
    found = [(name, params) for name, case in CASES.items() for params in candidates(case, direction)]
    return [pytest.param(name, params, id=f"{name}: {params}") for name, params in found]


def check_forward(case: AttentionCase, params: HopperForwardParams, max_programs: int | None = 4) -> None:
    inputs = inputs_of(case)
    check_schedules(lambda inputs: BACKEND.forward(inputs, params), inputs, max_programs=max_programs)


@pytest.mark.parametrize(("name", "params"), named("forward"))
def test_forward(name: str, params: HopperForwardParams) -> None:
    check_forward(CASES[name], params)


@pytest.mark.parametrize("ping_pong", [False, True])
def test_persistent_programs_of_several_items(ping_pong: bool) -> None:
    """More items than multiprocessors: the rings go on from one item to the next."""
    case = AttentionCase("", 3, 640, 640, heads=20, kv_heads=4, head_dim=64, dtype="bfloat16", causal=True)
    check_forward(case, HopperForwardParams(128, 128, 2, True, ping_pong), max_programs=3)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("ping_pong", [False, True])
@pytest.mark.parametrize(("kv_length", "stages"), [(100, 2), (128, 3), (230, 3), (256, 5)])
def test_keys_that_stay(kv_length: int, stages: int, ping_pong: bool, ahead: bool) -> None:
    """Programs that begin and end within a key head."""
    case = AttentionCase("", 5, 640, kv_length, heads=20, kv_heads=4, head_dim=64, dtype="bfloat16")
    check_forward(case, HopperForwardParams(128, 128, stages, True, ping_pong, ahead), max_programs=4)


def test_consumers_that_go_on_alone() -> None:
    case = AttentionCase("", 3, 640, 640, heads=20, kv_heads=4, head_dim=64, dtype="bfloat16", causal=True)
    check_forward(case, HopperForwardParams(128, 128, 2, True, False, False), max_programs=3)


@pytest.mark.parametrize("block_k", [64, 80])
def test_keys_that_stay_without_a_buffer_for_the_output(block_k: int) -> None:
    case = AttentionCase("", 2, 640, 60, heads=20, kv_heads=4, head_dim=256, dtype="bfloat16")
    check_forward(case, HopperForwardParams(128, block_k, 2, True, False))


@pytest.mark.parametrize(("name", "params"), named("backward"))
def test_backward(name: str, params: Any) -> None:
    check_backward(CASES[name], params)


def test_sums_of_a_bias_that_heads_share() -> None:
    """Of a row for all queries: a sum of each tile is added by a reduction."""
    check_backward(AttentionCase("", 1, 390, 390, head_dim=64, bias="k", **_SIZES), HopperBackwardParams(64, 2, False))


WIDE = [
    ({"head_dim": 192, "value_dim": 128}, HopperBackwardParams(64, 2, True)),
    ({"head_dim": 256}, WideBackwardParams()),
    ({"head_dim": 192, "value_dim": 128}, WideBackwardParams(True, 3, 1, key_stages=3, value_stages=2)),
    ({"head_dim": 256}, WideBackwardParams(False, 2, 2, 16, 1)),
    ({"head_dim": 192}, WideBackwardParams(False, 2, 1, 32, 2)),
    ({"head_dim": 192, "logits_soft_cap": 9.0, "bias": "hqk"}, WideBackwardParams()),
    ({"head_dim": 256, "logits_soft_cap": 9.0, "kv_heads": 1}, WideBackwardParams(False, 2, 2, 16, 1)),
]


@pytest.mark.parametrize(("options", "params"), WIDE, ids=str)
def test_wide_backward_of_several_items(options: dict[str, Any], params: Any) -> None:
    """More items than multiprocessors, the shortest of one step: gradients leave while the next item is loaded."""
    case = AttentionCase("", 1, 390, 390, causal=True, **_SIZES | options)
    with mock.patch.object(backend, "num_sms", return_value=3):
        check_backward(case, params)


def check_backward(case: AttentionCase, params: Any) -> None:
    inputs = inputs_of(case)
    query, value = inputs.query, inputs.value
    d_out = jax.ShapeDtypeStruct((*query.shape[:3], value.shape[3]), query.dtype)
    lse = jax.ShapeDtypeStruct((query.shape[0], query.shape[2], query.shape[1]), jnp.float32)

    def backward(inputs: AttentionInputs, out: Any, lse: Any, d_out: Any) -> dict[str, Any]:
        return BACKEND.backward(inputs, (out, lse), (d_out, None), params)

    check_schedules(backward, inputs, d_out, lse, d_out, max_programs=4)
