"""Replays a recorded tuning without its device: what another search would have found, with how many samples."""

import dataclasses
from collections.abc import Sequence

from tilewright.ops.config.results import TunedCall
from tilewright.ops.config.tuner import Search
from tilewright.ops.kernel.candidates import Candidate
from tilewright.ops.tuning.bench import Bench, CandidateError, Trial
from tilewright.ops.tuning.candidate_search import CandidateSearch
from tilewright.ops.tuning.limits import Limits, Prediction


class RecordedBench(Bench):
    """The samples of a tuning in the order in which they were taken, repeated from the start if more are needed.

    Attributes:
      samples: the number of samples taken, first ones included.
    """

    def __init__(self, candidates: Sequence[Candidate]):
        self._candidates = candidates
        self._next = [0] * len(candidates)
        self.samples = 0

    def prepare(self) -> None:
        pass

    def expect(self, indices: Sequence[int]) -> Sequence[int]:
        return ()

    def start(self, index: int) -> Trial:
        candidate = self._candidates[index]
        if not candidate.eligible:
            return Trial(candidate.check, candidate.error)
        return Trial(candidate.check, "", self.sample_ms(index))

    def is_ready(self, index: int) -> bool:
        return True

    def sample_ms(self, index: int) -> float:
        recorded = self._candidates[index].samples_ms
        if not recorded:
            raise CandidateError(self._candidates[index].error)
        sample = recorded[self._next[index] % len(recorded)]
        self._next[index] += 1
        self.samples += 1
        return sample

    def recheck(self, index: int) -> list[str]:
        return []

    def close(self) -> None:
        pass


def replay(call: TunedCall, search: Search = "halving", *, iters: int = 5) -> tuple[TunedCall, int]:
    """Runs a search on the recorded samples of a call; returns the result and the number of samples.

    Raises:
      ValueError: no recorded candidate was found right.
    """
    bench = RecordedBench(call.candidates)
    limits = Limits(iters, search, 0.0, lambda: True, lambda: True, lambda: False)
    search_run = CandidateSearch(
        bench,
        [candidate.config for candidate in call.candidates],
        limits,
        predictions=[Prediction()] * len(call.candidates),
        known={i: candidate for i, candidate in enumerate(call.candidates) if candidate.dropped},
        emit=lambda _: None,
        record=lambda _: None,
    )
    chosen = search_run.run()
    if chosen is None:
        raise ValueError(f"no candidate of {call.op} ({call.direction}) was found right")
    found = dataclasses.replace(call, candidates=tuple(search_run.found), chosen=chosen)
    return found, bench.samples
