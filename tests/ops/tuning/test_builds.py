"""Builds beside a tuning, by a compiler that takes its time, fails, dies or hangs; and selection without tuning."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.support.clock import Clock
from tests.support.fake_nvcc import FakeNvcc, sample_table
from tilewright.kernels.cuda import Group, find
from tilewright.ops import (
    AutotunePolicy,
    Autotuner,
    ConfigSelectorChain,
    Executor,
    Invocation,
    Kernel,
    PersistentCache,
    Tuner,
)
from tilewright.ops.config import unbuilt
from tilewright.ops.tuning.builds import background
from tilewright.ops.tuning.builds.background import BackgroundBuilds
from tilewright.ops.tuning.events import BuildEnded, BuildsLeft, BuildStarted, CandidateDone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

QUICK = Tuner(warmup=0, iters=2)
X = jnp.ones(8)


class Compiled(Kernel[str, jax.Array]):
    """Adds one, by a config that needs no compiler or by one of the groups of `sample_table`."""

    def __init__(self, folder: Path, *configs: str, ready: str = "plain"):
        super().__init__(f"tests.builds.{folder.name}")
        self.table, self.configs, self.ready = sample_table(folder), configs, ready

    def run(self, x: jax.Array, *, cfg: str) -> jax.Array:
        return x + 1

    def heuristic_cfg(self, inv: Any) -> str:
        return next((c for c in (*self.configs, self.ready) if not unbuilt.missing(inv, c)), self.ready)

    def preferred_cfg(self, inv: Any) -> str:
        return self.configs[0]

    def config_space(self, inv: Any) -> list[str]:
        return [self.ready, *self.configs]

    def config_builds(self, inv: Any, cfg: str) -> list[Group]:
        return [Group(self.table, cfg, 90)] if cfg in self.table.groups else []


@pytest.fixture
def clock(clock: Clock) -> Clock:
    clock.update(plain=3.0, fast=1.0, slow=2.0)
    return clock


def tuned(kernel: Kernel[Any, Any], *shapes: Any, chain: Any = None, **options: Any) -> tuple[Any, list[Any]]:
    events: list[Any] = []
    tuner = Autotuner(QUICK, chooser=chain or ConfigSelectorChain(), on_event=events.append, **options)
    return tuner.tune(*(Invocation(kernel, (x,)) for x in shapes or (X,))), events


def of(kind: type, events: list[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def until(condition: Any) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)


class TestTuning:
    def test_what_is_built_in_time_is_measured(self, nvcc: FakeNvcc, clock: Any, tmp_path: Path) -> None:
        nvcc.behave("fast", "done", 0.5)
        result, events = tuned(Compiled(tmp_path, "fast", "slow"), budget_s=120.0)
        (call,) = result
        assert call.winner.config == "fast"
        assert call.complete
        assert {c.config for c in call.candidates if c.eligible} == {"plain", "fast", "slow"}
        # What needs no compiler was measured before the first build was there.
        first = next(i for i, e in enumerate(events) if isinstance(e, CandidateDone))
        assert events[first].candidate.config == "plain"
        assert first < next(i for i, e in enumerate(events) if isinstance(e, BuildEnded))
        assert len(of(BuildStarted, events)) == len(of(BuildEnded, events)) == len(nvcc.compilations()) == 2
        assert not any(e.error for e in of(BuildEnded, events))

    def test_what_is_late_is_left_out_by_name_and_is_there_the_next_time(
        self, nvcc: FakeNvcc, clock: Any, tmp_path: Path
    ) -> None:
        nvcc.behave("fast", "done", 5.0)
        chain = ConfigSelectorChain(persistent=PersistentCache(tmp_path / "configs"))
        kernel = Compiled(tmp_path, "fast")
        result, events = tuned(kernel, chain=chain, budget_s=2.0)
        (call,) = result
        assert find(Group(kernel.table, "fast", 90)) is None, "the tuning waited for the build"
        assert call.winner.config == "plain"
        assert not call.complete
        assert call.left_out == {"fast": "there was no time left to build it"}
        assert [e.candidate.config for e in of(CandidateDone, events) if e.candidate.left_out] == ["fast"]
        assert of(BuildsLeft, events) == [BuildsLeft(("sample fast sm_90a",))]
        until(lambda: find(Group(kernel.table, "fast", 90)) is not None)
        result, events = tuned(kernel, chain=chain)
        assert result.entries[0].winner.config == "fast"
        assert len(nvcc.compilations()) == 1

    @pytest.mark.parametrize("ending", ["fail", "die"])
    def test_a_build_that_ends_badly_is_said_and_the_others_go_on(
        self, nvcc: FakeNvcc, clock: Any, tmp_path: Path, ending: Any
    ) -> None:
        nvcc.behave("fast", ending)
        (call,), events = tuned(Compiled(tmp_path, "fast", "slow"), budget_s=120.0)
        assert call.winner.config == "slow"
        assert call.left_out["fast"].startswith("its build failed: ")
        assert [e.build for e in of(BuildEnded, events) if e.error] == ["sample fast sm_90a"]
        # It may be mended: the next tuning tries it again.
        assert not any(c.failed for c in call.candidates)

    def test_a_build_that_hangs_keeps_nobody_beyond_the_budget(
        self, nvcc: FakeNvcc, clock: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(background, "TIMEOUT_S", 6.0)
        nvcc.behave("fast", "hang")
        earlier = list(background._detached)  # those of other tests may take a while to end
        (call,), events = tuned(Compiled(tmp_path, "fast"), budget_s=2.0)
        assert (call.winner.config, set(call.left_out)) == ("plain", {"fast"})
        (process,) = [p for p in background._detached if p not in earlier and p.poll() is None]
        assert process.wait(60) == 0  # it ends the compiler by itself
        assert not [e for e in of(BuildEnded, events) if not e.error]

    def test_without_a_budget_a_build_that_hangs_is_given_up(
        self, nvcc: FakeNvcc, clock: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(background, "TIMEOUT_S", 2.0)
        nvcc.behave("fast", "hang")
        (call,), _ = tuned(Compiled(tmp_path, "fast"))
        assert call.left_out == {"fast": "its build failed: it did not end within 2 s"}

    def test_an_interrupt_ends_the_builds(self, nvcc: FakeNvcc, clock: Any, tmp_path: Path) -> None:
        nvcc.behave("fast", "done", 600.0)
        measured = threading.Event()

        def interrupt() -> None:
            if measured.wait(60):
                until(nvcc.compilations)
                os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        seen = lambda event: measured.set() if isinstance(event, CandidateDone) else None
        tuner = Autotuner(QUICK, chooser=ConfigSelectorChain(), on_event=seen)
        # A shell without job control has what runs in its background ignore the signal.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            result = tuner.tune(Invocation(Compiled(tmp_path, "fast"), (X,)))
        finally:
            signal.signal(signal.SIGINT, before)
        assert result.interrupted
        assert result.entries[0].winner.config == "plain"
        pids = [int(line.split()[0]) for line in nvcc.compilations()]
        assert pids
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))

    def test_calls_that_want_the_same_build_share_it(self, nvcc: FakeNvcc, clock: Any, tmp_path: Path) -> None:
        nvcc.behave("fast", "done", 1.0)
        result, _ = tuned(Compiled(tmp_path, "fast"), X, jnp.ones((2, 8)), budget_s=120.0)
        assert [call.winner.config for call in result] == ["fast", "fast"]
        assert len(nvcc.compilations()) == 1

    def test_where_everything_must_be_built_it_is_waited_for(self, nvcc: FakeNvcc, clock: Any, tmp_path: Path) -> None:
        (call,), _ = tuned(Compiled(tmp_path, "fast", ready="slow"), budget_s=120.0)
        assert call.winner.config == "fast"

    def test_where_nothing_is_built_in_time_the_call_is_left_out(
        self, nvcc: FakeNvcc, clock: Any, tmp_path: Path
    ) -> None:
        nvcc.behave("*", "hang")
        result, events = tuned(Compiled(tmp_path, "fast", ready="slow"), budget_s=2.0)
        assert not result.entries
        assert len(result.left_out) == 1
        assert type(events[-1]) is BuildsLeft
        for process in background._detached:
            process.terminate()


_TUNE_IT = """
import sys
from pathlib import Path
from tests.ops.tuning.test_builds import QUICK, X, Compiled
from tilewright.ops import Autotuner, ConfigSelectorChain, Invocation
kernel = Compiled(Path(sys.argv[1]), "fast", "slow")
(call,) = Autotuner(QUICK, chooser=ConfigSelectorChain()).tune(Invocation(kernel, (X,)))
assert {c.config for c in call.candidates if c.eligible} == {"plain", "fast", "slow"}, call
"""


def test_two_processes_build_nothing_twice(nvcc: FakeNvcc, tmp_path: Path) -> None:
    nvcc.behave("*", "done", 2.0)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    command = [sys.executable, "-c", _TUNE_IT, str(tmp_path)]
    processes = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [process.wait(120) for process in processes] == [0, 0]
    assert len(nvcc.compilations()) == 2


def test_a_build_that_cannot_be_sent_fails_alone(nvcc: FakeNvcc, tmp_path: Path) -> None:
    class Local(Group):
        pass

    table = sample_table(tmp_path)
    builds = BackgroundBuilds()
    builds.add([Local(table, "fast", 90)])
    builds.add([Group(table, "slow", 90)])
    until(lambda: not builds.unfinished)
    assert "cannot be sent" in builds.failure(Local(table, "fast", 90))
    assert builds.is_made(Group(table, "slow", 90))


class TestWithoutTuning:
    """The first choice must be built: what need not be runs, and that is said once."""

    def test_what_need_not_be_built_runs_and_it_says_so_once(
        self, nvcc: FakeNvcc, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        kernel, chain = Compiled(tmp_path, "fast"), ConfigSelectorChain()
        for shape in (8, 16):
            Executor(chain)(kernel, jnp.ones(shape))
        assert chain.choose(Invocation(kernel, (X,))).config == "plain"
        (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
        assert "would run by fast, but nvcc must compile that first" in record.getMessage()
        assert "tilewright build" in record.getMessage()
        assert not nvcc.compilations()
        explained = Executor(chain).explain(kernel, X, quiet=True)
        assert explained.step == "heuristic, until nvcc has compiled sample fast sm_90a for fast"
        Group(kernel.table, "fast", 90).make(threading.Event())
        assert chain.choose(Invocation(kernel, (X,))).config == "fast"

    def test_in_a_program_of_several_processes_what_one_has_built_counts_for_nothing(
        self, nvcc: FakeNvcc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kernel, chain = Compiled(tmp_path, "fast"), ConfigSelectorChain()
        inv = Invocation(kernel, (X,))
        Group(kernel.table, "fast", 90).make(threading.Event())
        assert chain.lookup(inv).config == "fast"
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        assert chain.lookup(inv).config == "plain"
        monkeypatch.setattr(Group, "is_installed", lambda self: True)
        assert chain.lookup(inv).config == "fast"

    @pytest.mark.parametrize("how", ["policy", "environment"])
    def test_it_is_built_in_the_background_where_that_is_asked_for(
        self, nvcc: FakeNvcc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
    ) -> None:
        kernel = Compiled(tmp_path, "slow")
        policy = AutotunePolicy(allow_autotune=False, build_in_background=how == "policy")
        if how == "environment":
            monkeypatch.setenv("TILEWRIGHT_BACKGROUND_BUILDS", "1")
        chain = ConfigSelectorChain(policy=policy)
        assert chain.choose(Invocation(kernel, (X,))).config == "plain"
        until(lambda: find(Group(kernel.table, "slow", 90)) is not None)
        assert chain.choose(Invocation(kernel, (X,))).config == "slow"
        assert len(nvcc.compilations()) == 1
