"""The conformance suite on the Triton kernels, interpreted on the CPU."""

import functools
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import numpy as np
import pytest

from tests.kernels.conformance import run_both
from tests.kernels.flash_attention.conformance import Conformance, named, poisoned, run_and_judge
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.triton.backend import TritonFlashAttention
from tilewright.kernels.flash_attention.triton.params import Tiles, TritonBackwardParams, TritonForwardParams
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.triton.interpreter import interpret_triton
from tilewright.ops.types import Direction

pytest.importorskip("triton")

BACKEND = TritonFlashAttention()
FORWARD = TritonForwardParams(Tiles(32, 16))
BACKWARD = TritonBackwardParams(Tiles(16, 32), Tiles(32, 16))


pytestmark = pytest.mark.usefixtures("unoptimised")


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    with interpret_triton():
        yield


class TestConformance(Conformance):
    backend: ClassVar[Backend] = BACKEND

    def params(self, inputs: AttentionInputs, direction: Direction) -> Any:
        return FORWARD if direction == "forward" else BACKWARD


run = functools.partial(run_and_judge, BACKEND)


def case(**options: Any) -> AttentionCase:
    return AttentionCase("", **{"batch": 1, "q_length": 100, "heads": 2, "head_dim": 16, "dtype": "bfloat16"} | options)


BANDS: list[dict[str, Any]] = [
    {"causal": True},
    {"causal": True, "kv_length": 70, "causal_alignment": "bottom_right"},
    {"causal": True, "q_length": 40, "kv_length": 130, "causal_alignment": "bottom_right"},
    {"sliding_window": (20, 5)},
    {"sliding_window": (None, 10)},
    {"sliding_window": (40, None), "q_length": 90, "kv_length": 96},
    {"causal": True, "batch": 2, "heads": 4, "kv_heads": 2},
    {"q_length": 96, "kv_length": 64, "head_dim": 24, "value_dim": 40},
    {"sliding_window": (20, 1)},
]


@pytest.mark.parametrize("options", BANDS, ids=str)
def test_bands(options: dict[str, Any]):
    """Of several tiles each: some without anything to see, some that see all, and some between."""
    run(case(**options), TritonForwardParams(Tiles(16, 32)), TritonBackwardParams(Tiles(32, 16), Tiles(16, 32)))


TMA: list[dict[str, Any]] = [
    {},
    {"causal": True, "kv_length": 70},
    {"head_dim": 24, "kv_heads": 1, "lengths": True},
]


@pytest.mark.parametrize("options", TMA, ids=str)
def test_loaded_by_tma(options: dict[str, Any]):
    tiles, transposed = Tiles(32, 16, tma=True), Tiles(16, 32, tma=True)
    run(case(**options), TritonForwardParams(tiles), TritonBackwardParams(transposed, tiles))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["lengths, causal", "packed"])
def test_what_lies_outside_is_not_loaded_by_tma(name: str, deterministic: bool):
    """The descriptor ends with the sequences; coordinates before it are negative."""
    tiles, transposed = Tiles(32, 16, tma=True), Tiles(16, 32, tma=True)
    params = TritonForwardParams(tiles), TritonBackwardParams(transposed, tiles, deterministic)
    call = poisoned(name, np.nan, "bfloat16")
    call.check(jax.jit(lambda *given: named(*run_both(BACKEND, *given, params))))


ON_THE_WAY: list[tuple[dict[str, Any], bool]] = [
    ({"causal": True, "kv_length": 70, "causal_alignment": "bottom_right"}, True),
    ({"sliding_window": (20, 5), "q_length": 99}, False),
    ({"causal": True, "batch": 2, "heads": 4, "kv_heads": 2, "sinks": 1}, True),
    ({"q_length": 99, "kv_length": 65, "head_dim": 24, "value_dim": 40, "bias": "hqk"}, True),
    ({"lengths": True, "batch": 2, "heads": 4, "kv_heads": 1, "dropout_prob": 0.2}, False),
    ({"mask": "hqk", "heads": 4, "kv_heads": 2, "logits_soft_cap": 20.0, "dtype": "float32"}, True),
    ({"q_length": 96, "kv_length": 70}, False),
]


@pytest.mark.parametrize(("options", "tma"), ON_THE_WAY, ids=str)
def test_gradients_of_queries_on_the_way(options: dict[str, Any], tma: bool):
    backward = TritonBackwardParams(Tiles(16, 32, tma=tma), deterministic=False)
    run(case(**options), FORWARD, backward)
