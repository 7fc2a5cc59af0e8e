"""Measuring the candidates of a call and keeping the fastest that is right."""

import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, get_args

from tilewright.ops.config.context import check_budget, choices_changed, current_overrides
from tilewright.ops.core.kernel import Invocation, Kernel, optional_method
from tilewright.ops.execution.bench import Bench, local_bench
from tilewright.ops.execution.events import (
    CallStarted,
    CallTuned,
    CandidateDropped,
    CandidateFailed,
    CandidateMeasured,
    CandidateStarted,
    Event,
)
from tilewright.ops.execution.isolation import IdleWorker, ProcessBench, Task, why_not_sent
from tilewright.ops.execution.journal import Journal
from tilewright.ops.execution.outside import Interrupted, measuring_alone, outside_traces
from tilewright.ops.execution.race import Limits, Outlook, Race, Search
from tilewright.ops.execution.results import AutotuningResult, TunedCall, kind_of
from tilewright.ops.execution.timing import Timer, benchmark, check_counts
from tilewright.ops.utils.describe import describe_config, describe_key
from tilewright.ops.utils.fingerprint import toolchain_fingerprint
from tilewright.ops.utils.target import check_runs_here

if TYPE_CHECKING:
    from tilewright.ops.config.selection import ConfigSelectorChain

logger = logging.getLogger(__name__)

__all__ = [
    "Autotuner",
    "CallStarted",
    "CallTuned",
    "CandidateDropped",
    "CandidateFailed",
    "CandidateMeasured",
    "CandidateStarted",
    "Tuner",
    "autotune",
    "autotune_recorded",
    "benchmark",
]

Isolation = Literal["none", "process", "auto"]

# Of a budget, for candidates to run once; the rest is for those that may be the best to be told apart.
FIRST_RUNS = 0.75


@dataclasses.dataclass(frozen=True, slots=True)
class Tuner:
    """How to measure.

    Attributes:
      warmup: untimed calls of each candidate after its first.
      iters: timed samples of each candidate that is still in the race.
      isolation: "process" runs candidates in a process of its own, which is replaced when it crashes, hangs, leaks or
        loses its device; "none" in this one; "auto" is "process" wherever the call can be sent to another process.
      timeout_s: seconds for one candidate to compile, run and be checked, or to be sampled; in a process of its own.
      search: see `Limits`.
      timer: takes the samples; by default what suits the device.
    """

    warmup: int = 2
    iters: int = 5
    isolation: Isolation = "none"
    timeout_s: float = 120.0
    search: Search = "halving"
    timer: Timer | None = None

    def __post_init__(self) -> None:
        check_counts(warmup=(self.warmup, 0), iters=(self.iters, 1))
        for name, kind in (("isolation", Isolation), ("search", Search)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} must be one of {', '.join(map(repr, get_args(kind)))}"
                )
        number = isinstance(self.timeout_s, int | float) and not isinstance(self.timeout_s, bool)
        if not number or not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s={self.timeout_s!r} must be a positive number of seconds")
        if self.timer is not None and not isinstance(self.timer, Timer):
            raise TypeError(f"timer={self.timer!r} must be a Timer or None")


def check_tuner(tuner: Any) -> None:
    """Raises unless it is a ``Tuner``."""
    if not isinstance(tuner, Tuner):
        raise TypeError(f"{tuner=} must be a Tuner or None")


class Autotuner:
    """Tunes invocations and stores the winners where a selector finds them.

    Args:
      tuner: how to measure.
      chooser: the chain to store in, and to take forward configs from when a backward pass is tuned; the default
        executor's by default.
      budget_s: seconds for one call, from when its candidates start; those that are left after three quarters of it are
        not tried.
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
        check_runs_here()
        given = None if configs is None else list(configs)
        distinct = {inv.key: inv for inv in invocations}.values()
        entries: list[TunedCall] = []

        def work(cancelled: threading.Event) -> None:
            with contextlib.closing(IdleWorker()) as idle:
                for inv in distinct:
                    if cancelled.is_set():
                        return
                    known = self._known(inv) if reuse else None
                    entry = known or self._tune_one(inv, given, inputs, cancelled, idle)
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
        if logger.isEnabledFor(logging.INFO):
            log_event(logger, event)
        if self._on_event is not None:
            self._on_event(event)

    def _known(self, inv: Invocation[Any, Any]) -> TunedCall | None:
        """The entry of a call that a cache has measurements of."""
        from tilewright.ops.config.selection import implementation_source  # the chain tunes with this class

        stored = self.chooser.measurements(inv)
        if stored is None:
            return None
        config, step, candidates = stored
        chosen = next((i for i, c in enumerate(candidates) if c.config == config), None)
        if chosen is None:
            return None
        # Measurements of another source than the present one are not given out.
        return TunedCall.of(inv, candidates, chosen, step=step, source=implementation_source(inv))

    def _tune_one(
        self,
        inv: Invocation[Any, Any],
        configs: list[Any] | None,
        inputs: Any,
        cancelled: threading.Event,
        idle: IdleWorker,
    ) -> TunedCall | None:
        from tilewright.ops.config.selection import implementation_source  # the chain tunes with this class

        source = implementation_source(inv)
        candidates = self._candidates(inv, configs)
        self._emit(CallStarted(inv, describe_key(inv.key), len(candidates)))
        journal = Journal(self.chooser, inv, source)
        bench = self._bench(inv, candidates, inputs, idle)
        race = Race(
            bench,
            candidates,
            self._limits(inv, cancelled),
            outlooks=[_outlook(inv, config) for config in candidates],
            known=journal.known(candidates),
            emit=self._emit,
            record=lambda _: journal.record(race.found),
        )
        try:
            chosen = race.run()
        finally:
            bench.close()
        if chosen is None:
            if cancelled.is_set():
                return None
            errors = [c.exception or ValueError(c.error) for c in race.found]
            raise ExceptionGroup(f"every candidate of {inv.kernel.name} ({inv.direction}) failed", errors)
        complete = len(race.found) == len(candidates) and not cancelled.is_set()
        entry = TunedCall.of(inv, race.found, chosen, complete=complete, source=source)
        self.chooser.store(inv, entry.winner.config, entry.candidates, entry.winner.time_ms, entry.complete)
        if complete:
            journal.finish()
        return entry

    def _limits(self, inv: Invocation[Any, Any], cancelled: threading.Event) -> Limits:
        start, budget_s = time.monotonic(), math.inf if self.budget_s is None else self.budget_s
        bound = optional_method(inv.kernel, "time_bound_ms")
        return Limits(
            self.tuner.iters,
            self.tuner.search,
            0.0 if bound is None else bound(inv),
            may_start=lambda: not cancelled.is_set() and time.monotonic() < start + FIRST_RUNS * budget_s,
            may_go_on=lambda: not cancelled.is_set() and time.monotonic() < start + budget_s,
            cancelled=cancelled.is_set,
        )

    def _bench(self, inv: Invocation[Any, Any], candidates: list[Any], inputs: Any, idle: IdleWorker) -> Bench:
        """Where the candidates run.

        Raises:
          ValueError: in a process of their own they cannot, and that was asked for.
        """
        tuner = self.tuner
        if tuner.isolation != "none":
            task = Task.of(inv, candidates, inputs, self.chooser, tuner.timer, tuner.warmup, verify=self.verify)
            why = why_not_sent(task)
            if not why:
                return ProcessBench(task, timeout_s=tuner.timeout_s, idle=idle)
            if tuner.isolation == "process":
                raise ValueError(f"{inv.kernel.name} cannot be tuned in another process: {why}")
            logger.info("%s is tuned in this process: %s", inv.kernel.name, why)
        return local_bench(
            inv, self.chooser, candidates, inputs=inputs, timer=tuner.timer, warmup=tuner.warmup, verify=self.verify
        )

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


def log_event(logger: logging.Logger, event: Any) -> None:
    """Says at INFO that a tuning starts and what it found, and at DEBUG what became of each candidate."""
    match event:
        case CallStarted(inv, shapes, count):
            logger.info("tuning %s %s %s: %d candidates", inv.kernel.name, inv.direction, shapes, count)
        case CallTuned(call):
            won = call.winner
            time = "" if won.time_ms is None else f", {won.time_ms:.4g} ms"
            logger.info("tuned %s %s: %s%s", call.op, call.direction, describe_config(won.config), time)
        case CandidateMeasured(_, config, time_ms):
            logger.debug("%s: %.4g ms", describe_config(config), time_ms)
        case CandidateFailed(_, config, why) | CandidateDropped(_, config, why):
            logger.debug("%s: %s", describe_config(config), why)


def _outlook(inv: Invocation[Any, Any], config: Any) -> Outlook:
    """What a kernel says of a config without running it."""
    family = kind_of(config)
    reasons = optional_method(inv.kernel, "config_reasons")
    against = [] if reasons is None else reasons(inv, config)
    if against:
        return Outlook("; ".join(against), family=family)
    bound = optional_method(inv.kernel, "config_bound_ms")
    return Outlook("", 0.0 if bound is None else bound(inv, config), family)


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
    """Tunes recorded invocations on sampled inputs and stores the winners.

    Raises:
      KeyboardInterrupt: the caller was interrupted; what had been measured is kept.
    """
    if not isinstance(invocations, Iterable):
        raise TypeError(f"{invocations=} must be invocations, such as get_invocations returns")
    result = Autotuner(tuner, on_event=on_event).tune(*invocations)
    if result.interrupted:
        raise KeyboardInterrupt
    return result
