"""Measuring the candidates of a call and keeping the fastest that is right."""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tilewright.ops.config.context import check_budget, choices_changed, current_overrides
from tilewright.ops.core.kernel import Invocation, Kernel
from tilewright.ops.execution.outside import Interrupted, measuring_alone, outside_traces
from tilewright.ops.execution.results import AutotuningResult, Candidate, TunedCall
from tilewright.ops.execution.timing import benchmark, check_counts, time_interleaved
from tilewright.ops.execution.workload import Workload
from tilewright.ops.utils.describe import describe_key
from tilewright.ops.utils.fingerprint import toolchain_fingerprint

if TYPE_CHECKING:
    from tilewright.ops.config.selection import ConfigSelectorChain

__all__ = [
    "Autotuner",
    "CallStarted",
    "CallTuned",
    "CandidateFailed",
    "CandidateMeasured",
    "CandidateStarted",
    "Tuner",
    "autotune",
    "autotune_recorded",
    "benchmark",
]

logger = logging.getLogger(__name__)

# A candidate this many times slower than the best so far is not measured a second time.
HOPELESS = 1.5
# Medians of interleaved samples repeat to about this share on a quiet machine, whatever the samples' own spread says.
LEAST_NOISE = 0.02


@dataclasses.dataclass(frozen=True, slots=True)
class Tuner:
    """How to measure.

    Attributes:
      warmup: untimed calls of each candidate after its first.
      iters: timed samples of each candidate that is still in the race.
    """

    warmup: int = 2
    iters: int = 5

    def __post_init__(self) -> None:
        check_counts(warmup=(self.warmup, 0), iters=(self.iters, 1))


def check_tuner(tuner: Any) -> None:
    """Raises unless it is a ``Tuner``."""
    if not isinstance(tuner, Tuner):
        raise TypeError(f"{tuner=} must be a Tuner or None")


@dataclasses.dataclass(frozen=True, slots=True)
class CallStarted:
    """A call is about to be tuned."""

    inv: Invocation[Any, Any]
    shapes: str
    num_candidates: int


@dataclasses.dataclass(frozen=True, slots=True)
class CandidateStarted:
    """A candidate is about to be compiled and run."""

    index: int
    config: Any


@dataclasses.dataclass(frozen=True, slots=True)
class CandidateMeasured:
    """A candidate ran; ``best_ms`` is the fastest time so far, its own included."""

    index: int
    config: Any
    time_ms: float
    best_ms: float


@dataclasses.dataclass(frozen=True, slots=True)
class CandidateFailed:
    """A candidate raised or was found wrong."""

    index: int
    config: Any
    error: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallTuned:
    """A call has its winner, measured now or known before."""

    call: TunedCall


Event = Callable[[Any], None]


class Autotuner:
    """Tunes invocations and stores the winners where a selector finds them.

    Args:
      tuner: how to measure.
      chooser: the chain to store in, and to take forward configs from when a backward pass is tuned; the default
        executor's by default.
      budget_s: seconds for one call; candidates that are left by then are not tried.
      verify: check candidates against the kernel's reference, if it has one.
      on_event: is called with the events of this module, from the thread that measures.
    """

    def __init__(
        self,
        tuner: Tuner | None = None,
        *,
        chooser: "ConfigSelectorChain | None" = None,
        budget_s: float | None = None,
        verify: bool = True,
        on_event: Event | None = None,
    ):
        from tilewright.ops.config.selection import ConfigSelectorChain  # the chain tunes with this class

        if chooser is None:
            from tilewright.ops.execution.executor import default_chain

            chooser = default_chain()
        if not isinstance(chooser, ConfigSelectorChain):
            raise TypeError(f"{chooser=} must be a ConfigSelectorChain or None")
        if on_event is not None and not callable(on_event):
            raise TypeError(f"{on_event=} must be callable or None")
        if tuner is not None:
            check_tuner(tuner)
        check_budget(budget_s)
        self.tuner = tuner or Tuner()
        self.chooser = chooser
        self.budget_s = budget_s
        self.verify = verify
        self._on_event = on_event

    def tune(
        self,
        *invocations: Invocation[Any, Any],
        configs: Iterable[Any] | None = None,
        inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
        reuse: bool = False,
    ) -> AutotuningResult:
        """Measures every invocation and returns all that was found.

        Functions that were traced with other configs than the winners are traced again.

        Args:
          configs: candidates in place of the kernel's config space; the heuristic is always among them.
          inputs: prepared arguments to measure with in place of the kernel's samples.
          reuse: take a complete measurement that a cache holds instead of repeating it.

        Raises:
          TypeError: ``invocations`` or ``configs`` hold something else.
          ExceptionGroup: every candidate of an invocation failed.
        """
        for inv in invocations:
            if not isinstance(inv, Invocation):
                raise TypeError(f"an Autotuner tunes invocations, got {inv!r} of type {type(inv).__name__}")
        before = [self.chooser.lookup(inv).config for inv in invocations]
        result = self.measure(*invocations, configs=configs, inputs=inputs, reuse=reuse)
        if any(self.chooser.lookup(inv).config != known for inv, known in zip(invocations, before, strict=True)):
            choices_changed()
        return result

    def measure(
        self,
        *invocations: Invocation[Any, Any],
        configs: Iterable[Any] | None = None,
        inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
        reuse: bool = False,
    ) -> AutotuningResult:
        """``tune`` for a caller who is about to trace: leaves the traces of others as they are."""
        if configs is not None and not isinstance(configs, Iterable):
            raise TypeError(f"{configs=} must be configs of the kernel, or None")
        given = None if configs is None else list(configs)
        distinct = {inv.key: inv for inv in invocations}.values()
        entries: list[TunedCall] = []

        def work(cancelled: threading.Event) -> None:
            for inv in distinct:
                if cancelled.is_set():
                    return
                known = self._known(inv) if reuse else None
                entry = known or self._tune_one(inv, given, inputs, cancelled)
                if entry is not None:
                    entries.append(entry)
                    self._emit(CallTuned(entry))

        interrupted = False
        try:
            with measuring_alone():
                outside_traces(work)
        except Interrupted:
            interrupted = True
        return AutotuningResult(
            tuple(entries),
            device=invocations[0].device_fingerprint if invocations else "",
            toolchain=toolchain_fingerprint(),
            interrupted=interrupted,
        )

    def _emit(self, event: Any) -> None:
        if self._on_event is not None:
            self._on_event(event)

    def _known(self, inv: Invocation[Any, Any]) -> TunedCall | None:
        """The entry of a call that a cache has measurements of."""
        stored = self.chooser.measurements(inv)
        if stored is None:
            return None
        config, step, candidates = stored
        chosen = next((i for i, c in enumerate(candidates) if c.config == config), None)
        if chosen is None:
            return None
        return TunedCall(inv.kernel.name, inv.direction, inv.key, describe_key(inv.key), candidates, chosen, step)

    def _tune_one(
        self,
        inv: Invocation[Any, Any],
        configs: list[Any] | None,
        inputs: Any,
        cancelled: threading.Event,
    ) -> TunedCall | None:
        race = _Race(self, inv, self._candidates(inv, configs), inputs, cancelled)
        entry = race.run()
        if entry is not None:
            self.chooser.store(inv, entry.winner.config, entry.candidates, entry.winner.time_ms, entry.complete)
        return entry

    def _candidates(self, inv: Invocation[Any, Any], configs: list[Any] | None) -> list[Any]:
        """The heuristic, then what another toolchain found best, then the rest; each once."""
        stale = self.chooser.stale_config(inv)
        space = list(inv.kernel.config_space(inv)) if configs is None else configs
        ordered = [inv.kernel.heuristic_cfg(inv), *([] if stale is None else [stale]), *space]
        unique: list[Any] = []
        for config in ordered:
            if not any(type(config) is type(other) and config == other for other in unique):  # 1 is not True
                unique.append(config)
        return unique


class _Race:
    """One call's tuning: every candidate once, then the promising ones in turn, then the best against the heuristic."""

    def __init__(self, owner: Autotuner, inv: Any, configs: list[Any], inputs: Any, cancelled: threading.Event):
        self.owner = owner
        self.inv = inv
        self.configs = configs
        self.inputs = inputs
        self.cancelled = cancelled
        self.deadline = None if owner.budget_s is None else time.monotonic() + owner.budget_s
        self.found: list[Candidate] = []
        self.compiled: dict[int, Callable[..., Any]] = {}

    def may_go_on(self) -> bool:
        return not self.cancelled.is_set() and (self.deadline is None or time.monotonic() < self.deadline)

    def run(self) -> TunedCall | None:
        owner, inv = self.owner, self.inv
        owner._emit(CallStarted(inv, describe_key(inv.key), len(self.configs)))
        work = Workload(inv, owner.chooser, self.inputs, verify=owner.verify)
        for index, config in enumerate(self.configs):
            # The heuristic is measured whatever the budget: without it no other could be judged.
            if self.cancelled.is_set() or (index and not self.may_go_on()):
                break
            self.found.append(self._first_run(work, index, config))
        eligible = [i for i, c in enumerate(self.found) if c.eligible]
        if not eligible:
            if self.cancelled.is_set():
                return None
            errors = [c.exception or ValueError(c.error) for c in self.found]
            raise ExceptionGroup(f"every candidate of {inv.kernel.name} ({inv.direction}) failed", errors)
        if len(eligible) > 1:
            self._measure(work, self._promising(eligible), owner.tuner.iters)
            chosen = self._winner(work, eligible)
        else:
            self._measure(work, eligible, owner.tuner.iters)
            chosen = eligible[0]
        complete = len(self.found) == len(self.configs) and not self.cancelled.is_set()
        return TunedCall(
            inv.kernel.name, inv.direction, inv.key, describe_key(inv.key), tuple(self.found), chosen, complete=complete
        )

    def _first_run(self, work: Workload, index: int, config: Any) -> Candidate:
        """Compiles, runs, checks and takes a first sample."""
        emit, heuristic = self.owner._emit, index == 0
        emit(CandidateStarted(index, config))
        try:
            function = work.compile(config)
            wrong = work.check(function(*work.operands))
            samples = () if wrong else time_interleaved([function], work.operands, warmup=0, iters=1)[0].samples_ms
        except Exception as error:  # a candidate may fail in any way; the evidence is kept
            message = f"{type(error).__name__}: {error}"
            emit(CandidateFailed(index, config, message))
            return Candidate(config, check="unchecked", error=message, heuristic=heuristic, exception=error)
        if wrong:
            message = "; ".join(wrong)
            emit(CandidateFailed(index, config, message))
            return Candidate(config, check="failed", error=message, heuristic=heuristic)
        self.compiled[index] = function
        check = "passed" if work.checked else "unchecked"
        candidate = Candidate(config, samples, check=check, heuristic=heuristic)
        times = [c.time_ms for c in [*self.found, candidate] if c.eligible and c.time_ms is not None]
        emit(CandidateMeasured(index, config, times[-1], min(times)))
        return candidate

    def _promising(self, eligible: Sequence[int]) -> list[int]:
        best = min(self._time(i) for i in eligible)
        return [i for i in eligible if self._time(i) <= HOPELESS * best or self.found[i].heuristic]

    def _time(self, index: int) -> float:
        time_ms = self.found[index].time_ms
        return float("inf") if time_ms is None else time_ms

    def _measure(self, work: Workload, indices: Sequence[int], iters: int) -> None:
        """Samples candidates in turn; the first sample of each, taken alone, is dropped once there are better ones."""
        if not self.may_go_on():
            return
        timings = time_interleaved(
            [self.compiled[i] for i in indices],
            work.operands,
            warmup=self.owner.tuner.warmup,
            iters=iters,
            may_go_on=self.may_go_on,
        )
        for i, timing in zip(indices, timings, strict=True):
            known = self.found[i].samples_ms if len(self.found[i].samples_ms) > 1 else ()
            self.found[i] = dataclasses.replace(self.found[i], samples_ms=known + timing.samples_ms)

    def _winner(self, work: Workload, eligible: Sequence[int]) -> int:
        """The fastest, unless the heuristic is within the noise of it."""
        best = min(eligible, key=self._time)
        if 0 not in eligible or best == 0:
            return best
        self._measure(work, [0, best], self.owner.tuner.iters)
        heuristic, other = self.found[0], self.found[best]
        noise = max(heuristic.noise_ms + other.noise_ms, LEAST_NOISE * self._time(0))
        return best if self._time(best) < self._time(0) - noise else 0


def autotune(
    kernel: Kernel[Any, Any],
    *args: Any,
    configs: Iterable[Any] | None = None,
    num_warmup: int = 3,
    num_iters: int = 10,
    **kwargs: Any,
) -> Any:
    """The best forward config of one call, measured with the arrays given and stored for later calls.

    Args:
      configs: the candidates; the kernel's ``config_space`` by default.
      num_warmup: untimed calls of each candidate.
      num_iters: samples of each candidate.

    Raises:
      ExceptionGroup: every candidate failed; with all of their exceptions.
    """
    from tilewright.ops.execution.executor import prepared

    inv, inputs = prepared(kernel, args, kwargs)
    tuner = Autotuner(Tuner(num_warmup, num_iters), verify=current_overrides_verify())
    result = tuner.tune(inv, configs=configs, inputs=inputs)
    if result.interrupted:
        raise KeyboardInterrupt
    return result.entries[0].winner.config


def current_overrides_verify() -> bool:
    """Whether ``policy_override`` leaves verification on."""
    return bool(dict(current_overrides().policy).get("verify", True))


def autotune_recorded(
    invocations: Iterable[Invocation[Any, Any]], *, tuner: Tuner | None = None, on_event: Event | None = None
) -> AutotuningResult:
    """Tunes recorded invocations on sampled inputs and stores the winners."""
    if not isinstance(invocations, Iterable):
        raise TypeError(f"{invocations=} must be invocations, such as get_invocations returns")
    return Autotuner(tuner, on_event=on_event).tune(*invocations)
