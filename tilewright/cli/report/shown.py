"""Selects the candidates of a call that a page shows, if there are too many to read."""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from tilewright.cli.report.calls import ReportedCall
from tilewright.ops.kernel.candidates import Candidate

# A page shows all candidates up to MAX_CANDIDATES. Beyond that it shows MAX_ROWS in total, but at least MIN_OF_EACH of
# each implementation.
MAX_CANDIDATES = 2000
MAX_ROWS = 1500
MIN_OF_EACH, MAX_OF_EACH = 3, 20
# Number of different messages of one call on a page with many candidates.
MAX_MESSAGES = 8

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")


def implementation_of(candidate: Candidate) -> str:
    """The implementation at the beginning of a candidate's config text; empty if it names none."""
    first = str(candidate.config).partition(" ")[0]
    return "" if "=" in first else first


def rows_per_implementation(calls: Sequence[ReportedCall]) -> int | None:
    """The number of candidates of each implementation of each call that a page shows; ``None`` for all."""
    if sum(len(reported.call.candidates) for reported in calls) <= MAX_CANDIDATES:
        return None
    fields = sum(len(set(map(implementation_of, reported.measured))) for reported in calls)
    return max(MIN_OF_EACH, min(MAX_OF_EACH, MAX_ROWS // max(1, fields)))


@dataclasses.dataclass(frozen=True, slots=True)
class Shown:
    """The candidates of a call that a page shows.

    Attributes:
      ranked: candidates with a time, fastest first, with their rank among all candidates of the call.
      unmeasured: candidates without a time that have a row of their own.
      left_out: for each implementation the number of candidates with a time and without a row.
      complete: True if these are all candidates of the call.
    """

    ranked: tuple[tuple[int, Candidate], ...]
    unmeasured: tuple[Candidate, ...]
    left_out: dict[str, int]
    complete: bool

    @classmethod
    def of(cls, reported: ReportedCall, best: int | None) -> "Shown":
        """All candidates of a call, or the best of each implementation plus the chosen, default and fastest ones."""
        ranked = tuple(enumerate(reported.measured, 1))
        if best is None:
            return cls(ranked, tuple(reported.unmeasured), {}, True)
        always_shown = {id(c) for c in (reported.chosen, reported.default, reported.fastest)}
        num_shown: Counter[str] = Counter()
        left_out: Counter[str] = Counter()
        kept = []
        for rank, candidate in ranked:
            name = implementation_of(candidate)
            # A candidate that was found wrong takes no row from one that is right.
            num_shown[name] += candidate.eligible
            if id(candidate) in always_shown or (candidate.eligible and num_shown[name] <= best):
                kept.append((rank, candidate))
            else:
                left_out[name] += 1
        return cls(tuple(kept), (), dict(left_out), False)

    @property
    def candidates(self) -> list[Candidate]:
        """The candidates with a time."""
        return [candidate for _, candidate in self.ranked]


def by_message(candidates: Iterable[Candidate], *, ignore_numbers: bool) -> list[list[Candidate]]:
    """Groups candidates by message, in order of first appearance.

    Args:
      alike: treat messages that differ only in numbers as the same.
    """
    found: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        message = str(candidate.error)
        found.setdefault(_NUMBER.sub("0", message) if ignore_numbers else message, []).append(candidate)
    return list(found.values())
