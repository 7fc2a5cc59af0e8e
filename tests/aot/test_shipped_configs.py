"""Every config that selection or tuning can take on a Hopper GPU compiles without spills or serialised wgmmas."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tilewright
from tests.aot.compiler import H100, compile_for_h100, missing_packages
from tests.kernels.conftest import abstract_arguments
from tilewright.kernels.flash_attention.cases import HOPPER_CASES, AttentionCase
from tilewright.kernels.flash_attention.hopper.backend import PallasGpuFlashAttention
from tilewright.kernels.flash_attention.hopper.params import HopperBackwardParams
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.op import FlashAttention
from tilewright.ops.types import Direction
from tilewright.ops.utils.device import current_device

if missing_packages():
    pytest.skip(missing_packages(), allow_module_level=True)

BACKEND = PallasGpuFlashAttention()


def case(name: str, **options: Any) -> AttentionCase:
    sizes: dict[str, Any] = {"batch": 2, "q_length": 1024, "heads": 8, "head_dim": 128, "dtype": "bfloat16"}
    return AttentionCase(name, **sizes | options)


# What takes registers for each score: with every tile that a head dim has.
SCORE_OPTIONS: dict[str, dict[str, Any]] = {
    "soft_cap": {"causal": True, "logits_soft_cap": 30.0},
    "bias": {"bias": "bhqk"},
    "alibi": {"position_bias": "alibi", "bias_dtype": "float32"},
    "alibi_causal": {"position_bias": "alibi", "bias_dtype": "float32", "causal": True},
    "relative_bias": {"position_bias": "relative", "bias_dtype": "float32"},
    "relative_bias_masks": {"position_bias": "relative", "segments": True, "logits_soft_cap": 30.0, "causal": True},
    "mask": {"mask": "bhqk"},
    "segments": {"segments": True, "causal": True},
    "dropout": {"dropout_prob": 0.1},
    "dropout_causal": {"dropout_prob": 0.1, "causal": True},
    "dropout_segments": {"dropout_prob": 0.1, "segments": True},
    "dropout_masks": {"dropout_prob": 0.1, "segments": True, "mask": "bk", "causal": True},
    "everything": {
        "causal": True,
        "sliding_window": (256, 64),
        "logits_soft_cap": 30.0,
        "bias": "hqk",
        "mask": "bk",
        "segments": True,
        "lengths": True,
        "sinks": 2,
        "dropout_prob": 0.1,
        "kv_heads": 2,
    },
}
SCORE_CASES = [
    case(f"{name}_d{head_dim}", head_dim=head_dim, **options)
    for head_dim in (64, 128, 256)
    for name, options in SCORE_OPTIONS.items()
]
OTHER_CASES = [
    case("window", causal=True, sliding_window=255),
    case("window_both_sides", sliding_window=(128, 64)),
    case("lengths", lengths=True),
    case("packed", batch=1, packed=True, causal=True),
    case("bias_of_heads", bias="hqk"),
    case("bias_of_keys", bias="bk"),
    case("mask_of_keys", mask="bk"),
    case("sinks", causal=True, sinks=1),
    case("grouped", causal=True, kv_heads=2),
    case("one_kv_head", kv_heads=1),
    case("d96", head_dim=96, causal=True),
    case("d192", head_dim=192, causal=True),
    case("d192_v128", head_dim=192, value_dim=128, causal=True),
    case("d192_full", head_dim=192),
    case("d192_soft_cap", head_dim=192, causal=True, logits_soft_cap=30.0),
    case("d192_dropout", head_dim=192, dropout_prob=0.1),
    case("d192_segments_bias", head_dim=192, segments=True, bias="hqk", causal=True),
    case("d192_masks", head_dim=192, segments=True, mask="bhqk", lengths=True, causal=True),
    case("d192_v128_full", head_dim=192, value_dim=128),
    case("d192_v128_grouped", head_dim=192, value_dim=128, kv_heads=2, causal=True),
    case("d192_v128_window", head_dim=192, value_dim=128, causal=True, sliding_window=255),
    case("d192_v128_bias", head_dim=192, value_dim=128, bias="hqk", causal=True),
    case("d192_v128_mask", head_dim=192, value_dim=128, mask="bhqk", bias="bhqk"),
    case("d192_v128_ragged", head_dim=192, value_dim=128, q_length=1000, kv_length=777),
    case("d192_v128_soft_cap", head_dim=192, value_dim=128, segments=True, logits_soft_cap=30.0),
    case("d192_v128_dropout", head_dim=192, value_dim=128, segments=True, dropout_prob=0.1),
    case("d256_v64", head_dim=256, value_dim=64, kv_heads=1, causal=True),
    case("d192_packed", head_dim=192, batch=1, packed=True, dropout_prob=0.1),
    case("d128_v256", value_dim=256, kv_heads=2, causal=True),
    case("d256_window", head_dim=256, causal=True, sliding_window=255),
    case("d256_soft_cap_segments", head_dim=256, logits_soft_cap=30.0, segments=True),
    case("d64_v128", head_dim=64, value_dim=128),
    case("d128_v64", head_dim=128, value_dim=64),
    case("d40", head_dim=40),
    case("float16_d64", dtype="float16", head_dim=64),
    case("float16", dtype="float16", causal=True),
    case("ragged", q_length=1000, kv_length=777, causal=True, causal_alignment="bottom_right"),
    case("one_query", q_length=1, kv_length=2048, kv_heads=2),
    case("short", q_length=20, kv_length=30),
    case("d64_197", head_dim=64, q_length=197),
    case("d64_256", head_dim=64, q_length=256),
    case("d64_cross_77", head_dim=64, kv_length=77),
    case("d64_512", head_dim=64, q_length=512),
    case("d128_256", q_length=256),
    case("d72", head_dim=72),
    case("d72_257", head_dim=72, q_length=257),
    case("d72_everything", head_dim=72, **SCORE_OPTIONS["everything"]),
    case("d80_256_causal", head_dim=80, q_length=256, causal=True),
    case("d160", head_dim=160),
    case("d160_256", head_dim=160, q_length=256),
    case("d160_64", head_dim=160, q_length=64),
    case("d160_bias", head_dim=160, bias="bhqk", causal=True),
    case("d160_dropout_masks", head_dim=160, **SCORE_OPTIONS["dropout_masks"]),
    case("d160_everything", head_dim=160, **SCORE_OPTIONS["everything"]),
]


@dataclasses.dataclass(frozen=True)
class Compilation:
    """One config of one call, as shapes."""

    name: str
    inputs: AttentionInputs
    direction: Direction
    params: Any


def compilations() -> Iterator[Compilation]:
    op = FlashAttention()
    for each in (*HOPPER_CASES.values(), *SCORE_CASES, *OTHER_CASES):
        arrays, kwargs = abstract_arguments(each)
        inputs = op.prepare(*arrays, **kwargs)
        with tilewright.target_device(H100):
            device = current_device()
            for direction in ("forward", "backward"):
                if BACKEND.not_supported_reasons(inputs, device, direction):
                    continue
                heuristic = BACKEND.heuristic(inputs, device, direction)
                for params in dict.fromkeys([heuristic, *BACKEND.candidates(inputs, device, direction)]):
                    sizes = "x".join(str(value) for value in dataclasses.astuple(params) if value is not None)
                    yield Compilation(f"{each.name}-{direction}-{sizes}", inputs, direction, params)


def program(compilation: Compilation) -> tuple[Any, tuple[Any, ...]]:
    """The function to compile, and its arguments' shapes."""
    inputs, params = compilation.inputs, compilation.params
    if compilation.direction == "forward":
        return lambda inputs: BACKEND.forward(inputs, params), (inputs,)
    batch, q_length, heads, _ = inputs.query.shape
    out = jax.ShapeDtypeStruct((batch, q_length, heads, inputs.value.shape[-1]), inputs.query.dtype)
    lse = jax.ShapeDtypeStruct((batch, heads, q_length), jnp.float32)
    return (
        lambda inputs, results, cotangents: BACKEND.backward(inputs, results, cotangents, params),
        (inputs, (out, lse), (out, lse)),
    )


SPILLED_ADDRESSES = 48
"""Bytes that the fused backward kernel up to head_dim 128 may spill: addresses of shared memory that it computes once
and reloads once or twice in a step, of some 600 instructions. Computing the next scores beside dK is worth it: 2 %."""

SPILLED_BY_CALL = {
    "one_kv_head-backward": 52,  # as much as SPILLED_ADDRESSES, and an address of dK and dV, in halves of float32
    "dropout_causal_d128-forward": 12,  # an address, reloaded three times; of 96 keys none, but slower
    "relative_bias_masks_d128-backward": 132,  # 68 without the bias, 108 with one that is an array, which no row has
    "d192_v128_bias-backward": 32,  # its tile beside dK and dV; not compared with the kernels split by role
    "everything_d128-backward": 124,
    "everything_d256-forward": 8,
    "everything_d256-backward": 228,  # the gradient of the bias on its way through shared memory
}
"""Bytes that kernels spill, by call and direction, the most of jax 0.11.2 and 0.12."""


@pytest.mark.parametrize("compilation", list(compilations()), ids=lambda compilation: compilation.name)
def test_compiles_without_spills(compilation: Compilation) -> None:
    function, arguments = program(compilation)
    reports = compile_for_h100(function, *arguments)
    assert reports, "ptxas was not run"
    allowed = 0
    if isinstance(compilation.params, HopperBackwardParams) and not compilation.params.deterministic:
        allowed = SPILLED_ADDRESSES
    call, direction, _ = compilation.name.split("-", 2)
    allowed = max(allowed, SPILLED_BY_CALL.get(f"{call}-{direction}", 0))
    faulty = [report for report in reports if report.serialised or report.spill_loads > allowed]
    assert [fault for report in faulty for fault in report.faults] == []
