"""Tunes several calls within one budget: first what can be measured at once, then what has been built meanwhile."""

import threading
import time
from collections.abc import Callable, Sequence

from tilewright.ops.config.results import TunedCall
from tilewright.ops.kernel.builds import Build
from tilewright.ops.tuning.builds.background import BackgroundBuilds
from tilewright.ops.tuning.calls import FIRST_RUNS, CallTuning
from tilewright.ops.tuning.events import BuildsLeft, CallLeftOut, CallStarted, CallTuned, TuningEvent
from tilewright.ops.utils.describe import describe_key

MIN_CALL_S = 15.0
"""Seconds that a call is given if there are as many: in less, only its heuristic would run, and nothing be decided."""


class Schedule:
    """Runs the tunings of several calls, one at a time.

    All builds are started first. Each call then gets its share of the time, but at least `MIN_CALL_S`, for candidates
    that can be started without waiting; if that leaves no time for the last calls, they are left out. A call that waits
    for a build is suspended, and resumed when the build is made. A build that is unfinished when the remaining time is
    needed to compare the candidates that ran is left out, and continues.

    Args:
      deadline: the end of the budget, in ``time.monotonic``.
      call_budget_s: seconds for each call.
      emit: called with events.

    Attributes:
      entries: the calls that have a winner.
      left_out: the calls that were not measured, in short form.
      failures: exceptions of the calls whose candidates all failed.
    """

    def __init__(
        self,
        calls: Sequence[CallTuning],
        *,
        deadline: float,
        call_budget_s: float,
        cancelled: threading.Event,
        emit: Callable[[TuningEvent], None],
    ):
        self._calls = list(calls)
        self._deadline, self._call_budget_s = deadline, call_budget_s
        self._wait_until = min(deadline, time.monotonic() + len(self._calls) * call_budget_s)
        self._cancelled, self._emit = cancelled, emit
        self._builds = BackgroundBuilds()
        self._waiting: list[CallTuning] = []
        self.entries: list[TunedCall] = []
        self.left_out: list[str] = []
        self.failures: list[ExceptionGroup[Exception]] = []

    def run(self) -> None:
        """Measures the calls until all are decided or the time is over."""
        try:
            self._begin_builds()
            self._first_pass()
            self._second_pass()
        except BaseException:
            self._builds.stop()
            raise
        if self._cancelled.is_set():
            self._builds.stop()
        elif left := self._builds.detach():
            self._emit(BuildsLeft(tuple(map(str, left))))

    def _begin_builds(self) -> None:
        """Starts the builds, those of every call's first candidates first."""
        needed: list[Build] = []
        for rank in range(max((len(call.configs) for call in self._calls), default=0)):
            for call in self._calls:
                needed += call.needed_builds(rank)
        for call in self._calls:
            call.follow(self._builds)
        self._builds.add(needed)

    def _first_pass(self) -> None:
        """Measures for every call the candidates that can be started without waiting for a build."""
        for position, call in enumerate(self._calls):
            if self._cancelled.is_set():
                return
            left = self._deadline - time.monotonic()
            if left <= max((other.search.start_s for other in self._calls[:position]), default=0.0):
                self._leave_out(call)
                continue
            self._open(call)
            self._emit(CallStarted(call.inv, describe_key(call.inv.key), len(call.configs)))
            self._explore(call, max(left / (len(self._calls) - position), min(left, MIN_CALL_S)))

    def _second_pass(self) -> None:
        """Resumes calls whose builds are made, until the remaining time is needed to decide."""
        while self._waiting and not self._cancelled.is_set():
            self._report_builds()
            call = next((each for each in self._waiting if each.search.can_explore or not each.search.is_waiting), None)
            needed = sum(each.ending_s for each in self._waiting)
            left = self._wait_until - time.monotonic() - needed
            if left <= 0:
                break
            if call is None:
                self._builds.wait(min(left, 1.0))
                continue
            self._waiting.remove(call)
            self._open(call)
            self._emit(CallStarted(call.inv, describe_key(call.inv.key), len(call.configs), resumed=True))
            self._explore(call, left + call.ending_s)
        waiting, self._waiting = self._waiting, []
        for position, call in enumerate(waiting):
            self._set_clock(call, (self._wait_until - time.monotonic()) / (len(waiting) - position))
            self._decide(call)
        self._report_builds()

    def _explore(self, call: CallTuning, seconds: float) -> None:
        self._set_clock(call, seconds)
        call.explore()
        self._report_builds()
        if call.search.is_waiting and not call.search.can_explore and not self._cancelled.is_set():
            self._waiting.append(call)
        else:
            self._decide(call)

    def _open(self, call: CallTuning) -> None:
        """Makes the other calls release their resources: only one call's arrays are on the device at a time."""
        for other in self._calls:
            if other is not call:
                other.suspend()

    def _set_clock(self, call: CallTuning, seconds: float) -> None:
        seconds = max(0.0, min(seconds, self._call_budget_s - call.spent_s))
        now = time.monotonic()
        call.start_until, call.sample_until = now + FIRST_RUNS * seconds, now + seconds

    def _decide(self, call: CallTuning) -> None:
        try:
            entry = call.decide()
        except ExceptionGroup as group:
            self.failures.append(group)
            return
        if entry is not None:
            self.entries.append(entry)
            self._emit(CallTuned(entry))
        elif not self._cancelled.is_set():
            self._leave_out(call)

    def _leave_out(self, call: CallTuning) -> None:
        shapes = describe_key(call.inv.key)
        self.left_out.append(f"{call.inv.kernel.name} {call.inv.direction} {shapes}")
        self._emit(CallLeftOut(call.inv, shapes, "the budget ended before one of its candidates was measured"))

    def _report_builds(self) -> None:
        for event in self._builds.take_events():
            self._emit(event)
