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
        return statistics.fmean(self._once_ms(function, args) for _ in range(calls))

    def _once_ms(self, function: Callable[..., Any], args: Sequence[Any]) -> float:
        if not self.flushed_bytes:
            return sum(time_ms for _, time_ms in kernels(function, args))
        found = kernels(_Flushing(function, self.flushed_bytes), args)
        for name in _flushing_kernels(self.flushed_bytes):
            names = [name for name, _ in found]
            if name not in names:
                raise RuntimeError(f"the kernel {name!r} that overwrites the cache is not among those seen: {names}")
            del found[names.index(name)]  # it was the first to be launched
        return sum(time_ms for _, time_ms in found)


class _Flushing:
    """A call right after the cache was overwritten.

    The profiler calls a function once before it measures it, so that nothing done before would last; and it compiles
    what does not look like something that ``jax.jit`` returned, hence the two methods that nobody calls.
    """

    def __init__(self, function: Callable[..., Any], size: int):
        self._function, self._size = function, size

    def __call__(self, *args: Any) -> Any:
        return _write(self._size), self._function(*args)

    def trace(self, *_: Any) -> Any:
        raise NotImplementedError

    def lower(self, *_: Any) -> Any:
        raise NotImplementedError


@functools.cache
def _flushing_kernels(size: int) -> tuple[str, ...]:
    return tuple(name for name, _ in kernels(functools.partial(_write, size), ()))


def kernels(function: Callable[..., Any], args: Sequence[Any]) -> list[tuple[str, float]]:
    """Name and milliseconds of every kernel of one call, in order.

    Raises:
      RuntimeError: the call started none, or CUPTI is not there.
    """
    from jax.experimental.mosaic.gpu import profiler  # loads CUPTI

    _, found = profiler.measure(function, aggregate=False)(*args)
    if not found:
        raise RuntimeError(f"{function} started no kernel")
    return [(name, float(time_ms)) for name, time_ms in found]


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
