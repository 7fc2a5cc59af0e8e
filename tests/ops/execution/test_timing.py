"""The timer, by its arithmetic."""

import jax.numpy as jnp
import pytest

from tilewright.ops import benchmark
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
