"""The kernels of attention as libtpu compiles them for every TPU: they fit, and take no longer than they did.

Cycles are those of libtpu's simulator, which ran on no TPU. It follows no masks of v5p and v7x, and no tables: budgets
are of full masks, and of causal ones where all blocks are counted.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.aot_tpu.compiler import TPUS, report

pytest.importorskip("libtpu")

CALLS = "tests.aot_tpu.attention_calls"
LENGTH = 4096
BUDGETS: dict[str, int] = json.loads(Path(__file__).with_name("attention_cycles.json").read_text())
TOLERANCE = 0.03

PEAK = {"TPU v5e": 131072, "TPU v5p": 262144, "TPU v6e": 524288, "TPU7x": 524288}
"""FLOP of bfloat16 matmuls in a cycle."""

GOALS = {
    "TPU v5e forward 128 causal": 0.60,
    "TPU v5p forward 128": 0.55,
    "TPU v6e forward 128 causal": 0.22,
    "TPU7x forward 128": 0.22,
    "TPU v6e forward 256": 0.45,
    "TPU7x forward 256": 0.45,
    "TPU v6e backward 128 causal": 0.25,
    "TPU7x backward 128": 0.25,
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


@pytest.mark.parametrize("name", BUDGETS)
def test_cycles(name: str):
    tpu, direction, dim, causal = _named(name)
    options = {"causal": True} if causal else {}
    found = report(tpu, f"{CALLS}:attention", tpu, direction, 0, LENGTH, dim, dim, simulate=True, **options)
    assert not found.error
    assert found.kernel_cycles == pytest.approx(BUDGETS[name], rel=TOLERANCE)


@pytest.mark.parametrize("name", GOALS)
def test_budgets_are_shares_of_the_peak(name: str):
    tpu, direction, dim, causal = _named(name)
    flops = 4 * LENGTH * LENGTH * dim * (2.5 if direction == "backward" else 1) / (2 if causal else 1)
    assert GOALS[name] <= flops / (BUDGETS[name] * PEAK[tpu]) <= 1


@pytest.mark.parametrize("tpu", TPUS)
def test_no_slower_than_that_of_jax(tpu: str):
    """Ours at 4096 queries and keys, in a quarter of the time; theirs at 2048, in blocks of 512."""
    theirs = report(tpu, f"{CALLS}:jax_attention", 2048, 128, 512, simulate=True)
    assert sum(theirs.cycles.values()) > 0
    ours = BUDGETS[f"{tpu} forward 128"] / 4
    assert ours <= max(theirs.cycles.values())


def _named(name: str) -> tuple[str, str, int, bool]:
    tpu, _, rest = name.partition("ward ")
    *words, direction = tpu.split()
    dim, *causal = rest.split()
    return " ".join(words), f"{direction}ward", int(dim), bool(causal)
