"""The engine's benchmark runs, and counts what it serves."""

import sys
from typing import Any

import jax
import pytest

from benchmarks import engine as benchmark


def test_a_small_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["engine", "--tiny"])
    benchmark.main()
    said = capsys.readouterr().out
    assert all(word in said for word in ("tiny: first steps", "one by one: ", "at once: ", "tokens/s written"))


def test_all_recorded_requests_are_served():
    arrivals = benchmark.trace(2.0)
    assert len(arrivals) == 128
    assert arrivals[0] == benchmark.Arrival(0.0, 374, 44)
    assert arrivals[1].seconds == pytest.approx(4.31 / 2)
    few = [benchmark.Arrival(0.0, each.prompt // 64 + 1, each.answer // 64 + 1) for each in arrivals[:9]]
    config = benchmark.EngineConfig(4, 16, 64, 256, 32)
    engine = benchmark.Engine(benchmark.TINY, benchmark.TINY.parameters(jax.random.key(0)), config)
    found: dict[str, Any] = benchmark.replay(engine, few, at_once=True)
    assert found["answer_tokens"] == sum(each.answer for each in few)
    assert found["pages_used_at_the_end"] == 0
    assert 0 < found["first_token_s"][0] <= found["first_token_s"][2] <= found["seconds"]
