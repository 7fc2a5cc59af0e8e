"""The backward kernels for wide heads, interpreted on the CPU, against the oracle."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.flash_attention.conformance import ConformanceCase, cotangents, inputs_of, judge_gradients, oracle
from tests.support.mosaic_interpret import interpret_mosaic
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.kernels.flash_attention.hopper import backend
from tilewright.kernels.flash_attention.hopper.backend import PallasGpuFlashAttention
from tilewright.kernels.flash_attention.hopper.bias_gradient import BiasGradient
from tilewright.kernels.flash_attention.hopper.call import BackwardCall, GroupParts
from tilewright.kernels.flash_attention.hopper.params import (
    BLOCK,
    BackwardParams,
    HopperBackwardParams,
    WideBackwardParams,
)
from tilewright.kernels.flash_attention.hopper.wide.backward import wide_key_value_kernel
from tilewright.kernels.flash_attention.hopper.wide.plans import WideBackwardPlan
from tilewright.kernels.hopper.limits import SHARED_BYTES

DETERMINISTIC = WideBackwardParams()
FUSED = WideBackwardParams(False, d_out_stages=1, d_query_buffers=2)
HELD = HopperBackwardParams(64, 2, True)  # both dK and dV of a tile of keys in one warpgroup
BACKEND = PallasGpuFlashAttention()


def run(case: AttentionCase, *configs: BackwardParams, mask_object: bool = False) -> None:
    """Compares configs with the oracle, from the oracle's residuals."""
    inputs = ConformanceCase(case, mask_object).prepared(seed=0)
    judge_gradients(BACKEND, inputs, configs, case.tolerance_factor)


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    with interpret_mosaic():
        yield


def wide(q_length: int = 70, kv_length: int = 90, **options: Any) -> AttentionCase:
    sizes: dict[str, Any] = {"batch": 1, "heads": 2, "kv_heads": 1, "head_dim": 192, "value_dim": 64}
    return AttentionCase("", q_length=q_length, kv_length=kv_length, **sizes | {"dtype": "bfloat16"} | options)


EVERYTHING: dict[str, Any] = {
    "batch": 2,
    "heads": 4,
    "kv_heads": 2,
    "causal": True,
    "sliding_window": (90, 10),
    "logits_soft_cap": 3.0,
    "bias": "hqk",
    "mask": "hqk",
    "segments": True,
    "lengths": True,
    "dropout_prob": 0.1,
    "sinks": 2,
}
# The options over the configs and head dims: most of a test is the compilation of what is interpreted.
CASES: dict[str, tuple[AttentionCase, tuple[BackwardParams, ...]]] = {
    "causal_d256": (
        wide(130, 100, head_dim=256, value_dim=256, causal=True),
        (DETERMINISTIC, FUSED),
    ),
    "full_d192": (
        wide(130, 130, value_dim=192, heads=1),
        (WideBackwardParams(True, 3, 2, key_stages=3), WideBackwardParams(False, 2, 2, d_query_columns=16)),
    ),
    "causal_d192_v128": (wide(150, 140, heads=1, value_dim=128, causal=True), (HELD, DETERMINISTIC)),
    "window": (
        wide(150, 150, heads=1, head_dim=96, value_dim=192, causal=True, sliding_window=50),
        (HELD, WideBackwardParams(True, 2, 1, value_stages=2), WideBackwardParams(False, 3, 2)),
    ),
    "lengths": (
        wide(head_dim=64, value_dim=256, batch=2, lengths=True, dtype="float16"),
        (WideBackwardParams(False, 3, 1, d_query_columns=64),),
    ),
    "packed": (wide(130, 130, heads=1, packed=True, causal=True, dtype="float16"), (DETERMINISTIC, FUSED)),
    "segments": (wide(batch=2, segments=True, logits_soft_cap=2.0), (FUSED,)),
    "mask_of_heads": (wide(mask="bhqk", dropout_prob=0.3), (DETERMINISTIC, FUSED)),
    "bias": (wide(bias="bhqk", softmax_scale=-0.05), (DETERMINISTIC, HELD)),
    "bottom_right": (
        wide(70, 150, heads=1, causal=True, causal_alignment="bottom_right", sliding_window=(20, 70)),
        (FUSED,),
    ),
    "short": (wide(5, 9, heads=1, value_dim=128), (DETERMINISTIC, FUSED, HELD)),
    "everything": (wide(**EVERYTHING), (DETERMINISTIC, FUSED, HELD)),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str):
    case, configs = CASES[name]
    with mock.patch.object(backend, "num_sms", return_value=2):  # so that a CTA has several items
        run(case, *configs)


def test_mask_algebra():
    run(wide(batch=2), DETERMINISTIC, mask_object=True)


@pytest.mark.parametrize(
    ("params", "options"),
    [
        (DETERMINISTIC, {"causal": True}),
        (FUSED, {"logits_soft_cap": 2.0, "dropout_prob": 0.2}),
        (HELD, {"value_dim": 128, "heads": 1}),
    ],
    ids=["deterministic", "fused", "held"],
)
def test_races(params: BackwardParams, options: dict[str, Any]):
    with interpret_mosaic(detect_races=True), mock.patch.object(backend, "num_sms", return_value=2):
        run(wide(130, 70, **options), params)


def test_keys_that_no_query_sees_have_zeros():
    inputs = inputs_of(wide(40, 130, heads=1, causal=True))
    d_out, d_lse = cotangents(inputs)
    results = oracle(inputs, d_out, d_lse).results
    results = results["out"].astype(inputs.query.dtype), results["lse"]
    got = jax.jit(functools.partial(BACKEND.backward, params=FUSED))(inputs, results, (d_out, d_lse))
    assert not np.asarray(got["key"])[:, 40:].any()
    assert not np.asarray(got["value"])[:, 40:].any()


@pytest.mark.parametrize(
    "options",
    [
        {"query_stages": 1},
        {"d_out_stages": 0},
        {"key_stages": 1},
        {"value_stages": 0},
        {"d_query_columns": 24},
        {"d_query_buffers": 0},
    ],
    ids=str,
)
def test_invalid_params(options: dict[str, int]):
    (name,) = options
    with pytest.raises(ValueError, match=name):
        WideBackwardParams(**options)


def test_plans():
    for dims in ((256, 256), (192, 128), (64, 256), (256, 64)):
        for params in (DETERMINISTIC, FUSED, WideBackwardParams(False, d_query_columns=16)):
            plan = WideBackwardPlan(params, *dims, jnp.bfloat16)
            assert plan.shared_bytes <= SHARED_BYTES, (params, dims)
            assert not plan.reason
    assert WideBackwardPlan(WideBackwardParams(False), 256, 256, jnp.bfloat16).shared_bytes > SHARED_BYTES
    assert "32 columns" in WideBackwardPlan(FUSED, 96, 256, jnp.bfloat16).reason
    assert WideBackwardPlan(FUSED, 192, 192, jnp.bfloat16).d_query_split == 128


def test_the_gradient_of_a_bias_takes_shared_memory():
    """A tile of 32 queries by 64 keys: float32 if it is added to what heads share, else of the dtype of the bias."""
    shape = (2, 3, 100, 200)
    plain = WideBackwardPlan(FUSED, 192, 192, jnp.bfloat16)
    for bias_shape, itemsize in (((1, 3, 100, 200), 4), (shape, 2)):
        gradient = BiasGradient(bias_shape, jnp.bfloat16, shape, False, 32)
        size = 32 * BLOCK * itemsize
        assert dataclasses.replace(plain, bias_gradient=gradient).shared_bytes == plain.shared_bytes + size


@pytest.mark.parametrize(
    ("parts", "head_dim", "params"),
    [(1, 192, DETERMINISTIC), (1, 192, FUSED), (2, 160, FUSED), (4, 192, DETERMINISTIC), (2, 192, HELD)],
)
def test_parts_of_query_heads(parts: int, head_dim: int, params: BackwardParams) -> None:
    """So few items are split among all SMs: here into as many as the test says, or not at all."""
    case = wide(heads=8, kv_heads=2, head_dim=head_dim, causal=True)
    with mock.patch.object(backend, "group_parts", return_value=GroupParts(4, parts)):
        run(case, params)


def test_parts_of_wide_heads_are_of_one_size() -> None:
    case = wide(heads=3, kv_heads=1)
    with (
        mock.patch.object(backend, "group_parts", return_value=GroupParts(3, 2)),
        pytest.raises(ValueError, match="of one size"),
    ):
        run(case, DETERMINISTIC)


def test_a_place_for_d_query_belongs_to_sums():
    nothing: Any = None

    def run(x: jax.Array) -> Any:
        parts = GroupParts(1)
        call = BackwardCall(x, x, x, x, x, nothing, nothing, nothing, DETERMINISTIC, (256, 256), False, parts, None)
        return wide_key_value_kernel(call, nothing, (), lists=nothing, dq_accumulator=x)

    with pytest.raises(ValueError, match="deterministic"):
        jax.eval_shape(run, jax.ShapeDtypeStruct((1, BLOCK, 1, 256), jnp.bfloat16))
