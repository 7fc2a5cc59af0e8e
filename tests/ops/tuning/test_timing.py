"""The timer, by its arithmetic."""

import functools
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tilewright.ops import Device, benchmark
from tilewright.ops.kernel.candidates import Timing
from tilewright.ops.tuning import profilers, timing
from tilewright.ops.tuning.timing import calls_per_sample, time_interleaved


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


def test_short_functions_are_run_several_times_per_sample(clock):
    assert calls_per_sample(clock(1.0), ()) == 1
    assert calls_per_sample(clock(1e-4), ()) == 10
    assert calls_per_sample(clock(0.0), ()) == timing.MAX_CALLS_PER_SAMPLE


def test_functions_take_turns(clock):
    log = []
    one, two = clock(1.0, log), clock(2.0, log)
    found = time_interleaved([one, two], (), warmup=1, iters=3)
    assert log == [1.0, 1.0, 2.0, 2.0] + 3 * [1.0, 2.0]
    assert [t.samples_ms for t in found] == [(1000.0,) * 3, (2000.0,) * 3]


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


def launching(launched: list[Any], *times: float) -> Any:
    """A function that launches a kernel for each time; one of 5 ms has the flush's name."""

    class Launching:
        def __call__(self, *args: Any) -> None:
            launched.extend(("fill" if t == 5.0 else f"kernel{t}", t) for t in times)

        def trace(self) -> None: ...

        def lower(self) -> None: ...

    return Launching()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The kernels that were launched; overwriting the cache is one of 5 ms."""
    found: list[Any] = []
    watched = threading.Event()
    watched.set()
    monkeypatch.setattr(profilers, "_watched", watched)
    monkeypatch.setattr(profilers, "_traced", threading.Event())  # other tests trace, too
    write = timing._write
    monkeypatch.setattr(timing, "_write", lambda size: found.append(("fill", 5.0)) or write(8))
    timing._flushing_kernels.cache_clear()
    yield found
    timing._flushing_kernels.cache_clear()


def cupti(monkeypatch: pytest.MonkeyPatch, launched: list[Any]) -> None:
    """A fake that, as the real one, calls once in advance and reports kernels by name."""

    def measure(function: Any, *, aggregate: bool, iterations: int) -> Any:
        assert not aggregate
        # What the profiler would compile could not be called with only arrays.
        assert isinstance(function, jax.stages.Wrapped | jax.stages.Compiled | functools.partial)

        def measured(*args: Any) -> Any:
            function(*args)
            each = []
            for _ in range(iterations):
                launched.clear()
                results = function(*args)
                each.append(list(launched))
            return results, each[0] if iterations == 1 else each

        return measured

    monkeypatch.setattr("jax.experimental.mosaic.gpu.profiler.measure", measure)


def recording(*planes: tuple[str, list[tuple[str, list[tuple[str, float, float, str]]]]]) -> jax.profiler.ProfileData:
    """A recording of planes of lines of events: name, start and duration in ms, and the name of a statistic."""
    said = []
    for plane, lines in planes:
        events = [event for _, found in lines for event in found]
        names = list(dict.fromkeys(event[0] for event in events))
        statistics = list(dict.fromkeys(event[3] for event in events))
        said.append(f'planes {{ name: "{plane}"')
        for kind, known in (("event", names), ("stat", statistics)):
            said += [f'{kind}_metadata {{ key: {i} value {{ id: {i} name: "{n}" }} }}' for i, n in enumerate(known, 1)]
        for line, found in lines:
            said.append(f'lines {{ name: "{line}"')
            for name, start, duration, statistic in found:
                said.append(
                    f"events {{ metadata_id: {names.index(name) + 1} offset_ps: {round(start * 1e9)} "
                    f"duration_ps: {round(duration * 1e9)} "
                    f'stats {{ metadata_id: {statistics.index(statistic) + 1} str_value: "" }} }}'
                )
            said.append("}")
        said.append("}")
    return jax.profiler.ProfileData.from_text_proto("\n".join(said))


def xla(monkeypatch: pytest.MonkeyPatch, launched: list[Any]) -> None:
    """A trace that records what was launched, one kernel after the other."""

    def traced(run: Any) -> jax.profiler.ProfileData:
        launched.clear()
        run()
        events = [(name, 10.0 * i, time_ms, "kernel_details") for i, (name, time_ms) in enumerate(launched)]
        return recording(("/device:GPU:0", [("Stream #13(Compute)", events)]))

    monkeypatch.setattr(timing, "traced", traced)


@pytest.mark.parametrize(("fake", "timer"), [(cupti, timing.CuptiTimer), (xla, timing.XlaTimer)])
class TestKernelTimers:
    @pytest.fixture(autouse=True)
    def profiler(self, fake: Any, monkeypatch: pytest.MonkeyPatch, launched: list[Any]) -> None:
        fake(monkeypatch, launched)

    def test_sums_a_calls_kernels_and_leaves_out_the_flush(self, timer: Any, launched: list[Any]):
        function = launching(launched, 0.25, 0.5)
        assert timer().sample_ms(function, (), 2) == 0.75
        assert timer(flushed_bytes=0).sample_ms(function, (), 3) == 0.75

    def test_a_kernel_of_the_same_name_is_the_calls_own(self, timer: Any, launched: list[Any]):
        assert timer().sample_ms(launching(launched, 0.5, 5.0), (), 2) == 5.5

    def test_no_kernel_is_an_error(self, timer: Any, launched: list[Any]):
        with pytest.raises(RuntimeError, match="started no kernel"):
            timer(flushed_bytes=0).sample_ms(launching(launched), (), 1)

    def test_a_flush_that_is_not_seen_is_an_error(self, timer: Any, launched: list[Any], monkeypatch: Any):
        timing._flushing_kernels(timer())
        monkeypatch.setattr(timing, "_write", lambda size: launched.append(("another", 5.0)))
        with pytest.raises(RuntimeError, match="'fill' that overwrites the cache is not among"):
            timer().sample_ms(launching(launched, 0.5), (), 1)


class TestXlasProfiler:
    def test_reads_kernels_of_streams_in_the_order_of_their_starts(self):
        kernel = "kernel_details"
        compute = [("late", 3.0, 0.5, kernel), ("MemcpyD2D", 2.0, 9.0, "memcpy_details"), ("early", 0.0, 2.0, kernel)]
        profile = recording(
            ("/host:CPU", [("Stream #1", [("host", 0.0, 9.0, kernel)])]),
            (
                "/device:GPU:0",
                [
                    ("Stream #13(Compute,MemcpyD2D)", compute),
                    ("XLA Ops", [("derived", 0.0, 9.0, kernel)]),
                    ("Stream #14(Compute)", [("beside", 1.0, 0.25, kernel)]),
                ],
            ),
        )
        assert timing.gpu_kernels(profile) == [("early", 2.0), ("beside", 0.25), ("late", 0.5)]

    def test_a_sample_of_a_short_call_is_of_several(self, clock: Any):
        timer = timing.XlaTimer()
        assert timer.calls(clock(1e-4), ()) == timing.MAX_CALLS_PER_TRACE
        assert timer.calls(clock(5e-3), ()) == 2
        assert timer.calls(clock(1.0), ()) == 1

    def test_unlike_calls_are_an_error(self, monkeypatch: pytest.MonkeyPatch, launched: list[Any]):
        xla(monkeypatch, launched)
        times = iter([0.25, 0.25, 0.25, 0.25])
        once = lambda: launched.extend(("kernel", t) for t in ([next(times)] if len(launched) < 2 else []))
        with pytest.raises(RuntimeError, match="2 kernels cannot be those of 3 like calls"):
            timing.XlaTimer(flushed_bytes=0).sample_ms(once, (), 3)

    def test_a_real_trace_is_read_and_one_at_a_time(self):
        """On a CPU it has no plane of a GPU."""
        double = jax.jit(lambda x: 2 * x)
        profile = timing.traced(lambda: double(jnp.ones(8)).block_until_ready())
        assert "/host:CPU" in [plane.name for plane in profile.planes]
        assert timing.gpu_kernels(profile) == []
        with pytest.raises(RuntimeError, match="started no kernel"):
            timing.XlaTimer(flushed_bytes=0).sample_ms(double, (jnp.ones(8),), 1)
        with pytest.raises(RuntimeError, match="already been started"):
            timing.traced(lambda: timing.traced(lambda: None))
        with pytest.raises(ZeroDivisionError):
            timing.traced(lambda: 1 / 0)
        timing.traced(lambda: None)  # none of them left a trace running

    def test_statistics_do_not_end_a_process_in_which_warnings_are_errors(self):
        code = (
            "import jax; from tilewright.ops.tuning.timing import gpu_kernels\n"
            'text = \'planes { name: "/device:GPU:0" event_metadata { key: 1 value { id: 1 name: "k" } } '
            'stat_metadata { key: 1 value { id: 1 name: "kernel_details" } } lines { name: "Stream #1" events '
            '{ metadata_id: 1 duration_ps: 1000000000 stats { metadata_id: 1 str_value: "" } } } }\'\n'
            "import warnings; warnings.simplefilter('error')\n"
            "print(gpu_kernels(jax.profiler.ProfileData.from_text_proto(text)))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert (done.stdout.strip(), done.returncode) == ("[('k', 1.0)]", 0), done.stderr


class TestTimerFor:
    GPU = Device("gpu", "NVIDIA Test", (9, 0), 132, fingerprint="gpu:test")

    @pytest.fixture(autouse=True)
    def fresh(self) -> Iterator[None]:
        timing._profiling_timer.cache_clear()
        yield
        timing._profiling_timer.cache_clear()

    @staticmethod
    def refuse(function: Any, *, aggregate: bool, iterations: int) -> Any:
        raise RuntimeError("another subscriber holds CUPTI")

    def test_then_xlas_profiler(self, monkeypatch: pytest.MonkeyPatch, launched: list[Any], caplog: Any):
        launch = launching(launched, 0.5)
        xla(monkeypatch, launched)
        monkeypatch.setattr("jax.experimental.mosaic.gpu.profiler.measure", self.refuse)
        monkeypatch.setattr(timing.jax, "jit", lambda function: launch)
        assert timing.timer_for(self.GPU) == timing.XlaTimer()
        (record,) = caplog.records
        assert "CUPTI, for it cannot be used: another subscriber" in record.getMessage()

    def test_then_the_hosts_clock(self, monkeypatch: pytest.MonkeyPatch, caplog: Any):
        monkeypatch.setattr("jax.experimental.mosaic.gpu.profiler.measure", self.refuse)
        assert timing.timer_for(self.GPU) == timing.WallTimer()
        said = [record.getMessage() for record in caplog.records]
        assert ["CUPTI" in said[0], "XLA's profiler" in said[1], "host's clock" in said[2]] == [True] * 3

    def test_nothing_is_tried_without_an_nvidia_gpu(self, caplog: Any):
        assert timing.timer_for(Device("cpu", "cpu")) == timing.WallTimer()
        assert not caplog.records
