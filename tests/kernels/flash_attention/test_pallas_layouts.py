"""Mosaic's layout inference finds the layouts of the kernels for Hopper without a guess that it takes back.

It checks all transfers of a kernel at each guess: a few dead ends once took two thirds of the time to lower it.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.mosaic.gpu import layout_inference

import tilewright
from tilewright.kernels.flash_attention.hopper.backend import PallasGpuFlashAttention
from tilewright.kernels.flash_attention.hopper.params import BackwardParams, HopperBackwardParams, WideBackwardParams
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.op import FlashAttention

BACKEND = PallasGpuFlashAttention()


@pytest.fixture
def guesses(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Guesses that layout inference has made, and those that it took back."""
    counts = {"made": 0, "taken back": 0}
    original = layout_inference.conjure_assignment

    def conjure(*args: Any) -> Iterator[Any]:
        for guess in original(*args):
            counts["made"] += 1
            yield guess
            counts["taken back"] += 1  # the next one is asked for

    monkeypatch.setattr(layout_inference, "conjure_assignment", conjure)
    return counts


def inputs(head_dim: int, bias: bool) -> AttentionInputs:
    query, key = (jax.ShapeDtypeStruct((2, 256, heads, head_dim), jnp.bfloat16) for heads in (4, 2))
    array = jax.ShapeDtypeStruct((1, 4, 256, 256), jnp.float32) if bias else None
    return FlashAttention().prepare(query, key, key, array, causal=True)


@pytest.mark.parametrize(
    ("params", "head_dim", "bias"),
    [
        (HopperBackwardParams(128, 2, False), 64, False),
        (HopperBackwardParams(64, 2, False), 128, False),
        (HopperBackwardParams(64, 2, False), 128, True),
        (WideBackwardParams(False, 2, 2, 16, 1), 256, False),
    ],
)
def test_no_guess_of_a_layout_is_taken_back(
    guesses: dict[str, int],
    params: BackwardParams,
    head_dim: int,
    bias: bool,
) -> None:
    arguments = inputs(head_dim, bias)
    out = jax.ShapeDtypeStruct(arguments.query.shape, jnp.bfloat16)
    lse = jax.ShapeDtypeStruct((2, 4, 256), jnp.float32)
    backward = jax.jit(lambda inputs, results, d_results: BACKEND.backward(inputs, results, d_results, params))
    with tilewright.target_device("NVIDIA H100 80GB HBM3"):
        backward.trace(arguments, (out, lse), (out, lse)).lower(lowering_platforms=("cuda",))
    assert guesses["made"] > 0, "layout inference was not watched"
    assert guesses["taken back"] == 0
