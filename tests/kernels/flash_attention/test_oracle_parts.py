"""The oracle of a part of a call: what the whole one says of it, and what a tuning finds with it."""

from typing import Any

import jax.numpy as jnp
import pytest

from tilewright.kernels.flash_attention import op
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.kernels.flash_attention.op import FlashAttention
from tilewright.ops import Autotuner, ConfigSelectorChain, Invocation, Tuner
from tilewright.ops.execution.workload import Workload

SIZES: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16}
CASES = {
    "plain": AttentionCase("", 2, 40, 56, **SIZES),
    "causal, lse is not wanted": AttentionCase("", 3, 48, causal=True, sliding_window=9, **SIZES),
    "bias of every head": AttentionCase("", 2, 40, bias="bhqk", logits_soft_cap=5.0, **SIZES),
    "bias shared by the batch": AttentionCase("", 2, 40, bias="hqk", sinks=2, **SIZES),
    "one element": AttentionCase("", 1, 40, bias="qk", sinks=1, **SIZES),
    "dropout": AttentionCase("", 2, 40, dropout_prob=0.3, **SIZES),
    "values of their own size": AttentionCase("", 2, 40, value_dim=24, dtype="bfloat16", **SIZES),
}


def invocation(case: AttentionCase, direction: Any) -> Invocation[Any, Any]:
    arrays, kwargs = case.arguments()
    args, kwargs = FlashAttention().prepare(*arrays, **kwargs)
    return Invocation(FlashAttention(), tuple(args), dict(kwargs), direction=direction).abstract()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "MOST_LOGIT_BYTES", 0)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", CASES)
def test_what_is_right_is_and_an_error_in_a_part_is_found(name: str, direction: Any, small: None):
    inv = invocation(CASES[name], direction)
    assert len(inv.kernel.oracle_parts(inv)) == (1 if "dropout" in name else 2)
    work = Workload(inv, ConfigSelectorChain())
    results = work.compile(inv.kernel.heuristic_cfg(inv))(*work.operands)
    assert work.check(results) == []
    for i in range(1 if direction == "forward" else 3):  # out, or the gradients of query, key and value
        wrong = list(results)
        wrong[i] = wrong[i].at[0, 3, 0].add(0.5)
        assert work.check(wrong)
    assert any("not numbers" in said for said in work.check([results[0].at[..., 1, 0].set(jnp.nan), *results[1:]]))


def test_the_whole_is_checked_where_it_fits_or_cannot_be_cut(monkeypatch: pytest.MonkeyPatch):
    inv = invocation(CASES["plain"], "forward")
    assert inv.kernel.oracle_parts(inv) == []
    monkeypatch.setattr(op, "MOST_LOGIT_BYTES", 0)
    packed = invocation(AttentionCase("", 1, 40, packed=True, **SIZES), "forward")
    assert packed.kernel.oracle_parts(packed) == []


def test_a_tuning_by_parts(small: None):
    inv = invocation(CASES["bias shared by the batch"], "backward")
    (call,) = Autotuner(Tuner(0, 1), chooser=ConfigSelectorChain()).tune(inv)
    assert {candidate.check for candidate in call.candidates} == {"passed"}
