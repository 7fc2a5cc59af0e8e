"""The one way to time: how long a function keeps the device busy."""

import abc
import dataclasses
import functools
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.ops.core.types import Device

logger = logging.getLogger(__name__)

# A sample shorter than this is mostly the clock and the dispatch; short functions are run several times per sample.
SHORTEST_SAMPLE_S = 1e-3
MOST_CALLS_PER_SAMPLE = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """Samples of one function in milliseconds per call."""

    samples_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.samples_ms)

    @property
    def noise_ms(self) -> float:
        """Half the distance between the quartiles: what two medians must differ by to mean anything."""
        if len(self.samples_ms) < 3:
            return max(self.samples_ms) - min(self.samples_ms)
        low, _, high = statistics.quantiles(self.samples_ms, n=4, method="inclusive")
        return (high - low) / 2


def sample_ms(function: Callable[..., Any], args: Sequence[Any], calls: int) -> float:
    """Milliseconds per call of ``calls`` calls that are queued together and waited for at the end."""
    start = time.perf_counter()
    results = None
    for _ in range(calls):
        results = function(*args)
    jax.block_until_ready(results)
    return (time.perf_counter() - start) * 1e3 / calls


def calls_per_sample(function: Callable[..., Any], args: Sequence[Any]) -> int:
    """How many calls make a sample long enough to be measured."""
    once = sample_ms(function, args, 1) / 1e3
    return max(1, min(MOST_CALLS_PER_SAMPLE, round(SHORTEST_SAMPLE_S / max(once, 1e-7))))


class Timer(abc.ABC):
    """What takes the samples of a tuning."""

    @abc.abstractmethod
    def calls(self, function: Callable[..., Any], args: Sequence[Any]) -> int:
        """How many calls make a sample that can be trusted."""

    @abc.abstractmethod
    def sample_ms(self, function: Callable[..., Any], args: Sequence[Any], calls: int) -> float:
        """Milliseconds per call."""


@dataclasses.dataclass(frozen=True, slots=True)
class WallTimer(Timer):
    """The host's clock around calls that are queued and waited for together."""

    def calls(self, function: Callable[..., Any], args: Sequence[Any]) -> int:
        return calls_per_sample(function, args)

    def sample_ms(self, function: Callable[..., Any], args: Sequence[Any], calls: int) -> float:
        return sample_ms(function, args, calls)


@dataclasses.dataclass(frozen=True, slots=True)
class CuptiTimer(Timer):
    """The time that a call's kernels run on an NVIDIA GPU, as CUPTI reports it; gaps between them do not count.

    Before each call as much memory is written as the L2 cache cannot hold, for no model finds its operands there.

    Attributes:
      flushed_bytes: how much; 0 for none.
    """

    flushed_bytes: int = 256 << 20

    def calls(self, function: Callable[..., Any], args: Sequence[Any]) -> int:
        return 1  # neither the dispatch nor the clock's resolution is in it

    def sample_ms(self, function: Callable[..., Any], args: Sequence[Any], calls: int) -> float:
        found = []
        for _ in range(calls):
            if self.flushed_bytes:
                jax.block_until_ready(_write(self.flushed_bytes))
            found.append(kernels_ms(function, args))
        return statistics.fmean(found)


def kernels_ms(function: Callable[..., Any], args: Sequence[Any]) -> float:
    """Milliseconds of all kernels of one call.

    Raises:
      RuntimeError: the call started none.
    """
    from jax.experimental.mosaic.gpu import profiler  # loads CUPTI

    _, found = profiler.measure(function)(*args)
    if found is None:
        raise RuntimeError(f"{function} started no kernel")
    return float(found)


@functools.partial(jax.jit, static_argnums=0)
def _write(size: int) -> jax.Array:
    return jnp.ones((size,), jnp.uint8)


@functools.cache
def timer_for(device: Device) -> Timer:
    """CUPTI's on an NVIDIA GPU where it can be had, the host's clock elsewhere."""
    if device.kind != "gpu" or device.capability is None:
        return WallTimer()
    timer = CuptiTimer()
    try:
        timer.sample_ms(jax.jit(lambda x: x + 1), (jnp.zeros((1 << 16,)),), 1)
    except Exception as error:  # another process may hold CUPTI, or the library may be missing
        logger.warning("kernels are timed by the host's clock, for CUPTI cannot be used: %s", error)
        return WallTimer()
    return timer


def time_interleaved(
    functions: Sequence[Callable[..., Any]],
    args: Sequence[Any],
    *,
    warmup: int,
    iters: int,
    may_go_on: Callable[[], bool] = lambda: True,
) -> list[Timing]:
    """Times functions in turn, so that a machine that slows down slows all of them.

    Args:
      warmup: untimed calls of each function.
      iters: samples of each function.
      may_go_on: asked before every round but the first; ``False`` ends the measurement with the samples taken.
    """
    calls = []
    for function in functions:
        for _ in range(warmup):
            jax.block_until_ready(function(*args))
        calls.append(calls_per_sample(function, args))
    samples: list[list[float]] = [[] for _ in functions]
    for i in range(iters):
        if i and not may_go_on():
            break
        for function, count, mine in zip(functions, calls, samples, strict=True):
            mine.append(sample_ms(function, args, count))
    return [Timing(tuple(mine)) for mine in samples]


def benchmark(function: Callable[..., Any], *args: Any, num_warmup: int = 3, num_iters: int = 100) -> float:
    """Median milliseconds of device time of one call.

    On a GPU or TPU calls are queued and waited for together; on a CPU this is the wall clock around blocked calls.
    """
    if not callable(function):
        raise TypeError(f"{function=} must be callable")
    check_counts(num_warmup=(num_warmup, 0), num_iters=(num_iters, 1))
    return time_interleaved([function], args, warmup=num_warmup, iters=num_iters)[0].median_ms


def check_counts(**counts: tuple[int, int]) -> None:
    """Raises unless each number is an integer of at least the second of its pair."""
    for name, (count, least) in counts.items():
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"{name}={count!r} must be an integer")
        if count < least:
            raise ValueError(f"{name}={count!r} must be at least {least}")
