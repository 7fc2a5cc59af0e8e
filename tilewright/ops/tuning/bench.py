"""A ``Bench`` compiles, checks and times the candidates of one call, in this process or elsewhere."""

import abc
import concurrent.futures
import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tilewright.ops.config.selection import ConfigSelectorChain
from tilewright.ops.config.tuner import Timer
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.kernel.parts import Arguments
from tilewright.ops.tuning.device_lock import DeviceLock, device_lock_on
from tilewright.ops.tuning.timing import WallTimer, timer_for
from tilewright.ops.tuning.workload import Workload
from tilewright.ops.utils.untraced import numerics_here


class CandidateError(Exception):
    """A candidate that had run before could not run again."""


class OutOfTimeError(CandidateError):
    """The tuning's time ended before a candidate could run again, which is not the candidate's fault."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """The outcome of a candidate's first run.

    Attributes:
      check: "passed", "failed", or "unchecked" if there is no oracle or the check was not reached.
      error: the exception's message, the finding of the check, or the reason why its process died; else empty.
      sample_ms: its first sample, unless there was an error.
      exception: the exception, if it was raised in this process.
      repeats_to: the relative repeatability of medians of its samples (`Timer.repeats_to`).
    """

    check: str = "unchecked"
    error: str = ""
    sample_ms: float | None = None
    exception: Exception | None = None
    repeats_to: float = Timer.repeats_to


class Bench(abc.ABC):
    """The candidates of one call, by index."""

    @abc.abstractmethod
    def prepare(self) -> None:
        """Prepares for the first candidate where that takes time: starts a process, makes arrays, runs the oracle."""

    @abc.abstractmethod
    def expect(self, indices: Sequence[int]) -> Sequence[int]:
        """Announces the candidates that will be started next, in order; returns those being compiled meanwhile."""

    @abc.abstractmethod
    def start(self, index: int) -> Trial:
        """Compiles, runs and checks a candidate, and takes a first sample; errors are part of the trial."""

    @abc.abstractmethod
    def is_ready(self, index: int) -> bool:
        """Readies a candidate for its next sample or check; False if it must be started, or started again, first."""

    @abc.abstractmethod
    def sample_ms(self, index: int) -> float:
        """Takes one more sample of a candidate that is ready.

        Raises:
          CandidateError: the candidate failed.
        """

    @abc.abstractmethod
    def recheck(self, index: int) -> list[str]:
        """The differences from the oracle of the results of one that is ready, over poisoned memory.

        Empty without an oracle.

        Raises:
          CandidateError: the candidate failed.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Releases its resources."""


def failure(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class LocalBench(Bench):
    """The bench in this process.

    Args:
      work: the call, made runnable.
      configs: the candidates.
      timer: takes the samples.
      warmup: untimed calls of a candidate between its first and second sample.
      ahead: number of candidates compiled in advance in other threads.
      device_lock: held shared to compile and exclusive to measure.
    """

    def __init__(
        self,
        work: Workload,
        configs: Sequence[Any],
        timer: Timer,
        *,
        warmup: int,
        ahead: int = 0,
        device_lock: DeviceLock | None = None,
    ):
        self._work, self._configs, self._timer, self._warmup = work, configs, timer, warmup
        self._functions: dict[int, Callable[..., Any]] = {}
        self._calls: dict[int, int] = {}
        self._ahead = ahead
        self._pool = concurrent.futures.ThreadPoolExecutor(ahead) if ahead else None
        self._pending: dict[int, concurrent.futures.Future[Callable[..., Any]]] = {}
        self._device_lock = device_lock or DeviceLock(None)
        self._held: contextlib.ExitStack | None = None

    def prepare(self) -> None:
        pass

    def expect(self, indices: Sequence[int]) -> Sequence[int]:
        if self._pool is None or any(index in self._pending for index in indices):
            return list(self._pending)  # candidates compiled together are measured before others are compiled
        numerics = numerics_here()  # those of this thread; the threads of the pool have their own
        for index in indices[: self._ahead]:
            if index not in self._functions:
                self._release_device()
                self._pending[index] = self._pool.submit(self._compile, self._configs[index], numerics)
        return list(self._pending)

    def start(self, index: int) -> Trial:
        operands = self._work.operands
        try:
            function = self._compiled(index)
        except Exception as error:  # a candidate may fail in any way; the evidence is kept
            return Trial(error=failure(error), exception=error)
        self._work.wait_for_oracle()  # an error of the oracle's is not the candidate's
        try:
            self._hold_device()
            wrong = self._work.check(function(*operands))
            if wrong:
                return Trial("failed", "; ".join(wrong))
            calls = self._timer.calls(function, operands)
            sample = self._timer.sample_ms(function, operands, calls)
        except Exception as error:  # as above
            return Trial(error=failure(error), exception=error)
        self._functions[index] = function
        return Trial("passed" if self._work.checked else "unchecked", "", sample, repeats_to=self._timer.repeats_to)

    def is_ready(self, index: int) -> bool:
        return index in self._functions

    def sample_ms(self, index: int) -> float:
        function, operands = self._functions[index], self._work.operands
        self._hold_device()
        try:
            if index not in self._calls:
                for _ in range(self._warmup):
                    jax.block_until_ready(function(*operands))
                self._calls[index] = self._timer.calls(function, operands)  # the first run may have been slow
            return self._timer.sample_ms(function, operands, self._calls[index])
        except Exception as error:  # as above
            raise CandidateError(failure(error)) from error

    def recheck(self, index: int) -> list[str]:
        if not self._work.checked:
            return []
        self._hold_device()
        try:
            return self._work.recheck(self._configs[index])
        except Exception as error:  # as above
            raise CandidateError(failure(error)) from error

    def close(self) -> None:
        self._release_device()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._functions.clear()

    def _hold_device(self) -> None:
        """Holds the device exclusively until the next compilation, since locking for every sample would mostly wait."""
        if self._held is None:
            self._held = contextlib.ExitStack()
            self._held.enter_context(self._device_lock.exclusive())

    def _release_device(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.close()

    def _compiled(self, index: int) -> Callable[..., Any]:
        pending = self._pending.pop(index, None)
        if pending is None:
            self._release_device()
            return self._work.compile(self._configs[index], self._device_lock.shared)
        concurrent.futures.wait([pending, *self._pending.values()])
        return pending.result()

    def _compile(self, config: object, numerics: Callable[[], Any]) -> Callable[..., Any]:
        with numerics():
            return self._work.compile(config, self._device_lock.shared)


def local_bench(
    inv: Invocation[Any, Any],
    chooser: ConfigSelectorChain,
    configs: Sequence[Any],
    *,
    inputs: Arguments | None = None,
    timer: Timer | None = None,
    warmup: int = 2,
    verify: bool = True,
) -> LocalBench:
    """A bench for a call on a device of this process, by default with the timer for that device."""
    device, device_lock = inv.target, device_lock_on(inv.target)
    with device_lock.shared():
        work = Workload(inv, chooser, inputs, verify=verify)
        if timer is None:
            # Kernels that wait for other devices are busy meanwhile, and those of all devices run side by side.
            timer = timer_for(device) if inv.kernel.measured_on(inv) is None else WallTimer()
    work.start_oracle(device_lock.shared)
    # On a CPU, compiling while measuring would disturb the times.
    ahead = 0 if device.kind == "cpu" else max(0, min(8, (os.cpu_count() or 1) - 1))
    return LocalBench(work, configs, timer, warmup=warmup, ahead=ahead, device_lock=device_lock)
