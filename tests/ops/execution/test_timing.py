"""The timer, by its arithmetic."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tilewright.ops import Device, benchmark
from tilewright.ops.execution import timing
from tilewright.ops.execution.timing import Timing, calls_per_sample, time_interleaved


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the functions below advance."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def taking(seconds, log=None):
        def function(*args):
            now[0] += seconds
            if log is not None:
                log.append(seconds)
            return jnp.zeros(())

        return function

    return taking


def test_benchmark_is_the_median_in_milliseconds(clock):
    assert benchmark(clock(0.25), num_warmup=0, num_iters=3) == pytest.approx(250.0)
    assert benchmark(clock(1e-6), num_iters=2) == pytest.approx(1e-3)


def test_benchmark_passes_arguments_on():
    assert benchmark(lambda x: x + 1, jnp.ones(3), num_warmup=0, num_iters=1) > 0


def test_short_functions_are_run_several_times_per_sample(clock):
    assert calls_per_sample(clock(1.0), ()) == 1
    assert calls_per_sample(clock(1e-4), ()) == 10
    assert calls_per_sample(clock(0.0), ()) == timing.MOST_CALLS_PER_SAMPLE


def test_functions_take_turns(clock):
    log = []
    one, two = clock(1.0, log), clock(2.0, log)
    found = time_interleaved([one, two], (), warmup=1, iters=3)
    assert log == [1.0, 1.0, 2.0, 2.0] + 3 * [1.0, 2.0]
    assert [t.samples_ms for t in found] == [(1000.0,) * 3, (2000.0,) * 3]


def test_a_measurement_may_end_early(clock):
    answers = iter([True, False])
    found = time_interleaved([clock(1.0)], (), warmup=0, iters=9, may_go_on=lambda: next(answers))
    assert len(found[0].samples_ms) == 2


@pytest.mark.parametrize(
    ("samples", "median", "noise"),
    [((3.0,), 3.0, 0.0), ((1.0, 3.0), 2.0, 2.0), ((1.0, 2.0, 3.0, 4.0, 100.0), 3.0, 1.0)],
)
def test_noise_is_half_the_distance_of_the_quartiles(samples, median, noise):
    assert Timing(samples).median_ms == median
    assert Timing(samples).noise_ms == noise


@pytest.mark.parametrize(
    ("function", "kwargs", "message"),
    [
        (3, {}, "function=3"),
        (len, {"num_iters": 0}, "num_iters=0"),
        (len, {"num_iters": 2.0}, r"num_iters=2\.0"),
        (len, {"num_warmup": -1}, "num_warmup=-1"),
        (len, {"num_warmup": True}, "num_warmup=True"),
    ],
)
def test_wrong_input(function, kwargs, message):
    with pytest.raises((TypeError, ValueError), match=message):
        benchmark(function, **kwargs)


class TestCupti:
    """The profiler is a fake that, as the real one, calls once in advance and reports kernels by name."""

    @pytest.fixture
    def profiler(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
        launched: list[Any] = []
        write = timing._write
        monkeypatch.setattr(timing, "_write", lambda size: launched.append(("fill", 5.0)) or write(8))
        timing._flushing_kernels.cache_clear()

        def measure(function: Any, *, aggregate: bool) -> Any:
            assert not aggregate
            # What the profiler would compile could not be called with arrays alone.
            assert isinstance(function, jax.stages.Wrapped | jax.stages.Compiled | functools.partial)

            def measured(*args: Any) -> Any:
                function(*args)
                launched.clear()
                return function(*args), list(launched)

            return measured

        monkeypatch.setattr("jax.experimental.mosaic.gpu.profiler.measure", measure)
        yield launched
        timing._flushing_kernels.cache_clear()

    @staticmethod
    def launching(launched: list[Any], *times: float) -> Any:
        class Launching:
            def __call__(self, *args: Any) -> None:
                launched.extend(("fill" if t == 5.0 else f"kernel{t}", t) for t in times)

            def trace(self) -> None: ...

            def lower(self) -> None: ...

        return Launching()

    def test_sums_a_calls_kernels_and_leaves_out_the_flush(self, profiler: Any):
        function = self.launching(profiler, 0.25, 0.5)
        assert timing.CuptiTimer().sample_ms(function, (), 2) == 0.75
        assert timing.CuptiTimer(flushed_bytes=0).sample_ms(function, (), 1) == 0.75

    def test_a_kernel_of_the_same_name_is_the_calls_own(self, profiler: Any):
        assert timing.CuptiTimer().sample_ms(self.launching(profiler, 0.5, 5.0), (), 1) == 5.5

    def test_no_kernel_is_an_error(self, profiler: Any):
        with pytest.raises(RuntimeError, match="started no kernel"):
            timing.CuptiTimer(flushed_bytes=0).sample_ms(self.launching(profiler), (), 1)

    def test_without_it_the_hosts_clock_counts(self, monkeypatch: pytest.MonkeyPatch):
        def measure(function: Any, *, aggregate: bool) -> Any:
            raise RuntimeError("another subscriber holds CUPTI")

        monkeypatch.setattr("jax.experimental.mosaic.gpu.profiler.measure", measure)
        gpu = Device("gpu", "NVIDIA Test", (9, 0), 132, fingerprint="gpu:test")
        assert timing.timer_for(gpu) == timing.WallTimer()
        assert timing.timer_for(Device("cpu", "cpu")) == timing.WallTimer()
