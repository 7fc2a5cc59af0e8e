"""The tuning of one call: its candidates, the bench that runs them, and the builds that they wait for."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tilewright.ops.config.results import TunedCall
from tilewright.ops.config.selection import ConfigSelectorChain
from tilewright.ops.config.tuner import Search
from tilewright.ops.kernel.builds import Build
from tilewright.ops.kernel.candidates import kind_of
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.tuning.bench import Bench, Trial
from tilewright.ops.tuning.builds.background import BackgroundBuilds
from tilewright.ops.tuning.candidate_search import CandidateSearch
from tilewright.ops.tuning.events import TuningEvent
from tilewright.ops.tuning.journal import Journal
from tilewright.ops.tuning.limits import Limits, Prediction

# The share of a call's time for first runs of candidates; the rest compares those that may be the best.
FIRST_RUNS = 0.75


class BuildGate:
    """Opens for a candidate once everything that it needs is built; missing builds run in the background.

    Attributes:
      builds: the background builds; None before there are any.
    """

    def __init__(self, inv: Invocation[Any, Any], configs: Sequence[Any], predictions: Sequence[Prediction]):
        self._inv, self._configs = inv, configs
        # A candidate that cannot run needs no build: it is dropped when its turn comes.
        self._open = {i for i, prediction in enumerate(predictions) if prediction.refusal}
        self._waits_for: dict[int, tuple[Build, ...]] = {}
        self.builds: BackgroundBuilds | None = None

    def needed(self, index: int) -> tuple[Build, ...]:
        """The builds that a candidate still waits for."""
        if index in self._open:
            return ()
        if index not in self._waits_for:
            needed = self._inv.kernel.config_builds(self._inv, self._configs[index])
            self._waits_for[index] = tuple(each for each in needed if not each.is_made())
        return self._waits_for[index]

    def is_open(self, index: int) -> bool:
        """True if a candidate can be started."""
        needed = self.needed(index)
        if needed and self.builds is not None and all(map(self.builds.is_made, needed)):
            # The finished build may turn out not to support the call, and then another one is needed.
            del self._waits_for[index]
            needed = self.needed(index)
            self.builds.add(needed)
        if not needed:
            self._open.add(index)
        return not needed

    def refusal(self, index: int) -> str:
        """The reason why a candidate will not be built; empty if it is, or may be."""
        if self.builds is None:
            return ""
        return next((why for each in self.needed(index) if (why := self.builds.failure(each))), "")


class SuspendedBench(Bench):
    """A bench that can be closed, and is made anew on its next use."""

    def __init__(self, make: Callable[[], Bench]):
        self._make = make
        self._bench: Bench | None = None

    @property
    def is_open(self) -> bool:
        return self._bench is not None

    def prepare(self) -> None:
        self._open().prepare()

    def expect(self, indices: Sequence[int]) -> Sequence[int]:
        return self._open().expect(indices)

    def start(self, index: int) -> Trial:
        return self._open().start(index)

    def is_ready(self, index: int) -> bool:
        return self._bench is not None and self._bench.is_ready(index)

    def sample_ms(self, index: int) -> float:
        return self._open().sample_ms(index)

    def recheck(self, index: int) -> list[str]:
        return self._open().recheck(index)

    def close(self) -> None:
        bench, self._bench = self._bench, None
        if bench is not None:
            bench.close()

    def _open(self) -> Bench:
        if self._bench is None:
            self._bench = self._make()
        return self._bench


class CallTuning:
    """The tuning of one call, which can be suspended and resumed while its builds are made.

    Args:
      configs: the candidates, heuristic first.
      first: number of leading candidates that are tried before all others.
      bench: makes the bench that runs them.

    Attributes:
      start_until: no further candidate is started after this time of ``time.monotonic``.
      sample_until: no further sample is taken after this time.
      spent_s: seconds that its measurements took.
      search: the search for the fastest candidate.
    """

    def __init__(
        self,
        inv: Invocation[Any, Any],
        configs: Sequence[Any],
        *,
        first: int,
        bench: Callable[[], Bench],
        chooser: ConfigSelectorChain,
        iters: int,
        search: Search,
        cancelled: threading.Event,
        emit: Callable[[TuningEvent], None],
    ):
        self.inv, self.configs = inv, configs
        self.start_until = self.sample_until = math.inf
        self.spent_s = 0.0
        self._chooser, self._cancelled = chooser, cancelled
        predictions = [prediction(inv, config) for config in configs]
        self._gate = BuildGate(inv, configs, predictions)
        self._bench = SuspendedBench(bench)
        self._journal = Journal(chooser, inv, configs)
        self.search = CandidateSearch(
            self._bench,
            configs,
            self._limits(iters, search),
            predictions=predictions,
            known=self._journal.known(),
            emit=emit,
            record=lambda _: self._journal.record(self.search.found),
            first=first,
        )

    @property
    def ending_s(self) -> float:
        """Expected seconds of the decision: candidates may have to be started again."""
        return 1.0 + (1 if self._bench.is_open else 3) * self.search.start_s

    def needed_builds(self, index: int) -> tuple[Build, ...]:
        """The builds that a candidate waits for; none for an index beyond the last."""
        return self._gate.needed(index) if index < len(self.configs) else ()

    def follow(self, builds: BackgroundBuilds) -> None:
        """Lets candidates start once the builds that they wait for are made."""
        self._gate.builds = builds

    def explore(self) -> None:
        """Starts every candidate that can be started."""
        self._timed(self._explore)

    def _explore(self) -> None:
        if self.search.can_explore:  # otherwise arrays and an oracle are not needed yet
            self._bench.prepare()
        self.search.explore()

    def suspend(self) -> None:
        """Releases arrays and compiled candidates; all measurements are kept."""
        self._bench.close()

    def decide(self) -> TunedCall | None:
        """The call with its winner, stored in the chooser; ``None`` if none of its candidates was started.

        Raises:
          ExceptionGroup: every candidate that was started failed.
        """
        try:
            chosen = self._timed(self.search.decide)
        finally:
            self.suspend()
        found = self.search.found
        if chosen is None:
            failed = [c.exception or ValueError(c.error) for c in found if c.failed]
            if not failed or self._cancelled.is_set():
                return None
            raise ExceptionGroup(f"every candidate of {self.inv.kernel.name} ({self.inv.direction}) failed", failed)
        complete = not any(c.left_out for c in found) and not self.search.cut_short and not self._cancelled.is_set()
        source = self.inv.kernel.source(found[chosen].config)
        entry = TunedCall.of(self.inv, found, chosen, complete=complete, source=source)
        self._chooser.store(self.inv, entry.winner.config, entry.candidates, entry.winner.time_ms, entry.complete)
        if complete:
            self._journal.finish()
        return entry

    def _timed[T](self, work: Callable[[], T]) -> T:
        began = time.monotonic()
        try:
            return work()
        finally:
            self.spent_s += time.monotonic() - began

    def _limits(self, iters: int, search: Search) -> Limits:
        def may_start() -> bool:
            now = time.monotonic()
            soon = now + self.search.start_s
            return not self._cancelled.is_set() and now < self.start_until and soon < self.sample_until

        def may_continue() -> bool:
            return not self._cancelled.is_set() and time.monotonic() < self.sample_until

        return Limits(
            iters,
            search,
            self.inv.kernel.time_bound_ms(self.inv),
            may_start=may_start,
            may_continue=may_continue,
            cancelled=self._cancelled.is_set,
            seconds_left=lambda: self.start_until - time.monotonic(),
            is_open=self._gate.is_open,
            refusal=self._gate.refusal,
        )


def prediction(inv: Invocation[Any, Any], config: object) -> Prediction:
    """The kernel's prediction for a config, without running it."""
    family = kind_of(config)
    reasons = inv.kernel.config_reasons(inv, config)
    if reasons:
        return Prediction("; ".join(reasons), family=family)
    return Prediction("", inv.kernel.config_bound_ms(inv, config), family)
