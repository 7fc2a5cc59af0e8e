"""Every config of attention in Triton that selection or tuning can take compiles for Ampere, Ada and Hopper GPUs."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

import tilewright
from tilewright.kernels.flash_attention import cases
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.op import FlashAttention
from tilewright.kernels.flash_attention.triton.backend import TritonFlashAttention
from tilewright.kernels.triton import recorded_launches
from tilewright.ops.types import Direction
from tilewright.ops.utils.known_devices import find_device

pytest.importorskip("triton")

from tilewright.kernels.triton.compiler import report

BACKEND = TritonFlashAttention()
CARDS = {
    "a100": find_device("NVIDIA A100-SXM4-80GB").device,
    "rtx4090": find_device("NVIDIA GeForce RTX 4090").device,
    "h100": find_device("NVIDIA H100 80GB HBM3").device,
}

SPILLED = {"everything": 900, "d256": 200, "a100": 24, "rtx4090": 24, "h100": 0}
"""Bytes that a kernel may spill: with every option at once, at the widest heads, and otherwise by card."""

SPILLED_BY_TRITON_3_9 = {
    "soft_cap_d64-h100-forward": 8,
    "lengths_d64-h100-forward": 216,
    "packed_d64-h100-forward": 204,
    "dropout_d128-h100-backward": 20,
    "dropout_d256-h100-backward": 204,
    "soft_cap_d256-h100-backward": 212,
}
"""Bytes that first choices for these calls spill with Triton 3.9. On an H100 no call takes Triton for them unless it
is asked to."""

# Compiled with the first choice; every other candidate is compiled only for the most common calls.
OPTIONS: dict[str, dict[str, Any]] = {
    "soft_cap": {"causal": True, "logits_soft_cap": 30.0},
    "window": {"causal": True, "sliding_window": 255},
    "bias": {"bias": "hqk"},
    "mask": {"mask": "bhqk"},
    "lengths": {"lengths": True, "causal": True},
    "packed": {"batch": 1, "packed": True, "causal": True},
    "dropout": {"dropout_prob": 0.1},
    "grouped": {"causal": True, "kv_heads": 2, "sinks": 1},
    "ragged": {"q_length": 1000, "kv_length": 777, "causal": True, "causal_alignment": "bottom_right"},
}
OTHERS: dict[str, dict[str, Any]] = {
    "d80": {"head_dim": 80, "causal": True},
    "d192_v128": {"head_dim": 192, "value_dim": 128, "causal": True},
    "float16": {"dtype": "float16", "causal": True},
    "float32": {"dtype": "float32", "causal": True},
    "float32_d256": {"dtype": "float32", "head_dim": 256},
    "everything": {
        "causal": True, "sliding_window": (256, 64), "logits_soft_cap": 30.0, "bias": "hqk", "mask": "bk",
        "segments": True, "lengths": True, "sinks": 2, "dropout_prob": 0.1, "kv_heads": 2,
    },
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Compilation:
    """One config of one call, as shapes, for a card."""

    name: str
    card: str
    inputs: AttentionInputs
    direction: Direction
    params: Any


def inputs_of(**options: Any) -> AttentionInputs:
    sizes: dict[str, Any] = {"batch": 2, "q_length": 1024, "heads": 8, "head_dim": 128, "dtype": "bfloat16"}
    case = AttentionCase("", **sizes | options)
    with mock.patch.object(cases, "normal", lambda _, shape, dtype: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))):
        arrays, kwargs = case.arguments()
    return FlashAttention().prepare(*arrays, **kwargs)


def compilations() -> Iterator[Compilation]:
    plain: dict[str, dict[str, Any]] = {"full": {}, "causal": {"causal": True}}
    all_of = {f"{name}_d{dim}": {"head_dim": dim} | options
              for dim in (64, 128, 256) for name, options in plain.items()}  # fmt: skip
    first_of = {f"{name}_d{dim}": {"head_dim": dim} | options
                for dim in (64, 128, 256) for name, options in OPTIONS.items()} | OTHERS  # fmt: skip
    directions: tuple[Direction, ...] = ("forward", "backward")
    for name, options in (all_of | first_of).items():
        inputs = inputs_of(**options)
        for (card, device), direction in itertools.product(CARDS.items(), directions):
            candidates = BACKEND.candidates(inputs, device, direction)
            for params in candidates[: None if name in all_of else 1]:
                tiles = next(getattr(params, field.name) for field in dataclasses.fields(params))
                sizes = "x".join(str(int(value)) for value in dataclasses.astuple(tiles))
                sizes += "-repeats" if getattr(params, "deterministic", False) else ""
                yield Compilation(f"{name}-{card}-{direction}-{sizes}", card, inputs, direction, params)


def trace(compilation: Compilation) -> None:
    inputs, params = compilation.inputs, compilation.params
    if compilation.direction == "forward":
        jax.eval_shape(lambda inputs: BACKEND.forward(inputs, params), inputs)
        return
    batch, q_length, heads, _ = inputs.query.shape
    out = jax.ShapeDtypeStruct((batch, q_length, heads, inputs.value.shape[-1]), inputs.query.dtype)
    lse = jax.ShapeDtypeStruct((batch, heads, q_length), jnp.float32)
    jax.eval_shape(lambda *a: BACKEND.backward(*a, params), inputs, (out, lse), (out, lse))


@pytest.mark.parametrize("compilation", list(compilations()), ids=lambda compilation: compilation.name)
def test_compiles_without_spills(compilation: Compilation) -> None:
    device = CARDS[compilation.card]
    with tilewright.target_device(device.name), recorded_launches() as launches:
        trace(compilation)
    assert device.capability is not None
    reports = [report(launch, device.capability) for launch in launches]
    fused = compilation.direction == "backward" and not compilation.params.deterministic
    assert len(reports) == (1 if compilation.direction == "forward" else 2 if fused else 3)
    allowed = next(size for name, size in SPILLED.items() if name in compilation.name)
    known = (size for name, size in SPILLED_BY_TRITON_3_9.items() if compilation.name.startswith(name))
    allowed = max(allowed, *known, 0)
    faulty = [each for each in reports if each.spill_loads > allowed or each.serialised]
    assert [fault for each in faulty for fault in each.faults] == []
