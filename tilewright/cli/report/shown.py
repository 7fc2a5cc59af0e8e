"""The candidates of a call that a page shows, if all of them would be too many."""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from tilewright.cli.report.calls import ReportedCall
from tilewright.ops.kernel.candidates import Candidate

# Up to so many candidates a page shows all of them; of more, so many rows altogether, as far as three of each
# implementation are not more.
MAX_CANDIDATES = 2000
MAX_ROWS = 1500
FEWEST_OF_EACH, MAX_OF_EACH = 3, 20
# Different messages of one call that a page with many candidates shows.
MAX_MESSAGES = 8

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")


def implementation_of(candidate: Candidate) -> str:
    """The implementation that a candidate's config, in words, begins with; empty if it names none."""
    first = str(candidate.config).partition(" ")[0]
    return "" if "=" in first else first


def of_each_implementation(calls: Sequence[ReportedCall]) -> int | None:
    """The number of candidates of each implementation that a page shows of a call; ``None`` for all."""
    if sum(len(reported.call.candidates) for reported in calls) <= MAX_CANDIDATES:
        return None
    fields = sum(len(set(map(implementation_of, reported.measured))) for reported in calls)
    return max(FEWEST_OF_EACH, min(MAX_OF_EACH, MAX_ROWS // max(1, fields)))


@dataclasses.dataclass(frozen=True, slots=True)
class Shown:
    """The candidates of a call that a page shows.

    Attributes:
      ranked: those with a time, fastest first, with their places among all of the call.
      unmeasured: those without a time that have a row of their own.
      left_out: how many of each implementation have a time and no row.
      complete: whether this is all of the call.
    """

    ranked: tuple[tuple[int, Candidate], ...]
    unmeasured: tuple[Candidate, ...]
    left_out: dict[str, int]
    complete: bool

    @classmethod
    def of(cls, reported: ReportedCall, best: int | None) -> "Shown":
        """All of a call, or every implementation's best and what stands out: chosen, default and fastest."""
        ranked = tuple(enumerate(reported.measured, 1))
        if best is None:
            return cls(ranked, tuple(reported.unmeasured), {}, True)
        standing_out = {id(c) for c in (reported.chosen, reported.default, reported.fastest)}
        seen: Counter[str] = Counter()
        left_out: Counter[str] = Counter()
        kept = []
        for rank, candidate in ranked:
            name = implementation_of(candidate)
            # One that was found wrong takes no place of one that is right.
            seen[name] += candidate.eligible
            if id(candidate) in standing_out or (candidate.eligible and seen[name] <= best):
                kept.append((rank, candidate))
            else:
                left_out[name] += 1
        return cls(tuple(kept), (), dict(left_out), False)

    @property
    def candidates(self) -> list[Candidate]:
        """Those with a time."""
        return [candidate for _, candidate in self.ranked]


def by_message(candidates: Iterable[Candidate], *, alike: bool) -> list[list[Candidate]]:
    """Candidates with the same message together, in the order of the first of each.

    Args:
      alike: whether messages that differ in numbers alone are the same.
    """
    found: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        message = str(candidate.error)
        found.setdefault(_NUMBER.sub("0", message) if alike else message, []).append(candidate)
    return list(found.values())
