"""The strategy against benches that say what the test wants; no clock, no device."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from tilewright.ops.config.tuner import Timer
from tilewright.ops.kernel.candidates import Candidate
from tilewright.ops.tuning.bench import Bench, CandidateError, OutOfTimeError, Trial
from tilewright.ops.tuning.candidate_search import CandidateSearch
from tilewright.ops.tuning.events import CandidateDone, CandidateStarted
from tilewright.ops.tuning.limits import Limits, Prediction

LIMITS = Limits(8, "halving", 0.0, lambda: True, lambda: True, lambda: False)


class Said(Bench):
    """Samples by candidate: a number, or an iterator whose exceptions are the candidate's."""

    def __init__(
        self,
        times: Sequence[Any],
        rechecks: dict[int, list[str] | str] | None = None,
        repeats_to: float = Timer.repeats_to,
    ):
        self._samples = [itertools.repeat(t) if isinstance(t, int | float) else iter(t) for t in times]
        self._rechecks = rechecks or {}
        self.ahead = 0
        self.compiled: Sequence[int] = ()
        self._repeats_to = repeats_to
        self.started: list[int] = []
        self.sampled: list[int] = []

    def prepare(self) -> None:
        pass

    def expect(self, indices: Sequence[int]) -> Sequence[int]:
        self.compiled = self.compiled or indices[: self.ahead]
        return self.compiled

    def start(self, index: int) -> Trial:
        self.started.append(index)
        try:
            return Trial("passed", "", self.sample_ms(index), repeats_to=self._repeats_to)
        except CandidateError as error:
            return Trial(error=str(error))

    def is_ready(self, index: int) -> bool:
        return index in self.started

    def sample_ms(self, index: int) -> float:
        self.sampled.append(index)
        said = next(self._samples[index])
        if isinstance(said, str):
            raise CandidateError(said)
        return said

    def recheck(self, index: int) -> list[str]:
        said = self._rechecks.get(index, [])
        if isinstance(said, str):
            raise CandidateError(said)
        return said

    def close(self) -> None:
        pass


def race(
    bench: Said,
    count: int,
    limits: Limits = LIMITS,
    known: dict[int, Candidate] | None = None,
    predictions: dict[int, Prediction] | None = None,
) -> Any:
    events: list[Any] = []
    run = CandidateSearch(
        bench,
        range(count),
        limits,
        predictions=[(predictions or {}).get(i, Prediction()) for i in range(count)],
        known=known or {},
        emit=events.append,
        record=lambda _: None,
    )
    return run.run(), run.found, events


def done(events: list[Any]) -> list[CandidateDone]:
    return [event for event in events if isinstance(event, CandidateDone)]


def noisy(generator: np.random.Generator, true_ms: float, spread: float = 0.01) -> Iterator[float]:
    while True:
        yield true_ms * float(generator.lognormal(0, spread))


@pytest.mark.parametrize(("repeats_to", "winner"), [(0.02, 0), (0.01, 1)])
def test_the_heuristic_stays_within_what_the_clock_repeats_to(repeats_to: float, winner: int):
    chosen, _, _ = race(Said([1.0, 0.985], repeats_to=repeats_to), 2)
    assert chosen == winner


@pytest.mark.parametrize("said", [["an element is NaN"], "an illegal address"], ids=["wrong", "crashes"])
def test_what_does_not_stand_over_poisoned_memory_does_not_win(said: Any):
    chosen, found, _ = race(Said([2.0, 1.0, 1.5], {1: said}), 3)
    assert chosen == 2
    assert found[1].error == "over poisoned memory: " + (said if isinstance(said, str) else said[0])


class EndsEarly(Said):
    """The time ends before a sample beyond the first, or before the winner is checked once more."""

    def __init__(self, times: Sequence[Any], after: int):
        super().__init__(times)
        self._after = after

    def sample_ms(self, index: int) -> float:
        if len(self.sampled) >= self._after:
            raise OutOfTimeError("there was no time left to measure it")
        return super().sample_ms(index)

    def recheck(self, index: int) -> list[str]:
        raise OutOfTimeError("there was no time left to measure it")


@pytest.mark.parametrize("after", [3, 4, 1000])
def test_nothing_measured_is_lost_when_the_time_ends(after: int):
    bench = EndsEarly([2.0, 1.0, 3.0], after)
    run = CandidateSearch(
        bench, range(3), LIMITS, predictions=[Prediction()] * 3, known={}, emit=lambda _: None, record=lambda _: None
    )
    assert run.run() == 1
    assert run.cut_short
    assert [candidate.check for candidate in run.found] == ["passed"] * 3
    assert all(not candidate.error for candidate in run.found)


def test_what_an_earlier_tuning_measured_is_kept_when_there_is_no_time_to_start_it():
    class NothingStarts(Said):
        def start(self, index: int) -> Trial:
            return Trial("left out", "there was no time left to measure it")

    known = {
        index: Candidate(index, (time_ms,), "passed", heuristic=index == 0) for index, time_ms in enumerate((2, 1))
    }
    chosen, found, _ = race(NothingStarts([]), 2, known=known)
    assert chosen == 1
    assert [candidate.check for candidate in found] == ["passed", "passed"]


@pytest.mark.parametrize(
    ("times", "wrong", "winner"),
    [
        ([2.0, 1.0, 3.0, 1.5], (), 1),
        ([1.0, [0.5] * 5 + [4.0] * 99], (), 0),  # it becomes slow
        ([1.0, 1.2], (0,), 1),  # the heuristic has to be right as well
        ([1.0, 0.5, 0.6], (1,), 2),  # what leaves elements out is replaced by the next
        ([1.0, 0.5], (0, 1), None),
    ],
)
def test_the_fastest_that_is_right_wins(times: list[Any], wrong: tuple[int, ...], winner: int | None):
    chosen, found, _ = race(Said(times, {index: ["non-finite values"] for index in wrong}), len(times))
    assert chosen == winner
    assert [c.heuristic for c in found] == [True] + [False] * (len(times) - 1)
    assert {i: c.error for i, c in enumerate(found) if c.error} == dict.fromkeys(
        wrong, "over poisoned memory: non-finite values"
    )


def test_what_is_fast_in_its_first_run_alone_does_not_win():
    chosen, found, _ = race(Said([1.0, itertools.chain([0.1], itertools.repeat(1.3))]), 2)
    assert chosen == 0
    assert 0.1 not in found[1].samples_ms


def test_a_failure_while_it_is_sampled_is_the_candidates_own():
    chosen, found, events = race(Said([1.0, iter([0.5, 0.5, "an illegal address"]), 0.7]), 3)
    assert chosen == 2
    assert found[1].error == "an illegal address"
    assert [(e.index, e.candidate.error) for e in done(events) if e.candidate.failed] == [(1, "an illegal address")]


def test_a_sample_that_cannot_be_true_is_not_believed():
    limits = dataclasses.replace(LIMITS, bound_ms=0.5)
    chosen, found, _ = race(Said([1.0, 0.4, 0.6, iter([0.7, 0.7, 0.01])]), 4, limits)
    assert chosen == 2
    assert [bool(c.error) for c in found] == [False, True, False, True]
    assert "take 0.5 ms at the device's peak rates" in found[1].error
    assert race(Said([1.0, 0.46]), 2, limits)[0] == 1  # rated peaks are not exact


def test_nobody_drops_out_within_the_noise():
    generator = np.random.default_rng(3)
    times = [2.0, *(1.0 + 0.002 * i for i in range(6)), 1.4]
    _, found, _ = race(Said([noisy(generator, t) for t in times]), len(times))
    assert all(len(c.samples_ms) >= LIMITS.iters for c in found[1:7])
    assert len(found[7].samples_ms) < LIMITS.iters


class TestResuming:
    KNOWN: ClassVar[dict[int, Candidate]] = {
        0: Candidate(0, (1.0, 1.0), "passed"),
        1: Candidate(1, (0.5,), "passed"),
        2: Candidate(2, (9.0,), "passed"),
        3: Candidate(3, (), "unchecked", "it died"),
    }

    def test_only_what_may_win_is_started_again(self):
        bench = Said([1.0, 0.5, 9.0, 0.1, 0.7])
        chosen, found, events = race(bench, 5, known=self.KNOWN)
        assert chosen == 1
        assert set(bench.started) == {0, 1, 4}
        assert found[0].heuristic
        assert found[3].error == "it died"
        assert {e.index for e in events if isinstance(e, CandidateStarted)} == {0, 1, 4}

    def test_what_fails_now_is_out(self):
        assert race(Said([1.0, iter(["gone"]), 9.0, 0.1, 0.7]), 5, known=self.KNOWN)[0] == 4


class TestDropping:
    """What need not be started: what cannot run, and what takes longer than another took."""

    def test_what_cannot_run_is_recorded_and_not_started(self):
        bench = Said([1.0, 0.1, 0.5])
        chosen, found, events = race(bench, 3, predictions={1: Prediction("no room for it")})
        assert chosen == 2
        assert bench.started == [0, 2]
        assert (found[1].check, found[1].error, found[1].dropped, found[1].failed) == (
            "dropped", "it cannot run: no room for it", True, False,
        )  # fmt: skip
        dropped = [(e.index, e.candidate.error) for e in done(events) if e.candidate.dropped]
        assert dropped == [(1, found[1].error)]
        assert not any(e.candidate.failed for e in done(events))

    def test_what_cannot_be_the_fastest_is_not_started(self):
        bench = Said([1.0, 2.0, 0.9])
        predictions = {1: Prediction("", 1.5), 2: Prediction("", 0.8)}
        assert race(bench, 3, predictions=predictions)[0] == 2
        assert bench.started == [0, 2]

    def test_only_what_was_measured_before_counts(self):
        bench = Said([3.0, 2.0, 1.0, 2.0])
        found = race(bench, 4, predictions={1: Prediction("", 1.5), 3: Prediction("", 1.5)})[1]
        assert bench.started == [0, 1, 2]
        assert found[3].error == "it takes 1.5 ms at the least at the device's peak rates, and another took 1 ms"

    def test_a_bound_within_what_clocks_and_first_samples_may_be_off_drops_nobody(self):
        bench = Said([1.0, 0.99])
        race(bench, 2, predictions={1: Prediction("", 1.17)})
        assert bench.started == [0, 1]
        bench = Said([1.0, 0.99])
        race(bench, 2, predictions={1: Prediction("", 1.18)})
        assert bench.started == [0]

    def test_an_implementation_far_behind_is_given_up(self):
        families = {i: Prediction(family="fast" if i in (0, 3) else "slow") for i in range(5)}
        bench = Said([1.0, 9.0, 1.0, 0.9, 0.1])
        chosen, found, _ = race(bench, 5, predictions=families)
        assert (chosen, bench.started) == (3, [0, 1, 3])
        assert found[2].error == "the best of slow so far took 9 ms, and another implementation 0.9 ms"
        assert found[2].dropped

    def test_an_implementation_that_tiles_may_bring_to_the_front_is_not(self):
        bench = Said([1.0, 5.9, 0.5])
        assert (
            race(
                bench,
                3,
                predictions={0: Prediction(family="one"), 1: Prediction(family="two"), 2: Prediction(family="two")},
            )[0]
            == 2
        )
        # Nor one that could not be measured, nor one without a name.
        bench = Said([1.0, iter(["gone"]), 9.0, 0.5])
        assert race(bench, 4, predictions={1: Prediction(family="two"), 3: Prediction(family="two")})[0] == 3

    def test_the_heuristic_is_measured_whatever_is_said_of_it(self):
        chosen, found, _ = race(Said([1.0, 2.0]), 2, predictions={0: Prediction("no room for it", 9.0)})
        assert chosen == 0
        assert found[0].check == "passed"

    def test_a_winner_whose_bound_is_right_is_never_dropped(self):
        """Bounds are anything up to the true time; the order is any."""
        generator = np.random.default_rng(0)
        for _ in range(50):
            times = generator.uniform(0.5, 3.0, 30)
            bounds = times * generator.uniform(0.0, 1.0, 30)
            predictions = {i: Prediction("", float(bound)) for i, bound in enumerate(bounds)}
            bench = Said([noisy(generator, t) for t in times])
            chosen, found, _ = race(bench, 30, predictions=predictions)
            assert not found[int(np.argmin(times))].dropped
            assert chosen == 0 or times[chosen] <= 1.05 * times.min()


def test_a_cancelled_race_starts_nothing():
    bench = Said([1.0, 0.5])
    stopped = dataclasses.replace(LIMITS, may_start=lambda: False, may_continue=lambda: False, cancelled=lambda: True)
    assert race(bench, 2, stopped)[0] is None
    assert not bench.started


def test_without_time_the_heuristic_is_measured_nevertheless():
    stopped = dataclasses.replace(LIMITS, may_start=lambda: False, may_continue=lambda: False)
    assert race(Said([1.0, 0.5]), 2, stopped)[0] == 0


def test_when_there_is_no_time_for_more_candidates_those_that_ran_are_still_told_apart():
    answers = iter([True, False])
    bench = Said([1.0, itertools.chain([0.1], itertools.repeat(1.3)), 0.5])
    chosen, found, _ = race(bench, 3, dataclasses.replace(LIMITS, may_start=lambda: next(answers)))
    assert chosen == 0
    assert bench.started == [0, 1]
    assert len(found[0].samples_ms) >= LIMITS.iters


def test_what_was_compiled_beside_others_is_measured_though_nothing_more_may_be_started():
    bench = Said([1.0, 0.5, 0.4, 0.1])
    bench.ahead = 3
    limits = dataclasses.replace(LIMITS, may_start=lambda: False)
    predictions = {i: Prediction(family=str(i)) for i in range(4)}
    chosen, found, _ = race(bench, 4, limits, predictions=predictions)
    assert (chosen, bench.started) == (2, [0, 1, 2])
    assert found[3].left_out


def test_each_implementations_best_guess_comes_first_and_then_the_fastest_ones_others():
    bench = Said([3.0, 2.5, 1.0, 2.0, 1.5, 0.9])
    families = {i: Prediction(family=family) for i, family in enumerate("aabbca")}
    assert race(bench, 6, predictions=families)[0] == 5
    assert bench.started == [0, 2, 4, 3, 1, 5]
