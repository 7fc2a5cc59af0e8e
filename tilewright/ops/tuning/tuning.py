"""Measures the candidates of a call and keeps the fastest one with right results."""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterable
from typing import Any

from tilewright.ops.config.context import AutotunePolicy, check_budget, choices_changed, current_overrides
from tilewright.ops.config.results import AutotuningResult, TunedCall
from tilewright.ops.config.selection import MEASURE, ConfigSelectorChain, default_chain
from tilewright.ops.config.tuner import Tuner
from tilewright.ops.kernel.kernel import Invocation, Kernel
from tilewright.ops.kernel.parts import Arguments
from tilewright.ops.kernel.prepared import prepared
from tilewright.ops.tuning.bench import Bench, local_bench
from tilewright.ops.tuning.calls import CallTuning
from tilewright.ops.tuning.events import (
    BuildEnded,
    BuildsLeft,
    CallLeftOut,
    CallStarted,
    CallTuned,
    CandidateDone,
    Event,
    TuningEvent,
    TuningStarted,
)
from tilewright.ops.tuning.isolation import IdleWorker, ProcessBench, Task, is_shared, reason_not_sendable
from tilewright.ops.tuning.schedule import Schedule
from tilewright.ops.types import Cfg
from tilewright.ops.utils.describe import describe_config, describe_key
from tilewright.ops.utils.fingerprint import toolchain_fingerprint
from tilewright.ops.utils.target import check_runs_here
from tilewright.ops.utils.untraced import Interrupted, measurement_lock, run_untraced

logger = logging.getLogger(__name__)

DEFAULT_CALL_S = 120.0
"""Default seconds for each call that must be measured."""


class Autotuner:
    """Tunes invocations and stores the winners where a selection chain finds them.

    Args:
      tuner: settings of the measurements.
      chooser: the chain that stores the winners, and that provides forward configs when a backward pass is tuned; the
        default executor's chain by default.
      budget_s: seconds for all calls together, builds included; no limit by default. Calls and candidates without time
        are left out and reported; builds continue in the background.
      call_budget_s: seconds for each call; no new candidates are tried after three quarters of it.
      verify: check candidates against the kernel's reference, if it has one.
      on_event: called with the events of this module, from the thread that measures.
    """

    def __init__(
        self,
        tuner: Tuner | None = None,
        *,
        chooser: ConfigSelectorChain | None = None,
        budget_s: float | None = None,
        call_budget_s: float | None = None,
        verify: bool = True,
        on_event: Event | None = None,
    ):
        chooser = default_chain() if chooser is None else chooser
        if not isinstance(chooser, ConfigSelectorChain):
            raise TypeError(f"{chooser=} must be a ConfigSelectorChain or None")
        if on_event is not None and not callable(on_event):
            raise TypeError(f"{on_event=} must be callable or None")
        if tuner is not None and not isinstance(tuner, Tuner):
            raise TypeError(f"{tuner=} must be a Tuner or None")
        check_budget(budget_s)
        check_budget(call_budget_s, "call_budget_s")
        self.tuner = tuner or Tuner()
        self.chooser = chooser
        self.budget_s = budget_s
        self.call_budget_s = call_budget_s
        self.verify = verify
        self._on_event = on_event

    def tune(
        self,
        *invocations: Invocation[Any, Any],
        configs: Iterable[Any] | None = None,
        inputs: Arguments | None = None,
        reuse: bool = False,
    ) -> AutotuningResult:
        """Measures every invocation and returns the results.

        Functions that were traced with other configs than the winners are traced again.

        Args:
          configs: candidates in place of the kernel's config space; the heuristic is always added.
          inputs: prepared arguments to measure with in place of the kernel's sampled ones.
          reuse: use a complete measurement that a cache holds instead of repeating it.

        Raises:
          TypeError: an element of ``invocations`` is not an invocation, or ``configs`` is not iterable.
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
        inputs: Arguments | None = None,
        reuse: bool = False,
    ) -> AutotuningResult:
        """``tune`` for a caller who is about to trace: does not invalidate other traces."""
        if configs is not None and not isinstance(configs, Iterable):
            raise TypeError(f"{configs=} must be configs of the kernel, or None")
        check_runs_here()
        given = None if configs is None else list(configs)
        distinct = {inv.key: inv for inv in invocations}
        deadline = time.monotonic() + _seconds(self.budget_s)
        known = {key: entry for key, inv in distinct.items() if reuse and (entry := self._known(inv)) is not None}
        schedules: list[Schedule] = []
        unmeasured: list[str] = []

        def work(cancelled: threading.Event) -> None:
            for entry in known.values():
                self._emit(CallTuned(entry))
            unknown = []
            for inv in (inv for key, inv in distinct.items() if key not in known):
                why = inv.kernel.unmeasurable(inv)
                if not why:
                    unknown.append(inv)
                    continue
                self._emit(CallLeftOut(inv, describe_key(inv.key), why))
                unmeasured.append(f"{inv.kernel.name} {inv.direction} {describe_key(inv.key)}: {why}")
            if not unknown:
                return
            self._emit(TuningStarted(len(unknown), _seconds(self.budget_s)))
            with contextlib.closing(IdleWorker()) as idle:
                if self.tuner.isolation != "none" and any(is_shared(inv.target) for inv in unknown):
                    idle.warm()
                calls = [self._call(inv, given, inputs, cancelled, idle, deadline) for inv in unknown]
                limits = {"deadline": deadline, "call_budget_s": _seconds(self.call_budget_s)}
                schedules.append(Schedule(calls, cancelled=cancelled, emit=self._emit, **limits))
                schedules[0].run()

        interrupted = False
        try:
            with measurement_lock():
                run_untraced(work)
        except Interrupted:
            interrupted = True
        failures = [failure for schedule in schedules for failure in schedule.failures]
        if failures and not interrupted:
            raise (
                failures[0] if len(failures) == 1 else ExceptionGroup("every candidate of some calls failed", failures)
            )
        entries = known | {entry.key: entry for schedule in schedules for entry in schedule.entries}
        return AutotuningResult(
            tuple(entries[key] for key in distinct if key in entries),
            device=invocations[0].device_fingerprint if invocations else "",
            toolchain=toolchain_fingerprint(),
            interrupted=interrupted,
            left_out=(*unmeasured, *(text for schedule in schedules for text in schedule.left_out)),
        )

    def _emit(self, event: TuningEvent) -> None:
        if logger.isEnabledFor(logging.INFO):
            log_event(logger, event)
        if self._on_event is not None:
            self._on_event(event)

    def _known(self, inv: Invocation[Any, Any]) -> TunedCall | None:
        """The entry of a call with complete measurements in a cache."""
        stored = self.chooser.measurements(inv)
        if stored is None:
            return None
        config, step, candidates = stored
        chosen = next((i for i, c in enumerate(candidates) if c.config == config), None)
        if chosen is None:
            return None
        # The source is the present one: stale measurements were not returned.
        return TunedCall.of(inv, candidates, chosen, step=step, source=inv.kernel.source(config))

    def _call(
        self,
        inv: Invocation[Any, Any],
        configs: list[Any] | None,
        inputs: Arguments | None,
        cancelled: threading.Event,
        idle: IdleWorker,
        deadline: float,
    ) -> CallTuning:
        """The tuning of one call, before anything is measured."""
        candidates, first = self._candidates(inv, configs)
        return CallTuning(
            inv,
            candidates,
            first=first,
            bench=lambda: self._bench(inv, candidates, inputs, idle, deadline),
            chooser=self.chooser,
            iters=self.tuner.iters,
            search=self.tuner.search,
            cancelled=cancelled,
            emit=self._emit,
        )

    def _bench(
        self,
        inv: Invocation[Any, Any],
        candidates: list[Any],
        inputs: Arguments | None,
        idle: IdleWorker,
        deadline: float,
    ) -> Bench:
        """Makes the bench that runs the candidates.

        Raises:
          ValueError: process isolation was requested, but the candidates cannot run in another process.
        """
        tuner = self.tuner
        if tuner.isolation != "none":
            task = Task.of(inv, candidates, inputs, self.chooser, tuner.timer, tuner.warmup, verify=self.verify)
            why = reason_not_sendable(task)
            if not why:
                return ProcessBench(task, timeout_s=tuner.timeout_s, idle=idle, deadline=deadline)
            if tuner.isolation == "process":
                raise ValueError(f"{inv.kernel.name} cannot be tuned in another process: {why}")
            logger.info("%s is tuned in this process: %s", inv.kernel.name, why)
        return local_bench(
            inv, self.chooser, candidates, inputs=inputs, timer=tuner.timer, warmup=tuner.warmup, verify=self.verify
        )

    def _candidates(self, inv: Invocation[Any, Any], configs: list[Any] | None) -> tuple[list[Any], int]:
        """The distinct candidates, and the number of leading ones: the heuristic, and the config of a stale entry."""
        stale = self.chooser.stale_config(inv)
        space = list(inv.kernel.config_space(inv)) if configs is None else configs
        leading = [inv.kernel.heuristic_cfg(inv), *([] if stale is None else [stale])]
        unique: list[Any] = []
        for config in [*leading, *space]:
            if not any(type(config) is type(other) and config == other for other in unique):  # 1 is not True
                unique.append(config)
        return unique, 1 if stale is None or stale == leading[0] else 2


def _measured_for(inv: Invocation[Any, Any], chain: ConfigSelectorChain, policy: AutotunePolicy) -> AutotuningResult:
    """Tunes a call for a chain whose policy allows it."""
    autotuner = Autotuner(
        chain.tuner, chooser=chain, budget_s=policy.budget_s, verify=policy.verify, on_event=chain.on_event
    )
    return autotuner.measure(inv)


MEASURE.fill(_measured_for)


def _seconds(budget_s: float | None) -> float:
    return math.inf if budget_s is None else budget_s


def log_event(logger: logging.Logger, event: TuningEvent) -> None:
    """Logs at INFO that a tuning starts and its result, and at DEBUG the outcome of each candidate."""
    match event:
        case CallStarted(inv, shapes, count, False):
            logger.info("tuning %s %s %s: %d candidates", inv.kernel.name, inv.direction, shapes, count)
        case CallTuned(call):
            winner = call.winner
            time = "" if winner.time_ms is None else f", {winner.time_ms:.4g} ms"
            logger.info("tuned %s %s: %s%s", call.op, call.direction, describe_config(winner.config), time)
        case CandidateDone(_, candidate):
            outcome = f"{candidate.time_ms:.4g} ms" if candidate.eligible else candidate.error
            logger.debug("%s: %s", describe_config(candidate.config), outcome)
        case TuningStarted(count, budget_s):
            logger.info("%d calls are tuned, within %g s", count, budget_s)
        case BuildEnded(build, _, why) if why:
            logger.info("%s could not be built: %s", build, why)
        case BuildsLeft(builds):
            logger.info("still being built, for the next tuning: %s", ", ".join(builds))
        case CallLeftOut(inv, shapes, why):
            logger.info("not tuned: %s %s %s: %s", inv.kernel.name, inv.direction, shapes, why)


def autotune(
    kernel: Kernel[Cfg, Any],
    *args: object,
    configs: Iterable[Cfg] | None = None,
    num_warmup: int = 3,
    num_iters: int = 10,
    **kwargs: object,
) -> Cfg:
    """Returns the best forward config of one call, measured with the given arrays and stored for later calls.

    Args:
      configs: the candidates; the kernel's ``config_space`` by default.
      num_warmup: untimed calls of each candidate.
      num_iters: samples of each candidate.

    Raises:
      ExceptionGroup: every candidate failed; contains all of their exceptions.
    """
    inv, inputs = prepared(kernel, args, kwargs)
    verify = dict(current_overrides().policy).get("verify", True)
    result = Autotuner(Tuner(num_warmup, num_iters), verify=verify).tune(inv, configs=configs, inputs=inputs)
    if result.interrupted:
        raise KeyboardInterrupt
    config: Cfg = result.entries[0].winner.config
    return config


def autotune_recorded(
    invocations: Iterable[Invocation[Any, Any]], *, tuner: Tuner | None = None, on_event: Event | None = None
) -> AutotuningResult:
    """Tunes recorded invocations on sampled inputs and stores the winners.

    Raises:
      KeyboardInterrupt: the caller was interrupted; the measurements made so far are kept.
    """
    if not isinstance(invocations, Iterable):
        raise TypeError(f"{invocations=} must be invocations, such as get_invocations returns")
    result = Autotuner(tuner, on_event=on_event).tune(*invocations)
    if result.interrupted:
        raise KeyboardInterrupt
    return result
