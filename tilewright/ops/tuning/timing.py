"""Timers that measure how long a function keeps the device busy."""

import abc
import dataclasses
import functools
import itertools
import logging
import pathlib
import re
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tilewright.ops.config.tuner import Timer, check_counts
from tilewright.ops.kernel.candidates import Timing
from tilewright.ops.tuning.profilers import reason_against_cupti, running_session, trace_into
from tilewright.ops.types import Device

logger = logging.getLogger(__name__)

# A shorter sample would measure mostly the clock and the dispatch; short functions run several times per sample.
MIN_SAMPLE_S = 1e-3
MAX_CALLS_PER_SAMPLE = 1000
# Minimum time of the calls in one trace; more calls would only amortise the cost of the trace itself.
MIN_TRACE_S = 10e-3
MAX_CALLS_PER_TRACE = 8


def sample_ms(function: Callable[..., Any], args: Sequence[Any], calls: int) -> float:
    """Milliseconds per call of ``calls`` calls that are queued together and waited for at the end."""
    start = time.perf_counter()
    results = None
    for _ in range(calls):
        results = function(*args)
    jax.block_until_ready(results)
    return (time.perf_counter() - start) * 1e3 / calls


def calls_per_sample(
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    min_s: float = MIN_SAMPLE_S,
    max_calls: int = MAX_CALLS_PER_SAMPLE,
) -> int:
    """The number of calls that make a sample long enough to be measured."""
    once = sample_ms(function, args, 1) / 1e3
    return max(1, min(max_calls, round(min_s / max(once, 1e-7))))


@dataclasses.dataclass(frozen=True, slots=True)
class WallTimer(Timer):
    """The host's clock around calls that are queued and waited for together."""

    def calls(self, function: Callable[..., Any], args: Sequence[Any]) -> int:
        return calls_per_sample(function, args)

    def sample_ms(self, function: Callable[..., Any], args: Sequence[Any], calls: int) -> float:
        return sample_ms(function, args, calls)


type KernelTimes = list[tuple[str, float]]
"""Name and milliseconds of every kernel of one call, in the order of their starts."""


@dataclasses.dataclass(frozen=True, slots=True)
class KernelTimer(Timer, abc.ABC):
    """The time that a call's kernels run on a GPU, as a profiler reports it.

    Gaps between kernels and copies do not count. Before each call a buffer larger than the L2 cache is written, since
    no model finds its operands in the cache.

    Attributes:
      flushed_bytes: size of that buffer; 0 for none.
    """

    # Ratios of attention candidates repeated to 0.7 % on an H100 when they were compiled and measured again.
    repeats_to: ClassVar[float] = 0.01
    flushed_bytes: int = 256 << 20

    @abc.abstractmethod
    def kernels(self, function: Callable[..., Any], args: Sequence[Any], calls: int) -> list[KernelTimes]:
        """The kernels of every call.

        Raises:
          RuntimeError: a call started no kernel, or the profiler is unavailable.
        """

    def sample_ms(self, function: Callable[..., Any], args: Sequence[Any], calls: int) -> float:
        if not self.flushed_bytes:
            return statistics.fmean(map(_sum_ms, self.kernels(function, args, calls)))
        flush = _flushing_kernels(self)
        found = self.kernels(_Flushing(function, self.flushed_bytes), args, calls)
        return statistics.fmean(_sum_ms(_without(flush, each)) for each in found)


@dataclasses.dataclass(frozen=True, slots=True)
class CuptiTimer(KernelTimer):
    """The time that a call's kernels run on an NVIDIA GPU, as CUPTI reports it to Mosaic GPU's profiler."""

    def calls(self, function: Callable[..., Any], args: Sequence[Any]) -> int:
        return 1  # neither the dispatch nor the clock's resolution affects the time

    def kernels(self, function: Callable[..., Any], args: Sequence[Any], calls: int) -> list[KernelTimes]:
        # One by one: the profiler keeps the results of all calls that it measures at once alive.
        return [each for _ in range(calls) for each in kernels(function, args)]


@dataclasses.dataclass(frozen=True, slots=True)
class XlaTimer(KernelTimer):
    """The time that a call's kernels run on a GPU, as XLA's profiler reports it; used if `CuptiTimer` cannot be.

    Each sample is a trace, which takes milliseconds to start and to write: one trace holds several short calls.
    """

    def calls(self, function: Callable[..., Any], args: Sequence[Any]) -> int:
        return calls_per_sample(function, args, min_s=MIN_TRACE_S, max_calls=MAX_CALLS_PER_TRACE)

    def kernels(self, function: Callable[..., Any], args: Sequence[Any], calls: int) -> list[KernelTimes]:
        def run() -> None:
            for _ in range(calls):
                jax.block_until_ready(function(*args))

        jax.block_until_ready(function(*args))  # run once before: compilation may run kernels on the device
        found = gpu_kernels(traced(run))
        if not found:
            raise RuntimeError(f"{function} started no kernel that XLA's profiler saw")
        count, rest = divmod(len(found), calls)
        if rest:
            raise RuntimeError(f"{len(found)} kernels cannot be those of {calls} like calls of {function}")
        return [found[i * count : (i + 1) * count] for i in range(calls)]


def _sum_ms(found: KernelTimes) -> float:
    return sum(time_ms for _, time_ms in found)


def _without(flush: Sequence[str], found: KernelTimes) -> KernelTimes:
    """The kernels of one call without those that overwrote the cache before it."""
    remaining = list(found)
    for name in flush:
        names = [name for name, _ in remaining]
        if name not in names:
            raise RuntimeError(f"the kernel {name!r} that overwrites the cache is not among those seen: {names}")
        del remaining[names.index(name)]  # the flush was launched first
    return remaining


class _Flushing:
    """A call right after the cache was overwritten.

    A profiler calls a function once before it measures it, so a flush outside of the function would have no effect.
    Mosaic GPU's profiler compiles functions that do not look like results of ``jax.jit``, hence the two methods that
    are never called.
    """

    def __init__(self, function: Callable[..., Any], size: int):
        self._function, self._size = function, size

    def __call__(self, *args: object) -> Any:
        return _write(self._size), self._function(*args)

    def trace(self, *_: object) -> Any:
        raise NotImplementedError

    def lower(self, *_: object) -> Any:
        raise NotImplementedError


@functools.cache
def _flushing_kernels(timer: KernelTimer) -> tuple[str, ...]:
    (found,) = timer.kernels(functools.partial(_write, timer.flushed_bytes), (), 1)
    return tuple(name for name, _ in found)


def kernels(function: Callable[..., Any], args: Sequence[Any], calls: int = 1) -> list[KernelTimes]:
    """The kernels of every call, as CUPTI reports them; the calls are queued together.

    Raises:
      RuntimeError: there are none, CUPTI is unavailable, or it would end the process.
    """
    from jax.experimental.mosaic.gpu import profiler  # loads CUPTI

    if why := reason_against_cupti():
        raise RuntimeError(why)
    _, found = profiler.measure(function, aggregate=False, iterations=calls)(*args)
    if not found:
        raise RuntimeError(f"{function} started no kernel")
    each: list[Any] = [found] if calls == 1 else list(found)
    return [[(name, float(time_ms)) for name, time_ms in call] for call in each]


def traced(run: Callable[[], Any]) -> jax.profiler.ProfileData:
    """The recording of the devices that XLA's profiler made while a function ran.

    Raises:
      RuntimeError: a trace is being taken already.
      OSError: the recording, a temporary file, cannot be written.
    """
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with trace_into(folder, options):
            run()
        files = list(pathlib.Path(folder).rglob("*.xplane.pb"))
        if not files:
            raise RuntimeError("XLA's profiler has recorded nothing")
        return jax.profiler.ProfileData.from_file(str(files[0]))


def gpu_kernels(profile: jax.profiler.ProfileData) -> KernelTimes:
    """The kernels on all streams of all GPUs in a recording of XLA's profiler, without copies and derived events."""
    found = []
    with warnings.catch_warnings():
        # If warnings are errors, reading an event's statistics would end the process: nanobind aborts on the
        # DeprecationWarning about a type without a module.
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in profile.planes:
            if not re.fullmatch(r"/device:GPU:\d+", plane.name):
                continue
            streams = (line for line in plane.lines if line.name.startswith("Stream #"))
            for event in itertools.chain.from_iterable(line.events for line in streams):
                if any(name == "kernel_details" for name, _ in event.stats):
                    found.append((event.start_ns, event.name, event.duration_ns / 1e6))
    return [(name, time_ms) for _, name, time_ms in sorted(found)]


@functools.partial(jax.jit, static_argnums=0)
def _write(size: int) -> jax.Array:
    return jnp.ones((size,), jnp.uint8)


def timer_for(device: Device) -> Timer:
    """The best available timer: CUPTI or else XLA's profiler on an NVIDIA GPU; elsewhere the host's clock.

    While another user runs XLA's profiler it is the host's clock, unless CUPTI can be shared.
    """
    if device.kind != "gpu" or device.capability is None:
        return WallTimer()
    why = reason_against_cupti()
    if why and (session := running_session()):
        logger.warning("kernels are timed by the host's clock: %s", session)
        return WallTimer()
    return _profiling_timer(why)


@functools.cache
def _profiling_timer(reason_against_cupti: str) -> Timer:
    profilers: tuple[tuple[str, KernelTimer], ...] = (("CUPTI", CuptiTimer()), ("XLA's profiler", XlaTimer()))
    for name, timer in profilers:
        try:
            timer.sample_ms(jax.jit(lambda x: x + 1), (jnp.zeros((1 << 16,)),), 1)
        except Exception as error:  # another process may hold CUPTI, a library may be missing, or a trace be running
            logger.warning("kernels are not timed by %s, for it cannot be used: %s", name, error)
        else:
            return timer
    logger.warning("kernels are timed by the host's clock")
    return WallTimer()


def time_interleaved(
    functions: Sequence[Callable[..., Any]],
    args: Sequence[Any],
    *,
    warmup: int,
    iters: int,
) -> list[Timing]:
    """Times functions in turn, so that a machine that slows down slows all of them.

    Args:
      warmup: untimed calls of each function.
      iters: samples of each function.
    """
    calls = []
    for function in functions:
        for _ in range(warmup):
            jax.block_until_ready(function(*args))
        calls.append(calls_per_sample(function, args))
    samples: list[list[float]] = [[] for _ in functions]
    for _ in range(iters):
        for function, count, function_samples in zip(functions, calls, samples, strict=True):
            function_samples.append(sample_ms(function, args, count))
    return [Timing(tuple(function_samples)) for function_samples in samples]


def benchmark(function: Callable[..., Any], *args: object, num_warmup: int = 3, num_iters: int = 100) -> float:
    """Median milliseconds of device time of one call.

    On a GPU or TPU calls are queued and waited for together; on a CPU this is the wall clock around blocked calls.
    """
    if not callable(function):
        raise TypeError(f"{function=} must be callable")
    check_counts(num_warmup=(num_warmup, 0), num_iters=(num_iters, 1))
    return time_interleaved([function], args, warmup=num_warmup, iters=num_iters)[0].median_ms
