"""What a killed tuning leaves behind, and what failed once."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from tests.support.hostile import Hostile, Way
from tilewright.ops import Autotuner, ConfigSelectorChain, Invocation, PersistentCache, Tuner
from tilewright.ops.tuning.events import CandidateDone, CandidateStarted
from tilewright.ops.tuning.journal import unfinished

X = jnp.ones((64, 64))
QUICK = Tuner(0, 1)

# A tuning that is killed from outside while its last candidate sleeps.
KILLED = """
import sys
from pathlib import Path
import jax.numpy as jnp
from tests.support.hostile import Hostile
from tilewright.ops import Autotuner, ConfigSelectorChain, Invocation, PersistentCache, Tuner

chain = ConfigSelectorChain(persistent=PersistentCache(sys.argv[1]))
inv = Invocation(Hostile("right", "also right", "nan", "sleep"), (jnp.ones((64, 64)),))
Autotuner(Tuner(0, 1), chooser=chain, on_event=lambda e: print(type(e).__name__, flush=True)).tune(inv)
"""


def tune(folder: Path, *ways: str, events: list[Any] | None = None) -> Any:
    chain = ConfigSelectorChain(persistent=PersistentCache(folder))
    note = (lambda _: None) if events is None else events.append
    (call,) = Autotuner(QUICK, chooser=chain, on_event=note).tune(Invocation(Hostile(*ways), (X,)))
    return call


def started(events: list[Any]) -> list[str]:
    return [event.config.name for event in events if isinstance(event, CandidateStarted)]


def test_a_killed_tuning_goes_on_where_it_was(tmp_path: Path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        assert process.stdout is not None
        begun = 0
        for line in process.stdout:
            begun += line.startswith("CandidateStarted")
            if begun == 4:
                break
        time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
    assert unfinished(PersistentCache(tmp_path)).entries()
    events: list[Any] = []
    call = tune(tmp_path, "right", "also right", "nan", "new", events=events)
    assert "nan" not in started(events)
    assert next(c for c in call.candidates if c.config == Way("nan")).check == "failed"
    assert call.complete
    assert not unfinished(PersistentCache(tmp_path)).entries()


def test_what_failed_once_is_not_tried_again(tmp_path: Path):
    tune(tmp_path, "right", "nan", "raise")
    events: list[Any] = []
    call = tune(tmp_path, "right", "nan", "raise", "also right", events=events)
    assert started(events) == ["right", "also right"]
    assert [c.check for c in call.candidates] == ["passed", "failed", "unchecked", "passed"]
    assert "ValueError" in call.candidates[2].error


def test_what_was_dropped_is_not_taken_for_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another time there may be nothing faster."""
    bound = lambda self, inv, config: 1e6 if config.name == "also right" else 0.0
    monkeypatch.setattr(Hostile, "config_bound_ms", bound, raising=False)
    events: list[Any] = []
    call = tune(tmp_path, "right", "also right", events=events)
    assert started(events) == ["right"]
    assert call.candidates[1].dropped
    assert "1e+06 ms at the least" in call.candidates[1].error
    assert call.complete
    assert [e.index for e in events if isinstance(e, CandidateDone) and e.candidate.dropped] == [1]
    monkeypatch.delattr(Hostile, "config_bound_ms")
    events.clear()
    assert tune(tmp_path, "right", "also right", events=events).candidates[1].eligible
    assert "also right" in started(events)


def test_another_toolchain_tries_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tune(tmp_path, "right", "nan")
    for path in tmp_path.glob("*.json"):
        document = json.loads(path.read_text())
        assert document["toolchain"]
    monkeypatch.setattr("tilewright.ops.config.persistent.toolchain_fingerprint", lambda: {"jax": "another"})
    events: list[Any] = []
    tune(tmp_path, "right", "nan", events=events)
    assert started(events) == ["right", "nan"]


def test_a_damaged_journal_is_none(tmp_path: Path):
    journal = unfinished(PersistentCache(tmp_path))
    inv = Invocation(Hostile("right", "also right"), (X,))
    journal.put(inv.key, Way("right"), measurements=[{"config": 3}], metadata={}, source="")
    for path in journal.path.iterdir():
        path.write_bytes(path.read_bytes()[:-40])
    assert tune(tmp_path, "right", "also right").complete


def test_configs_without_json_are_tuned_all_the_same(tmp_path: Path):
    class Odd(Hostile):
        def heuristic_cfg(self, inv: Any) -> Any:
            return lambda: "right"

        def config_space(self, inv: Any) -> list[Any]:
            return []

        def run(self, x: Any, *, cfg: Any) -> Any:
            return 2 * x

    chain = ConfigSelectorChain(persistent=PersistentCache(tmp_path))
    (call,) = Autotuner(QUICK, chooser=chain).tune(Invocation(Odd(), (X,)))
    assert call.complete
