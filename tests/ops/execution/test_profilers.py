"""CUPTI beside the profiles of others: sessions of XLA's profiler are real ones on the CPU, CUPTI is a fake.

By JAX 0.11's profiler of kernels the process would end; the fake ends the test.
"""

import pathlib
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.lib import _profiler

from tests.ops.core.samples import Product, operands
from tilewright.ops import Autotuner, ConfigSelectorChain, CuptiTimer, Device, Invocation, Tuner, WallTimer, XlaTimer
from tilewright.ops.execution import profilers, timing

GPU = Device("gpu", "NVIDIA Test", (9, 0), 132, fingerprint="gpu:test")


class Process:
    """A process as JAX 0.11 or 0.12 has it: whether it is ours, and what CUPTI was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        self.lethal = False
        self._patch = monkeypatch
        monkeypatch.setattr(profilers, "_alone", threading.Event())
        monkeypatch.setattr(profilers, "_traced", threading.Event())
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
    """A session as libraries and TensorBoard's server start it, of which `jax.profiler` does not know."""
    return _profiler.ProfilerSession(jax.profiler.ProfileOptions())


def measured_ms() -> float:
    return timing.timer_for(GPU).sample_ms(jax.jit(lambda x: x + 1), (jnp.zeros(8),), 1)


def recorded(folder: pathlib.Path) -> list[str]:
    return [file.name for file in folder.rglob("*.xplane.pb")]


@pytest.mark.parametrize("traces_before", [False, True])
def test_a_users_process_is_left_alone(process: Process, traces_before: bool, tmp_path: pathlib.Path):
    process.lethal = True
    if traces_before:
        with jax.profiler.trace(tmp_path):
            jnp.ones(3)
    assert timing.timer_for(GPU) == XlaTimer()
    assert measured_ms() == 0.5
    with pytest.raises(RuntimeError, match=r"ends a process in which XLA's was ever used.*isolation='process'"):
        CuptiTimer().sample_ms(jax.jit(lambda x: x + 1), (jnp.zeros(8),), 1)


def test_tuning_inside_of_a_trace_is_by_the_hosts_clock(process: Process, tmp_path: pathlib.Path, caplog: Any):
    process.lethal = True
    with jax.profiler.trace(tmp_path):
        assert timing.timer_for(GPU) == WallTimer()
        assert measured_ms() > 0
    said = {record.getMessage() for record in caplog.records}
    assert said == {"kernels are timed by the host's clock: a trace is being taken in this process (jax.profiler)"}
    assert recorded(tmp_path)
    assert timing.timer_for(GPU) == XlaTimer()  # nothing of it is remembered


def test_tuning_while_a_server_or_a_library_profiles(process: Process, caplog: Any):
    process.lethal = True
    running = session()
    assert timing.timer_for(GPU) == WallTimer()
    assert "jax.profiler.start_server" in caplog.records[0].getMessage()
    running.stop()
    assert profilers.running_session() == ""
    assert timing.timer_for(GPU) == XlaTimer()


@pytest.mark.slow
def test_a_server_that_nobody_asks_changes_nothing(process: Process):
    process.lethal = True
    jax.profiler.start_server(0)
    try:
        assert profilers.running_session() == ""
        assert measured_ms() == 0.5
    finally:
        jax.profiler.stop_server()


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


def test_a_process_of_ours_has_cupti_until_we_trace(process: Process):
    profilers.nobody_else_profiles()
    assert timing.timer_for(GPU) == CuptiTimer()
    assert measured_ms() == 0.5
    asked = process.asked
    timing.traced(lambda: None)
    process.lethal = True
    with pytest.raises(RuntimeError, match="XLA's profiler was used in this process"):
        timing.kernels(jax.jit(lambda x: x + 1), (jnp.zeros(8),))
    assert process.asked == asked


class Claims(WallTimer):
    """Measures whose the process is."""

    def sample_ms(self, function: Callable[..., Any], args: Any, calls: int) -> float:
        return 2.0 if profilers._alone.is_set() else 1.0


@pytest.mark.slow
def test_the_process_of_the_candidates_is_ours():
    inv = Invocation(Product("tests.profilers"), operands((8, 5), (5, 4)))
    times = {}
    for isolation in ("process", "none"):
        tuner = Tuner(0, 1, isolation=isolation, timer=Claims())  # type: ignore[arg-type]
        (call,) = Autotuner(tuner, chooser=ConfigSelectorChain()).tune(inv)
        times[isolation] = call.winner.time_ms
    assert times == {"process": 2.0, "none": 1.0}
