"""CUPTI beside the profiles of others: sessions of XLA's profiler are real ones on the CPU, CUPTI is a fake.

By JAX 0.11's profiler of kernels the process would end; the fake ends the test.
"""

import pathlib
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.lib import _profiler

from tilewright.ops import CuptiTimer, Device, WallTimer, XlaTimer
from tilewright.ops.tuning import profilers, timing

watched = pytest.mark.skipif(not profilers._watched.is_set(), reason="JAX had devices before the package was imported")
GPU = Device("gpu", "NVIDIA Test", (9, 0), 132, fingerprint="gpu:test")


class Process:
    """A process as JAX 0.11 or 0.12 has it, watched from the start, and how often CUPTI was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        self.lethal = False
        self._patch = monkeypatch
        monkeypatch.setattr(profilers, "_watched", threading.Event())
        monkeypatch.setattr(profilers, "_traced", threading.Event())
        profilers._watched.set()
        monkeypatch.setattr("jax.experimental.mosaic.gpu.profiler.measure", self._measure)
        monkeypatch.setattr(timing, "gpu_kernels", lambda profile: [("kernel", 0.5)])
        monkeypatch.setattr(timing, "_flushing_kernels", lambda timer: ())
        self.shares(False)

    def shares(self, available: bool) -> None:
        extension = (
            types.SimpleNamespace(_cupti_v2_available=lambda: available) if available else types.SimpleNamespace()
        )
        self._patch.setattr("jax._src.lib.mosaic_gpu", types.SimpleNamespace(_mosaic_gpu_ext=extension), raising=False)

    def _measure(self, function: Callable[..., Any], *, aggregate: bool, iterations: int) -> Any:
        assert not self.lethal, "the process would have ended"
        self.asked += 1
        return lambda *args: (jax.block_until_ready(function(*args)), [("kernel", 0.5)])


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    timing._profiling_timer.cache_clear()
    yield Process(monkeypatch)
    timing._profiling_timer.cache_clear()


def session() -> Any:
    """A session as libraries and TensorBoard's server start it, unknown to `jax.profiler`."""
    return _profiler.ProfilerSession(jax.profiler.ProfileOptions())


def measured_ms() -> float:
    return timing.timer_for(GPU).sample_ms(jax.jit(lambda x: x + 1), (jnp.zeros(8),), 1)


def recorded(folder: pathlib.Path) -> list[str]:
    return [file.name for file in folder.rglob("*.xplane.pb")]


def test_cupti_times_where_nobody_traces(process: Process):
    assert timing.timer_for(GPU) == CuptiTimer()
    assert measured_ms() == 0.5
    assert process.asked > 1


def refused() -> str:
    with pytest.raises(RuntimeError) as caught:
        CuptiTimer().sample_ms(jax.jit(lambda x: x + 1), (jnp.zeros(8),), 1)
    return str(caught.value)


def test_not_where_tilewright_was_imported_too_late_to_know(process: Process):
    process.lethal = True
    profilers._watched.clear()
    assert timing.timer_for(GPU) == XlaTimer()
    assert measured_ms() == 0.5
    profilers._traced.clear()
    assert "tilewright was imported too late to know" in refused()


@watched
def test_not_after_a_trace_of_the_user(process: Process, tmp_path: pathlib.Path):
    assert timing.timer_for(GPU) == CuptiTimer()
    with jax.profiler.trace(tmp_path):
        jnp.ones(3)
    process.lethal = True
    assert timing.timer_for(GPU) == XlaTimer()
    assert measured_ms() == 0.5
    assert "XLA's profiler was used in this process" in refused()
    assert "isolation='process'" in refused()


def test_tuning_inside_of_a_trace_is_by_the_hosts_clock(process: Process, tmp_path: pathlib.Path, caplog: Any):
    process.lethal = True
    with jax.profiler.trace(tmp_path):
        assert timing.timer_for(GPU) == WallTimer()
        assert measured_ms() > 0
    said = {record.getMessage() for record in caplog.records}
    assert said == {"kernels are timed by the host's clock: a trace is being taken in this process (jax.profiler)"}
    assert recorded(tmp_path)
    assert timing.timer_for(GPU) == XlaTimer()  # the host's clock is not remembered


def test_tuning_while_a_server_or_a_library_profiles(process: Process, caplog: Any):
    process.lethal = True
    running = session()
    assert timing.timer_for(GPU) == WallTimer()
    assert "jax.profiler.start_server" in caplog.records[0].getMessage()
    running.stop()
    assert profilers.running_session() == ""
    assert timing.timer_for(GPU) == XlaTimer()


@watched
def test_not_where_a_server_was_started_which_may_have_been_asked(process: Process):
    process.lethal = True
    jax.profiler.start_server(0)
    try:
        assert timing.timer_for(GPU) == XlaTimer()
        assert measured_ms() == 0.5
    finally:
        jax.profiler.stop_server()
    assert timing.timer_for(GPU) == XlaTimer()


def test_a_user_traces_after_tuning(process: Process, tmp_path: pathlib.Path):
    assert measured_ms() == 0.5
    with jax.profiler.trace(tmp_path):
        jnp.ones(3)
    assert recorded(tmp_path)


def test_a_session_that_comes_between_breaks_no_later_trace(process: Process, tmp_path: pathlib.Path):
    running = session()
    with pytest.raises(RuntimeError, match=r"(?i)another profiling session"):
        timing.traced(lambda: None)
    running.stop()
    with jax.profiler.trace(tmp_path):
        jnp.ones(3)
    assert recorded(tmp_path)


def test_a_profiler_that_shares_cupti_is_used_beside_everybody(process: Process, tmp_path: pathlib.Path):
    process.shares(True)
    with jax.profiler.trace(tmp_path):
        assert timing.timer_for(GPU) == CuptiTimer()
        assert measured_ms() == 0.5
    assert process.asked > 1


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import tilewright.ops", "True False"),
        ("import tilewright.ops, jax; jax.numpy.ones(3)", "True False"),
        ("import jax; jax.numpy.ones(3); import tilewright.ops", "False False"),
        ("import tilewright.ops, jax; jax.numpy.ones(3); jax.profiler.start_trace('TMP')", "True True"),
        ("import tilewright.ops, jax; jax.profiler.start_server(0)", "True True"),
        ("import tilewright.ops; from jax._src.profiler import PGLEProfiler; PGLEProfiler(1, 0.5)", "True True"),
    ],
    ids=["early", "computes", "late", "traces", "serves", "optimises by profiles"],
)  # fmt: skip
def test_what_a_process_knows(program: str, said: str, tmp_path: pathlib.Path):
    report = "\nfrom tilewright.ops.tuning import profilers as p; print(p._watched.is_set(), p._traced.is_set())"
    command = [sys.executable, "-c", program.replace("TMP", str(tmp_path)) + report]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == said, done.stderr
