"""Where the candidates of one call are compiled, checked and timed: here, or wherever else a ``Bench`` takes them."""

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
from tilewright.ops.tuning.timing import timer_for
from tilewright.ops.tuning.workload import Workload
from tilewright.ops.utils.untraced import numerics_here


class CandidateError(Exception):
    """A candidate that had run before could not run again."""


class OutOfTimeError(CandidateError):
    """The tuning's time ended before a candidate that had run before could run again, which says nothing of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """How a candidate's first run went.

    Attributes:
      check: "passed", "failed", or "unchecked" where there is no oracle or it did not come to that.
      error: what it raised, what the check found, or how its process died; empty if all was well.
      sample_ms: its first sample, unless there was an error.
      exception: what it raised, if that is at hand.
      repeats_to: the share to which medians of its samples repeat (`Timer.repeats_to`).
    """

    check: str = "unchecked"
    error: str = ""
    sample_ms: float | None = None
    exception: Exception | None = None
    repeats_to: float = Timer.repeats_to


class Bench(abc.ABC):
    """The candidates of one call, by their index."""

    @abc.abstractmethod
    def prepare(self) -> None:
        """Gets ready for candidates, where that takes time of its own: a process, arrays, the oracle's answer."""

    @abc.abstractmethod
    def expect(self, indices: Sequence[int]) -> Sequence[int]:
        """Says which candidates will be started next, in that order; returns those that are compiled meanwhile."""

    @abc.abstractmethod
    def start(self, index: int) -> Trial:
        """Compiles, runs and checks a candidate, and takes a first sample; what goes wrong is in the trial."""

    @abc.abstractmethod
    def sample_ms(self, index: int) -> float:
        """One more sample of a candidate that was started without an error.

        Raises:
          CandidateError: it failed.
        """

    @abc.abstractmethod
    def recheck(self, index: int) -> list[str]:
        """How its results over poisoned memory differ from the oracle's; empty where there is no oracle.

        Raises:
          CandidateError: it failed.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Gives back what it holds."""


def failure(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class LocalBench(Bench):
    """The bench in this process.

    Args:
      work: the call.
      configs: the candidates.
      timer: takes the samples.
      warmup: untimed calls of a candidate between its first sample and the next.
      ahead: how many candidates are compiled in other threads in advance.
      device_lock: who may use the device when; what compiles or measures waits for its turn.
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
            return list(self._pending)  # what was compiled together is measured first
        numerics = numerics_here()  # of this thread; those of the pool have their own
        for index in indices[: self._ahead]:
            if index not in self._functions:
                self._leave()
                self._pending[index] = self._pool.submit(self._compile, self._configs[index], numerics)
        return list(self._pending)

    def start(self, index: int) -> Trial:
        operands = self._work.operands
        try:
            function = self._compiled(index)
        except Exception as error:  # a candidate may fail in any way; the evidence is kept
            return Trial(error=failure(error), exception=error)
        self._work.wait_for_oracle()  # whose failure is none of the candidate's
        try:
            self._enter()
            wrong = self._work.check(function(*operands))
            if wrong:
                return Trial("failed", "; ".join(wrong))
            calls = self._timer.calls(function, operands)
            sample = self._timer.sample_ms(function, operands, calls)
        except Exception as error:  # as above
            return Trial(error=failure(error), exception=error)
        self._functions[index] = function
        return Trial("passed" if self._work.checked else "unchecked", "", sample, repeats_to=self._timer.repeats_to)

    def sample_ms(self, index: int) -> float:
        function, operands = self._functions[index], self._work.operands
        self._enter()
        try:
            if index not in self._calls:
                for _ in range(self._warmup):
                    jax.block_until_ready(function(*operands))
                self._calls[index] = self._timer.calls(function, operands)  # the first run may have been a slow one
            return self._timer.sample_ms(function, operands, self._calls[index])
        except Exception as error:  # as above
            raise CandidateError(failure(error)) from error

    def recheck(self, index: int) -> list[str]:
        if not self._work.checked:
            return []
        self._enter()
        try:
            return self._work.recheck(self._configs[index])
        except Exception as error:  # as above
            raise CandidateError(failure(error)) from error

    def close(self) -> None:
        self._leave()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._functions.clear()

    def _enter(self) -> None:
        """Takes the device for itself until the next compilation: a turn for every sample would be mostly waiting."""
        if self._held is None:
            self._held = contextlib.ExitStack()
            self._held.enter_context(self._device_lock.alone())

    def _leave(self) -> None:
        turn, self._held = self._held, None
        if turn is not None:
            turn.close()

    def _compiled(self, index: int) -> Callable[..., Any]:
        pending = self._pending.pop(index, None)
        if pending is None:
            self._leave()
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
    """The bench for a call on a device that this process has; the timer is what suits it unless there is one."""
    device, device_lock = inv.target, device_lock_on(inv.target)
    with device_lock.shared():
        work = Workload(inv, chooser, inputs, verify=verify)
        timer = timer or timer_for(device)
    work.ask_oracle(device_lock.shared)
    # On a CPU, compiling beside what is measured would disturb it.
    ahead = 0 if device.kind == "cpu" else max(0, min(8, (os.cpu_count() or 1) - 1))
    return LocalBench(work, configs, timer, warmup=warmup, ahead=ahead, device_lock=device_lock)
