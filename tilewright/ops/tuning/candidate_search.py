"""Which candidate wins: a strategy that sees samples alone, wherever they come from."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tilewright.ops.config.tuner import Timer
from tilewright.ops.kernel.candidates import Candidate
from tilewright.ops.tuning.bench import Bench, CandidateError, OutOfTimeError, Trial
from tilewright.ops.tuning.events import (
    CandidateDropped,
    CandidateFailed,
    CandidateLeftOut,
    CandidateMeasured,
    CandidateStarted,
    TuningEvent,
)
from tilewright.ops.tuning.limits import Gate, Limits, OpenGate, Prediction

# A candidate this many times slower than the best so far is not measured a second time.
HOPELESS = 1.5
# Tiles of one implementation have been seen to make a difference of three times; an implementation this many times
# slower than another, by what it takes itself or the best that was tried, is given up.
PRUNING_RATIO = 6.0
# Single samples of a function differ by about this share; nobody is dropped for less, over the root of their number.
EARLY_NOISE = 0.06
# Peak rates are rated ones, and clocks have been seen a few per cent above theirs.
PLAUSIBLE = 0.9


class CandidateSearch:
    """Every candidate once, then the promising ones in turn, then all that may be the best against each other.

    The first candidate is the heuristic: it is measured whatever the limits say, and keeps its place unless another is
    faster by more than the noise. The winner's results are checked once more, over poisoned memory; if they are wrong,
    the next best wins.

    After the first ones, each implementation's best guess comes before anyone's second, and then the candidates of the
    implementation that is the fastest so far. One that must be built is started when it is; what is open then goes on.

    A candidate is not started, and is recorded as dropped, if it is predicted not to run, or to take longer than
    another candidate took, by more than clocks exceed their rating (``PLAUSIBLE``). Nor is a candidate started whose
    implementation is slower than another by more than ``PRUNING_RATIO``.

    Args:
      predictions: of each candidate; that of the heuristic counts for nothing.
      known: candidates that an earlier tuning measured or saw fail; they are started when they are needed.
      emit: is called with events.
      record: is called with every candidate that is new or was found wrong.
      first: how many candidates come before all others, in their order.
      gate: which candidates can be started.

    Attributes:
      cut_short: whether the time ended before the winner could be checked once more.
      start_s: what candidates took to be compiled, checked and sampled once, on average: several are compiled at a
        time, and the first of them waits for all.
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
        gate: Gate | None = None,
    ):
        self._bench, self._configs, self._limits, self._known = bench, configs, limits, known
        self._predictions = predictions
        self._emit, self._record = emit, record
        self._first, self._gate = first, gate or OpenGate()
        self._found: dict[int, Candidate] = {}
        self._started: set[int] = set()
        # Candidates whose only sample was taken alone, right after the first run.
        self._alone: set[int] = set()
        self._repeats_to = Timer.repeats_to
        self._starting_s: list[float] = []
        self._ahead: set[int] = set()
        self.cut_short = False

    @property
    def found(self) -> list[Candidate]:
        """The candidates of which something is known, in their order."""
        return [self._found[index] for index in sorted(self._found)]

    @property
    def start_s(self) -> float:
        return sum(self._starting_s) / max(1, len(self._ahead), len(self._starting_s))

    @property
    def is_waiting(self) -> bool:
        """Tells if a candidate of which nothing is known may still be built."""
        return any(not self._gate.is_open(i) and not self._gate.refusal(i) for i in self._unknown())

    @property
    def can_explore(self) -> bool:
        """Tells if a candidate of which nothing is known can be started."""
        return any(self._gate.is_open(i) for i in self._unknown())

    def run(self) -> int | None:
        """The index of the winner; ``None`` if no candidate was found right."""
        self.explore()
        return self.decide()

    def explore(self) -> None:
        """Starts every candidate that can be, the most promising first, as long as there is time."""
        while not self._limits.cancelled():
            best = self._best_of_families()
            open_now = self._in_order([i for i in self._unknown() if self._gate.is_open(i)], best)
            if not open_now:
                return
            # What was compiled beside others is only to be measured.
            may = self._limits.may_go_on if open_now[0] in self._ahead else self._limits.may_start
            if open_now[0] and not may():
                return
            self._look_at(open_now, best)

    def decide(self) -> int | None:
        """The index of the winner among what was started; what was not is left out."""
        eligible = self._eligible()
        if eligible:
            self._search(self._promising(eligible) if len(eligible) > 1 else eligible)
        while eligible := self._eligible():
            chosen = self._winner(eligible)
            if self._stands(chosen):
                break
        for index in self._unknown():
            self._leave_out(index)
        return chosen if eligible else None

    def _unknown(self) -> list[int]:
        return [index for index in range(len(self._configs)) if index not in self._found]

    def _in_order(self, indices: Sequence[int], families: Mapping[str, float]) -> list[int]:
        """The most promising first; of an implementation of which nothing is known, one alone."""

        def place(index: int) -> tuple[float, int]:
            if index < self._first:
                return -1.0, index
            return families.get(self._predictions[index].family, 0.0), index

        ordered = sorted(indices, key=place)
        guesses, seen = [], set(families)
        for index in ordered:
            family = self._predictions[index].family
            if index < self._first or family not in seen:
                guesses.append(index)
            seen.add(family)
        return guesses or ordered

    def _look_at(self, ordered: Sequence[int], best: Mapping[str, float]) -> None:
        """Starts the first of some candidates, or says why that is not needed."""
        index = ordered[0]
        if index in self._known:
            self._found[index] = dataclasses.replace(self._known[index], heuristic=index == 0)
        elif why := self._hopeless(index, best):
            self._found[index] = Candidate(self._configs[index], (), "dropped", why)
        else:
            ahead = [i for i in ordered if i not in self._known and not self._hopeless(i, best)]
            self._ahead.update(self._bench.expect(ahead[: self._affordable()]))
            self._emit(CandidateStarted(index, self._configs[index]))
            self._found[index] = self._candidate(index, self._start(index))
            self._record(self._found[index])
        self._tell(index)

    def _affordable(self) -> int | None:
        """How many candidates can be started in the time that is left, by what those before took; at least one.

        Of those that come first, of which there is one for each implementation, all: compiled beside each other they
        take little more than one.
        """
        left = self._limits.seconds_left()
        return max(1, int(left / self.start_s)) if self._starting_s and math.isfinite(left) else None

    def _leave_out(self, index: int) -> None:
        refusal = self._gate.refusal(index)
        if refusal:
            why = f"its build failed: {refusal}"
        elif self._gate.is_open(index):
            why = "there was no time left to measure it"
        else:
            why = "there was no time left to build it"
        self._found[index] = Candidate(self._configs[index], (), "left out", why, heuristic=index == 0)
        self._emit(CandidateLeftOut(index, self._configs[index], why))

    def _best_of_families(self) -> dict[str, float]:
        """The least time of each family so far."""
        best: dict[str, float] = {}
        for i in self._eligible():
            family = self._predictions[i].family
            best[family] = min(self._time(i), best.get(family, math.inf))
        return best

    def _hopeless(self, index: int, families: Mapping[str, float]) -> str:
        """Why a candidate need not be started, by the best of each family; empty if it must be."""
        prediction, best = self._predictions[index], min(families.values(), default=math.inf)
        if index == 0:
            return ""
        if prediction.refusal:
            return f"it cannot run: {prediction.refusal}"
        if PLAUSIBLE * prediction.min_ms <= (1 + EARLY_NOISE) * best:
            mine = families.get(prediction.family, 0.0) if prediction.family else 0.0
            if mine <= PRUNING_RATIO * best:
                return ""
            return (
                f"the best of {prediction.family} so far took {mine:.4g} ms, and another implementation {best:.4g} ms"
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
        self._started.add(index)
        self._alone.add(index)
        return Candidate(config, (trial.sample_ms,), trial.check, "", heuristic)

    def _impossible(self, sample_ms: float) -> str:
        """Why a sample cannot be true; empty if it can."""
        if not (math.isfinite(sample_ms) and sample_ms > 0):
            return f"the clock is broken: a call took {sample_ms} ms"
        if sample_ms < PLAUSIBLE * self._limits.bound_ms:
            return (
                f"the clock is broken: a call took {sample_ms:.4g} ms, and its arithmetic and memory traffic take "
                f"{self._limits.bound_ms:.4g} ms at the device's peak rates"
            )
        return ""

    def _tell(self, index: int) -> None:
        candidate = self._found[index]
        if candidate.dropped:
            self._emit(CandidateDropped(index, candidate.config, candidate.error))
            return
        if not candidate.eligible:
            self._emit(CandidateFailed(index, candidate.config, candidate.error))
            return
        self._emit(
            CandidateMeasured(index, candidate.config, self._time(index), min(map(self._time, self._eligible())))
        )

    def _eligible(self) -> list[int]:
        return [i for i, candidate in sorted(self._found.items()) if candidate.eligible]

    def _time(self, index: int) -> float:
        time_ms = self._found[index].time_ms
        return math.inf if time_ms is None else time_ms

    def _noise(self, one: int, other: int) -> float:
        """By how much the medians of two candidates may differ and mean nothing."""
        slower = max(self._time(one), self._time(other))
        return max(self._found[one].noise_ms + self._found[other].noise_ms, self._repeats_to * slower)

    def _promising(self, eligible: Sequence[int]) -> list[int]:
        best = min(map(self._time, eligible))
        return [i for i in eligible if self._time(i) <= HOPELESS * best or i == 0]

    def _search(self, alive: Sequence[int]) -> None:
        taken = 0
        while taken < self._limits.iters and self._limits.may_go_on():
            exhaustive = self._limits.search == "exhaustive"
            count = self._limits.iters - taken if exhaustive else min(max(1, taken), self._limits.iters - taken)
            alive = self._rounds(alive, count)
            taken += count
            if not exhaustive and len(alive) > 2:
                alive = self._better_half(alive)

    def _rounds(self, indices: Sequence[int], count: int) -> list[int]:
        """Samples candidates in turn, every second round backwards; returns those that went through all of it."""
        alive = list(indices)
        for number in range(count):
            if number and not self._limits.may_go_on():
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
        """Takes one more sample; whether it could be taken."""
        try:
            if not self._is_started(index):
                return False
            sample = self._bench.sample_ms(index)
        except OutOfTimeError:
            return False
        except CandidateError as error:
            return self._fail(index, str(error))
        impossible = self._impossible(sample)
        if impossible:
            return self._fail(index, impossible)
        kept = () if index in self._alone else self._found[index].samples_ms
        self._alone.discard(index)
        self._found[index] = dataclasses.replace(self._found[index], samples_ms=(*kept, sample))
        return True

    def _is_started(self, index: int) -> bool:
        """Starts a candidate that an earlier tuning had measured.

        Raises:
          OutOfTimeError: there is no time for that.
        """
        if index not in self._started:
            self._emit(CandidateStarted(index, self._configs[index]))
            trial = self._start(index)
            if trial.check == "left out":
                raise OutOfTimeError(trial.error)
            if trial.error:
                return self._fail(index, trial.error, trial.check)
            self._started.add(index)
        return True

    def _fail(self, index: int, error: str, check: str = "failed") -> bool:
        self._found[index] = dataclasses.replace(self._found[index], check=check, error=error)
        self._record(self._found[index])
        self._tell(index)
        return False

    def _winner(self, eligible: Sequence[int]) -> int:
        """The fastest, unless the heuristic is within the noise of it."""
        best = min(eligible, key=self._time)
        if best == 0:
            return 0
        near = [i for i in eligible if i == 0 or self._time(i) - self._time(best) <= self._noise(i, best)]
        if len(near) > 1 and self._limits.may_go_on():
            near = self._rounds(near, self._limits.iters) or near
            best = min((i for i in near if self._found[i].eligible), key=self._time, default=best)
        if 0 not in near or not self._found[0].eligible:
            return best
        return best if self._time(best) < self._time(0) - self._noise(0, best) else 0

    def _stands(self, index: int) -> bool:
        """Tells if a winner's results are right over poisoned memory, too, as far as there is time to see."""
        if not self._found[index].eligible:
            return False
        try:
            if not self._is_started(index):
                return False
            wrong = self._bench.recheck(index)
        except OutOfTimeError:  # what was measured is kept; its results were right once
            self.cut_short = True
            return True
        except CandidateError as error:
            wrong = [str(error)]
        return self._fail(index, "over poisoned memory: " + "; ".join(wrong)) if wrong else True
