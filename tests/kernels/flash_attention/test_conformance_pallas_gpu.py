"""The conformance suite on the Hopper kernels, interpreted on the CPU."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.flash_attention.conformance import (
    Conformance,
    cotangents,
    inputs_of,
    judge,
    oracles,
    run_and_judge,
)
from tests.support.mosaic_interpret import interpret_mosaic
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.kernels.flash_attention.hopper import backend
from tilewright.kernels.flash_attention.hopper.backend import PallasGpuFlashAttention
from tilewright.kernels.flash_attention.hopper.call import GroupParts
from tilewright.kernels.flash_attention.hopper.params import (
    HopperBackwardParams,
    HopperForwardParams,
    WideBackwardParams,
)
from tilewright.kernels.flash_attention.op import FlashAttention


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    with interpret_mosaic():
        yield


class TestConformance(Conformance):
    backend = PallasGpuFlashAttention()


run = functools.partial(run_and_judge, PallasGpuFlashAttention())


def run_forward(case: AttentionCase, params: HopperForwardParams) -> None:
    inputs = inputs_of(case)
    out, lse = jax.jit(lambda inputs: PallasGpuFlashAttention().forward(inputs, params))(inputs)
    exact, low = oracles(inputs, *cotangents(inputs))
    exact, low = ({name: each.arrays[name] for name in ("out", "lse")} for each in (exact, low))
    judge({"out": out, "lse": lse}, exact, low, 2.0)


FORWARD = [
    HopperForwardParams(128, 64, 2, False, False),
    HopperForwardParams(128, 64, 3, True, True),
    HopperForwardParams(192, 80, 2, True, True),
    HopperForwardParams(192, 128, 2, False, True),
]
BACKWARD = [HopperBackwardParams(*rest) for rest in ((64, 1, False), (64, 2, True), (128, 2, False), (64, 2, False))]


CONFIGS = list(zip(FORWARD, BACKWARD, strict=True))


@pytest.mark.parametrize(
    ("causal", "configs"),
    list(itertools.product([False, True], CONFIGS)),
)
def test_configs(configs: tuple[HopperForwardParams, HopperBackwardParams], causal: bool):
    forward, backward = configs
    dim = 64 if backward.block_q == 128 else 128
    case = AttentionCase("", 1, 330, 290, heads=4, kv_heads=2, head_dim=dim, dtype="bfloat16", causal=causal)
    run(case, forward, backward)


@pytest.mark.parametrize(
    ("head_dim", "value_dim"),
    [*((dim, dim) for dim in range(8, 257, 8)), (72, 160), (160, 72), (200, 40)],
)
def test_head_dims(head_dim: int, value_dim: int):
    """Panels of 64 columns and a narrower last one, in two or three steps of keys."""
    case = AttentionCase("", 1, 70, 90, heads=2, head_dim=head_dim, value_dim=value_dim, dtype="bfloat16")
    run_forward(case, HopperForwardParams(128, 32 if max(head_dim, value_dim) > 128 else 48, 2, head_dim % 16 > 0))


@pytest.mark.parametrize(
    ("kv_length", "options", "params"),
    [
        (100, {"kv_heads": 1}, HopperForwardParams(128, 128, 2, True, False)),
        (100, {"causal": True}, HopperForwardParams(128, 128, 2, True, True)),
        (250, {}, HopperForwardParams(128, 128, 4, True, True)),
        (197, {}, HopperForwardParams(128, 208, 2, True, False, False)),
        (197, {"causal": True, "sinks": 1}, HopperForwardParams(128, 80, 2, True, True, False)),
        (250, {"kv_heads": 1, "head_dim": 72}, HopperForwardParams(128, 128, 3, True, False)),
        (130, {"head_dim": 160, "bias": "hqk"}, HopperForwardParams(128, 80, 2, True, False)),
        (60, {"head_dim": 256}, HopperForwardParams(128, 32, 3, True, False)),
    ],
)
def test_keys_stay_for_all_items_of_a_key_head(kv_length: int, options: dict[str, Any], params: HopperForwardParams):
    """Lists of 5 CTAs begin and end within a key head."""
    sizes = {"batch": 2, "q_length": 300, "kv_length": kv_length, "heads": 4, "head_dim": 64, "dtype": "bfloat16"}
    with mock.patch.object(backend, "num_sms", return_value=5):
        run_forward(AttentionCase("", **sizes | options), params)


@pytest.mark.parametrize(
    ("parts", "head_dim", "value_dim", "deterministic"),
    [
        (1, 64, 64, False),
        (1, 128, 128, True),
        (2, 64, 64, False),
        (3, 128, 128, False),
        (3, 40, 64, False),
        (5, 72, 72, True),
        (2, 128, 64, False),
    ],
)
def test_split_query_heads(parts: int, head_dim: int, value_dim: int, deterministic: bool):
    """So few items are split among all SMs: here as the test says. Of 3 parts of 5 heads the last has one."""
    split = functools.partial(GroupParts, parts=parts)
    sizes = {"batch": 2, "q_length": 130, "kv_length": 190, "heads": 10, "kv_heads": 2}
    case = AttentionCase(
        "", **sizes, head_dim=head_dim, value_dim=value_dim, dtype="bfloat16", causal=True,
        causal_alignment="bottom_right",
    )  # fmt: skip
    with mock.patch.object(backend, "group_parts", lambda inputs, plan, num_sms: split(inputs.heads // 2)):
        run(case, FORWARD[0], HopperBackwardParams(64, 2, deterministic))


@pytest.mark.parametrize("bias", ["bhqk", "hqk", "bk", "q", ""])
def test_adds_a_bias(bias: str):
    case = AttentionCase("", 2, 70, 150, heads=2, head_dim=64, dtype="bfloat16", causal=True, bias=bias)
    run(case, FORWARD[0], BACKWARD[0])


@pytest.mark.parametrize(
    ("forward", "backward", "options"),
    [
        (FORWARD[1], BACKWARD[3], {"kv_heads": 1, "head_dim": 64, "bias_dtype": "float32"}),
        (FORWARD[2], BACKWARD[1], {"kv_heads": 2, "head_dim": 64, "causal": True}),
        (FORWARD[3], BACKWARD[3], {"kv_heads": 2, "head_dim": 40, "dtype": "float16"}),
        (HopperForwardParams(), BACKWARD[3], {"kv_heads": 1, "head_dim": 128, "causal": True}),
        (HopperForwardParams(), BACKWARD[1], {"kv_heads": 2, "head_dim": 128, "logits_soft_cap": 3.0}),
    ],
)
def test_a_bias_through_shared_memory(
    forward: HopperForwardParams, backward: HopperBackwardParams, options: dict[str, Any]
):
    """More tiles than stages, ragged ends, rows that TMA could not step through, and a float32 bias."""
    sizes: dict[str, Any] = {"batch": 2, "q_length": 330, "kv_length": 290, "heads": 2, "dtype": "bfloat16"}
    run(AttentionCase("", bias="hqk", **sizes | options), forward, backward)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_constant_bias_gets_no_gradient(deterministic: bool):
    case = AttentionCase("", 1, 70, 150, heads=2, head_dim=64, dtype="bfloat16", bias="hqk")
    inputs = inputs_of(case).replace(wanted=frozenset({"query", "key", "value"}))
    params = HopperBackwardParams(64, 2, deterministic)
    d_out, d_lse = cotangents(inputs)
    exact, low = oracles(inputs, d_out, d_lse)
    with mock.patch.object(backend, "BiasGradient", side_effect=AssertionError):
        out, lse = jax.jit(lambda inputs: backend.PallasGpuFlashAttention().forward(inputs, FORWARD[0]))(inputs)
        gradients = jax.jit(
            lambda inputs, results, d: backend.PallasGpuFlashAttention().backward(inputs, results, d, params)
        )(inputs, (out, lse), (d_out, d_lse))
    assert gradients.pop("bias") is None
    exact, low = ({k: v for k, v in each.arrays.items() if k != "bias"} for each in (exact, low))
    judge({"out": out, "lse": lse, **gradients}, exact, low, 2.0)


INTERLEAVED: dict[str, tuple[dict[str, Any], GroupParts, int]] = {
    "causal": ({"causal": True}, GroupParts(3), 1),
    "causal, one group": ({"causal": True}, GroupParts(3), 2),
    "window": ({"causal": True, "sliding_window": 170}, GroupParts(3), 1),
    "later keys, dropout": ({"sliding_window": (0, 140), "dropout_prob": 0.2}, GroupParts(3), 1),
    "parts": ({"causal": True, "heads": 8, "logits_soft_cap": 5.0}, GroupParts(4, 2), 1),
}


@pytest.mark.parametrize("name", INTERLEAVED)
@pytest.mark.parametrize("index", [1, 2, 3])
def test_interleaved_query_heads(name: str, index: int):
    """Query heads of one key head step by step, in groups of key heads with tiles in descending and ascending order."""
    options, group, at_once = INTERLEAVED[name]
    sizes = {"q_length": 520, "kv_length": 400, "heads": 6, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16"}
    inputs = inputs_of(AttentionCase("", 1, **sizes | options))
    d_out, d_lse = cotangents(inputs)
    exact, low = oracles(inputs, d_out, d_lse)
    results = exact.results["out"].astype(inputs.query.dtype), exact.results["lse"].astype(jnp.float32)
    run_backward = functools.partial(PallasGpuFlashAttention().backward, params=BACKWARD[index])
    with (
        mock.patch.object(backend, "num_sms", return_value=3),
        mock.patch.object(backend, "group_parts", return_value=group),
        mock.patch.object(backend, "interleaved_at_once", return_value=at_once) as asked,
    ):
        gradients = jax.jit(run_backward)(inputs, results, (d_out, d_lse))
    assert asked.called
    judge(gradients, exact.gradients, low.gradients, 3.0 if "cap" in str(options) else 2.0)


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_a_scale_that_turns_masked_logits(scale: float):
    case = AttentionCase(
        "", 1, 100, 150, heads=2, kv_heads=1, head_dim=64, dtype="bfloat16", causal=True, softmax_scale=scale
    )
    run(case, FORWARD[0], BACKWARD[0])


def test_a_bias_of_minus_infinity_over_whole_tiles():
    """The first tile of keys, for rows that see others and for one that sees none; nothing else is masked."""
    case = AttentionCase("", 1, 128, 256, heads=2, kv_heads=1, head_dim=64, dtype="bfloat16", bias="qk")
    inputs = inputs_of(case)
    bias = inputs.bias.at[..., 40:, :128].set(-jnp.inf).at[..., 100, :].set(-jnp.inf)
    inputs = inputs.replace(bias=bias)
    d_out, d_lse = cotangents(inputs)
    backend, (exact, low) = PallasGpuFlashAttention(), oracles(inputs, d_out, d_lse)
    results = jax.jit(lambda inputs: backend.forward(inputs, FORWARD[0]))(inputs)
    judge(dict(zip(("out", "lse"), results, strict=True)), exact.results, low.results, 2.0)


@pytest.mark.parametrize("sinks", [0, 1])
@pytest.mark.parametrize("index", range(len(FORWARD)))
def test_a_bias_of_the_lowest_number(index: int, sinks: int):
    """In whole rows, in the first tiles of others, and before and behind tiles of −∞."""
    case = AttentionCase("", 1, 130, 300, heads=2, kv_heads=1, head_dim=64, dtype="bfloat16", bias="qk", sinks=sinks)
    inputs, lowest = inputs_of(case), float(jnp.finfo(jnp.bfloat16).min)
    rows = np.arange(130)
    bias = np.array(inputs.bias, np.float32)[0, 0]
    bias[rows % 8 < 5, :] = lowest
    bias[rows % 8 == 1, 128:] = bias[rows % 8 == 2, :128] = -np.inf
    bias[rows % 8 == 3, 140:] = bias[rows % 8 == 4, :130] = 3.0
    inputs = inputs.replace(bias=jnp.asarray(bias, jnp.bfloat16)[None, None])
    out, lse = jax.jit(lambda inputs: PallasGpuFlashAttention().forward(inputs, FORWARD[index]))(inputs)
    exact, low = oracles(inputs, *cotangents(inputs))
    assert np.all(np.isneginf(np.asarray(lse)[..., (rows % 8 < 3) & (sinks == 0)]))
    judge({"out": out, "lse": lse}, exact.results, low.results, 2.0)


def test_wide_heads():
    case = AttentionCase("", 1, 150, 200, heads=1, head_dim=256, value_dim=190, dtype="float16", bias="")
    run(case, HopperForwardParams(128, 64), WideBackwardParams())


@pytest.mark.parametrize("ahead", [False, True])
def test_races_of_keys_that_stay(ahead: bool):
    case = AttentionCase("", 2, 140, 40, heads=2, head_dim=64, dtype="bfloat16")
    with mock.patch.object(backend, "num_sms", return_value=2), interpret_mosaic(detect_races=True):
        run_forward(case, HopperForwardParams(128, 48, 2, True, False, ahead))


@pytest.mark.parametrize("index", [1, 3])
def test_races(index: int):
    case = AttentionCase("", 1, 150, 200, heads=2, kv_heads=1, head_dim=128, dtype="bfloat16", causal=True)
    with interpret_mosaic(detect_races=True):
        run(case, FORWARD[0], BACKWARD[index])


def test_a_config_that_does_not_fit_is_refused():
    arrays, kwargs = AttentionCase("", 1, 64, heads=1, head_dim=256, dtype="bfloat16").arguments()
    inputs = FlashAttention().prepare(*arrays, **kwargs)
    with pytest.raises(ValueError, match="shared memory"):
        PallasGpuFlashAttention().forward(inputs, HopperForwardParams(128, 128, 4))


def test_nothing_is_seen_where_a_tile_is_empty():
    case = AttentionCase("", 1, 300, 300, heads=1, head_dim=64, dtype="bfloat16", packed=True, causal=True)
    inputs = inputs_of(case)
    out, lse = jax.jit(lambda inputs: PallasGpuFlashAttention().forward(inputs, FORWARD[0]))(inputs)
    assert np.array_equal(np.isneginf(np.asarray(lse))[0, 0], ~np.asarray(out).any(axis=(2, 3))[0])
