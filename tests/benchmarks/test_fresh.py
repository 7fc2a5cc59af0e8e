"""The benchmark of a fresh machine, with a model that a CPU runs in seconds."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import fresh


def test_the_model_learns_and_attention_of_both_is_the_same():
    state, tokens = fresh.step_operands(fresh.SMALL)
    losses = {}
    for name in fresh.ATTENTIONS:
        step = jax.jit(functools.partial(fresh.train_step, fresh.attention_of(name), fresh.SMALL))
        now, values = state, []
        for _ in range(5):
            now, loss = step(now, tokens)
            values.append(float(loss))
        losses[name] = values
    assert losses["tilewright"][-1] < losses["tilewright"][0]
    np.testing.assert_allclose(losses["tilewright"], losses["peer"], rtol=1e-2)
    assert sum(x.size for x in jax.tree.leaves(state["parameters"])) == fresh.SMALL.parameters
    assert 1.0e9 < fresh.Sizes().parameters < 1.3e9


def test_stages_run_in_processes_of_their_own_and_leave_a_record(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    out = tmp_path / "fresh.json"
    arguments = ["--small", "--stages", "forward,tune", "--budget", "60", "--rounds", "1", "--out", str(out)]
    assert fresh.main(arguments) == 0
    cells = json.loads(out.read_text())["cells"]
    assert [(c["stage"], c["attention"], c["when"]) for c in cells] == [
        ("forward", "tilewright", "fresh"), ("forward", "tilewright", "again"), ("forward", "peer", "fresh"),
        ("tune", "tilewright", "fresh"),
    ]  # fmt: skip
    for cell in cells[:3]:
        parts = cell["first"]
        assert parts["total"] >= sum(parts[name] for name in ("trace", "lower", "compile", "run")) * 0.99
    tuned = cells[3]
    assert [call["direction"] for call in tuned["calls"]] == ["forward", "backward"]
    assert all(0 <= each["of_measured"] <= each["of_all"] for each in tuned["regret"])
    assert "steps: untuned" in capfd.readouterr().out


def test_regret_is_counted_in_the_times_of_the_exhaustive_search():
    def call(winner: str, **times: float) -> dict:
        candidates = {name: {"ms": ms, "check": "passed", "error": ""} for name, ms in times.items()}
        return {"winner": winner, "candidates": candidates}

    found = fresh.regret(call("a", a=1.0, b=1.1), call("b", a=1.2, b=1.0, c=0.8))
    assert found == {"of_all": pytest.approx(0.5), "of_measured": pytest.approx(0.2)}


def test_both_attentions_take_the_operands_of_the_call():
    operands = fresh.call_operands(fresh.SMALL, jnp.float32)
    ours, theirs = (fresh.attention_of(name)(*operands) for name in fresh.ATTENTIONS)
    np.testing.assert_allclose(ours, theirs, atol=2e-5)
