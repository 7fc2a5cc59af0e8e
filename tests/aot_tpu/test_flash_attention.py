"""The kernels of attention as libtpu compiles them for every TPU: they fit, and their recorded cycles are goals met.

Cycles are those of libtpu's simulator, which ran on no TPU. It follows no causal masks of v5p and v7x: goals there are
of full masks.
"""

from typing import Any

import pytest

from tests.aot_tpu.compiler import TPUS, report
from tests.aot_tpu.cycles import recorded

pytest.importorskip("libtpu")

CALLS = "tests.aot_tpu.attention_calls"

GOALS = {
    ("TPU v5e", "attention, causal 4k, d 128 forward"): 0.60,
    ("TPU v5p", "attention, 4k, d 128 forward"): 0.55,
    ("TPU v6e", "attention, causal 4k, d 128 forward"): 0.22,
    ("TPU7x", "attention, 4k, d 128 forward"): 0.22,
    ("TPU v6e", "attention, 4k, d 256 forward"): 0.45,
    ("TPU7x", "attention, 4k, d 256 forward"): 0.45,
    ("TPU v6e", "attention, causal 4k, d 128 backward"): 0.25,
    ("TPU7x", "attention, 4k, d 128 backward"): 0.25,
}
"""Least shares of the peak."""

MAX_SPILLS = 0.85
"""Spills by bundles: scores and probabilities of a unit are as large as all registers, and pass through VMEM."""

SERVED: dict[str, tuple[int, int, dict[str, Any]]] = {
    "64": (64, 64, {"causal": True}),
    "128, GQA": (128, 128, {"causal": True, "heads": 4, "kv_heads": 2}),
    "192 and 128": (192, 128, {}),
    "256, window": (256, 256, {"causal": True, "sliding_window": 700}),
    "options": (128, 128, {"bias": True, "mask": True, "sinks": True, "logits_soft_cap": 30.0}),
    "segments, dropout": (64, 64, {"segments": True, "lengths": True, "dropout_prob": 0.1}),
    "float32": (128, 128, {"causal": True, "dtype": "float32"}),
}


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("served", SERVED)
@pytest.mark.parametrize("tpu", TPUS)
def test_calls_compile(tpu: str, served: str, direction: str):
    *dims, options = SERVED[served]
    found = report(tpu, f"{CALLS}:attention", tpu, direction, 0, 1920, *dims, **options)
    assert not found.error
    assert found.bundles > 0
    assert found.spills <= MAX_SPILLS * found.bundles


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("number", range(1, 3))
@pytest.mark.parametrize("tpu", TPUS)
def test_configs_compile(tpu: str, number: int, direction: str):
    assert not report(tpu, f"{CALLS}:attention", tpu, direction, number, 2048, 128, 128, causal=True).error


@pytest.mark.parametrize(("tpu", "name"), GOALS)
def test_recorded_cycles_are_shares_of_the_peak(tpu: str, name: str):
    assert GOALS[tpu, name] <= recorded()[tpu][name]["share"]


@pytest.mark.parametrize("tpu", TPUS)
def test_no_slower_than_that_of_jax(tpu: str):
    """Ours at 4096 queries and keys, in a quarter of the time; theirs at 2048, in blocks of 512."""
    theirs = report(tpu, f"{CALLS}:jax_attention", 2048, 128, 512, simulate=True)
    assert sum(theirs.cycles.values()) > 0
    ours = recorded()[tpu]["attention, 4k, d 128 forward"]["cycles"] / 4
    assert ours <= max(theirs.cycles.values())
