"""The search for the fastest candidate: a strategy that sees only samples, whichever bench takes them."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tilewright.ops.config.tuner import Timer
from tilewright.ops.kernel.candidates import Candidate
from tilewright.ops.tuning.bench import Bench, CandidateError, OutOfTimeError, Trial
from tilewright.ops.tuning.events import CandidateDone, CandidateStarted, TuningEvent
from tilewright.ops.tuning.limits import Limits, Prediction

# A candidate this many times slower than the best so far is not sampled again.
RESAMPLE_RATIO = 1.5
# Tiles of one implementation have been seen to differ by a factor of three. An implementation that is this many times
# slower than another, by its bound or by its best candidate so far, is given up.
PRUNING_RATIO = 6.0
# Single samples of a function differ by about this share; a candidate is dropped only if it is slower by more than this
# divided by the square root of its number of samples.
EARLY_NOISE = 0.06
# Peak rates are computed from rated clocks, and real clocks have been seen a few per cent above those.
PLAUSIBLE = 0.9


class CandidateSearch:
    """Runs every candidate once, then samples the promising ones in turn, then compares those that may be the best.

    The first candidate is the heuristic: it is measured regardless of the limits, and wins unless another is faster by
    more than the noise. The winner's results are checked once more over poisoned memory; if they are wrong, the next
    best wins.

    After the leading candidates, the first guess of every implementation is tried before any second guess, and then the
    candidates of the fastest implementation so far. A candidate that must be built is started once it is; the search
    goes on with those that are ready.

    A candidate is recorded as dropped and not started if it is predicted not to run, or predicted to take longer than
    another one took, allowing for clocks above their rating (``PLAUSIBLE``). The same holds for a candidate whose
    implementation is slower than another one by more than ``PRUNING_RATIO``.

    Args:
      predictions: one for each candidate; the heuristic's is ignored.
      known: candidates that an earlier tuning measured or saw fail; they are started only when needed.
      emit: called with events.
      record: called with every candidate that is new or was found wrong.
      first: number of leading candidates that come before all others, in their order.

    Attributes:
      cut_short: True if the time ended before the winner was checked once more.
      start_s: average seconds to compile, check and sample a candidate once. Several are compiled at the same time, and
        the first of them waits for all.
    """

    def __init__(
        self,
        bench: Bench,
        configs: Sequence[Any],
        limits: Limits,
        *,
        predictions: Sequence[Prediction],
        known: Mapping[int, Candidate],
        emit: Callable[[TuningEvent], None],
        record: Callable[[Candidate], None],
        first: int = 1,
    ):
        self._bench, self._configs, self._limits, self._known = bench, configs, limits, known
        self._predictions = predictions
        self._emit, self._record = emit, record
        self._first = first
        self._found: dict[int, Candidate] = {}
        # Candidates whose only sample was taken right after the first run, not interleaved with others.
        self._first_sample_only: set[int] = set()
        self._repeats_to = Timer.repeats_to
        self._starting_s: list[float] = []
        self._ahead: set[int] = set()
        self.cut_short = False

    @property
    def found(self) -> list[Candidate]:
        """The candidates with a known outcome, in their order."""
        return [self._found[index] for index in sorted(self._found)]

    @property
    def start_s(self) -> float:
        return sum(self._starting_s) / max(1, len(self._ahead), len(self._starting_s))

    @property
    def is_waiting(self) -> bool:
        """True if a candidate without an outcome may still be built."""
        return any(not self._limits.is_open(i) and not self._limits.refusal(i) for i in self._unknown())

    @property
    def can_explore(self) -> bool:
        """True if a candidate without an outcome can be started."""
        return any(self._limits.is_open(i) for i in self._unknown())

    def run(self) -> int | None:
        """The index of the winner; ``None`` if no candidate was found right."""
        self.explore()
        return self.decide()

    def explore(self) -> None:
        """Starts every candidate that can be started, the most promising first, while there is time."""
        while not self._limits.cancelled():
            best = self._best_of_families()
            open_now = self._by_promise([i for i in self._unknown() if self._limits.is_open(i)], best)
            if not open_now:
                return
            # A candidate compiled ahead only needs to be measured.
            may = self._limits.may_continue if open_now[0] in self._ahead else self._limits.may_start
            if open_now[0] and not may():
                return
            self._try_first(open_now, best)

    def decide(self) -> int | None:
        """The index of the winner among the started candidates; the others are recorded as left out."""
        eligible = self._eligible()
        if eligible:
            self._search(self._promising(eligible) if len(eligible) > 1 else eligible)
        while eligible := self._eligible():
            chosen = self._winner(eligible)
            if self._passes_recheck(chosen):
                break
        for index in self._unknown():
            self._leave_out(index)
        return chosen if eligible else None

    def _unknown(self) -> list[int]:
        return [index for index in range(len(self._configs)) if index not in self._found]

    def _by_promise(self, indices: Sequence[int], families: Mapping[str, float]) -> list[int]:
        """Sorts by promise; for an implementation without a time, only its first candidate is returned."""

        def rank(index: int) -> tuple[float, int]:
            if index < self._first:
                return -1.0, index
            return families.get(self._predictions[index].family, 0.0), index

        ordered = sorted(indices, key=rank)
        guesses, known_families = [], set(families)
        for index in ordered:
            family = self._predictions[index].family
            if index < self._first or family not in known_families:
                guesses.append(index)
            known_families.add(family)
        return guesses or ordered

    def _try_first(self, ordered: Sequence[int], best: Mapping[str, float]) -> None:
        """Starts the first of some candidates, or records why it need not be started."""
        index = ordered[0]
        if index in self._known:
            self._found[index] = dataclasses.replace(self._known[index], heuristic=index == 0)
        elif why := self._reason_to_drop(index, best):
            self._found[index] = Candidate(self._configs[index], (), "dropped", why)
        else:
            ahead = [i for i in ordered if i not in self._known and not self._reason_to_drop(i, best)]
            self._ahead.update(self._bench.expect(ahead[: self._affordable()]))
            self._emit(CandidateStarted(index, self._configs[index]))
            self._found[index] = self._candidate(index, self._start(index))
            self._record(self._found[index])
        self._report(index)

    def _affordable(self) -> int | None:
        """The number of candidates that can be started in the time left, judging by earlier ones; at least one.

        ``None`` before any was started: all leading candidates, one per implementation, are compiled at the same time,
        which takes little longer than one.
        """
        left = self._limits.seconds_left()
        return max(1, int(left / self.start_s)) if self._starting_s and math.isfinite(left) else None

    def _leave_out(self, index: int) -> None:
        refusal = self._limits.refusal(index)
        if refusal:
            why = f"its build failed: {refusal}"
        elif self._limits.is_open(index):
            why = "there was no time left to measure it"
        else:
            why = "there was no time left to build it"
        self._found[index] = Candidate(self._configs[index], (), "left out", why, heuristic=index == 0)
        self._report(index)

    def _best_of_families(self) -> dict[str, float]:
        """The shortest time of each family so far."""
        best: dict[str, float] = {}
        for i in self._eligible():
            family = self._predictions[i].family
            best[family] = min(self._time(i), best.get(family, math.inf))
        return best

    def _reason_to_drop(self, index: int, families: Mapping[str, float]) -> str:
        """The reason why a candidate need not be started, given each family's best time; empty if it must be."""
        prediction, best = self._predictions[index], min(families.values(), default=math.inf)
        if index == 0:
            return ""
        if prediction.refusal:
            return f"it cannot run: {prediction.refusal}"
        if PLAUSIBLE * prediction.min_ms <= (1 + EARLY_NOISE) * best:
            family_ms = families.get(prediction.family, 0.0) if prediction.family else 0.0
            if family_ms <= PRUNING_RATIO * best:
                return ""
            return (
                f"the best of {prediction.family} so far took {family_ms:.4g} ms, "
                f"and another implementation {best:.4g} ms"
            )
        return (
            f"it takes {prediction.min_ms:.4g} ms at the least at the device's peak rates, and another took "
            f"{best:.4g} ms"
        )

    def _start(self, index: int) -> Trial:
        began = time.monotonic()
        trial = self._bench.start(index)
        self._starting_s.append(time.monotonic() - began)
        if not trial.error:
            self._repeats_to = trial.repeats_to
        return trial

    def _candidate(self, index: int, trial: Trial) -> Candidate:
        config, heuristic = self._configs[index], index == 0
        if trial.sample_ms is None:
            return Candidate(config, (), trial.check, trial.error, heuristic, trial.exception)
        impossible = self._impossible(trial.sample_ms)
        if impossible:
            return Candidate(config, (), "failed", impossible, heuristic)
        self._first_sample_only.add(index)
        return Candidate(config, (trial.sample_ms,), trial.check, "", heuristic)

    def _impossible(self, sample_ms: float) -> str:
        """The reason why a sample cannot be true; empty if it can."""
        if not (math.isfinite(sample_ms) and sample_ms > 0):
            return f"the clock is broken: a call took {sample_ms} ms"
        if sample_ms < PLAUSIBLE * self._limits.bound_ms:
            return (
                f"the clock is broken: a call took {sample_ms:.4g} ms, and its arithmetic and memory traffic take "
                f"{self._limits.bound_ms:.4g} ms at the device's peak rates"
            )
        return ""

    def _report(self, index: int) -> None:
        best_ms = min(map(self._time, self._eligible()), default=None)
        self._emit(CandidateDone(index, self._found[index], best_ms))

    def _eligible(self) -> list[int]:
        return [i for i, candidate in sorted(self._found.items()) if candidate.eligible]

    def _time(self, index: int) -> float:
        time_ms = self._found[index].time_ms
        return math.inf if time_ms is None else time_ms

    def _noise(self, first: int, second: int) -> float:
        """The difference of two candidates' medians up to which it is not significant."""
        slower = max(self._time(first), self._time(second))
        return max(self._found[first].noise_ms + self._found[second].noise_ms, self._repeats_to * slower)

    def _promising(self, eligible: Sequence[int]) -> list[int]:
        best = min(map(self._time, eligible))
        return [i for i in eligible if self._time(i) <= RESAMPLE_RATIO * best or i == 0]

    def _search(self, alive: Sequence[int]) -> None:
        taken = 0
        while taken < self._limits.iters and self._limits.may_continue():
            exhaustive = self._limits.search == "exhaustive"
            count = self._limits.iters - taken if exhaustive else min(max(1, taken), self._limits.iters - taken)
            alive = self._rounds(alive, count)
            taken += count
            if not exhaustive and len(alive) > 2:
                alive = self._better_half(alive)

    def _rounds(self, indices: Sequence[int], count: int) -> list[int]:
        """Samples candidates in turn, every second round backwards; returns those that did not fail."""
        alive = list(indices)
        for number in range(count):
            if number and not self._limits.may_continue():
                break
            for index in alive[:: -1 if number % 2 else 1]:
                if not self._sample(index):
                    alive.remove(index)
        return alive

    def _better_half(self, alive: Sequence[int]) -> list[int]:
        ranked = sorted(alive, key=self._time)
        best, limit = ranked[0], self._time(ranked[(len(ranked) - 1) // 2])
        early = EARLY_NOISE * self._time(best) / math.sqrt(len(self._found[best].samples_ms))

        def stays(index: int) -> bool:
            behind = self._time(index) - self._time(best)
            return index == 0 or self._time(index) <= limit or behind <= max(early, self._noise(index, best))

        return [index for index in alive if stays(index)]

    def _sample(self, index: int) -> bool:
        """Takes one more sample; returns False if that was not possible."""
        try:
            if not self._is_ready(index):
                return False
            sample = self._bench.sample_ms(index)
        except OutOfTimeError:
            return False
        except CandidateError as error:
            return self._fail(index, str(error))
        impossible = self._impossible(sample)
        if impossible:
            return self._fail(index, impossible)
        kept = () if index in self._first_sample_only else self._found[index].samples_ms
        self._first_sample_only.discard(index)
        self._found[index] = dataclasses.replace(self._found[index], samples_ms=(*kept, sample))
        return True

    def _is_ready(self, index: int) -> bool:
        """Starts a candidate that is not ready: an earlier tuning measured it, or what ran it was closed or has ended.

        Raises:
          OutOfTimeError: there is no time left to start it.
        """
        if not self._bench.is_ready(index):
            self._emit(CandidateStarted(index, self._configs[index]))
            trial = self._start(index)
            if trial.check == "left out":
                raise OutOfTimeError(trial.error)
            if trial.error:
                return self._fail(index, trial.error, trial.check)
        return True

    def _fail(self, index: int, error: str, check: str = "failed") -> bool:
        self._found[index] = dataclasses.replace(self._found[index], check=check, error=error)
        self._record(self._found[index])
        self._report(index)
        return False

    def _winner(self, eligible: Sequence[int]) -> int:
        """The fastest candidate, or the heuristic if it is within the noise of the fastest."""
        best = min(eligible, key=self._time)
        if best == 0:
            return 0
        near = [i for i in eligible if i == 0 or self._time(i) - self._time(best) <= self._noise(i, best)]
        if len(near) > 1 and self._limits.may_continue():
            near = self._rounds(near, self._limits.iters) or near
            best = min((i for i in near if self._found[i].eligible), key=self._time, default=best)
        if 0 not in near or not self._found[0].eligible:
            return best
        return best if self._time(best) < self._time(0) - self._noise(0, best) else 0

    def _passes_recheck(self, index: int) -> bool:
        """True if a winner's results are right over poisoned memory too, or there is no time left to check."""
        if not self._found[index].eligible:
            return False
        try:
            if not self._is_ready(index):
                return False
            wrong = self._bench.recheck(index)
        except OutOfTimeError:  # keep the measurements: its results were right once
            self.cut_short = True
            return True
        except CandidateError as error:
            wrong = [str(error)]
        return self._fail(index, "over poisoned memory: " + "; ".join(wrong)) if wrong else True
