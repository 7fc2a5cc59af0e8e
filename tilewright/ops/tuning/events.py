"""What a tuning says while it runs."""

import dataclasses
from collections.abc import Callable
from typing import Any

from tilewright.ops.config.results import TunedCall
from tilewright.ops.kernel.kernel import Invocation

Event = Callable[[Any], None]


@dataclasses.dataclass(frozen=True, slots=True)
class TuningStarted:
    """A tuning begins.

    Attributes:
      num_calls: calls that must be measured; others are known.
      budget_s: seconds that all of it may take; infinite where there is no limit.
    """

    num_calls: int
    budget_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class CallStarted:
    """A call is about to be tuned."""

    inv: Invocation[Any, Any]
    shapes: str
    num_candidates: int


@dataclasses.dataclass(frozen=True, slots=True)
class CallResumed:
    """A call that waited for a build goes on."""

    inv: Invocation[Any, Any]
    num_candidates: int


@dataclasses.dataclass(frozen=True, slots=True)
class CandidateStarted:
    """A candidate is about to be compiled and run."""

    index: int
    config: Any


@dataclasses.dataclass(frozen=True, slots=True)
class CandidateMeasured:
    """A candidate ran; ``best_ms`` is the fastest time so far, its own included."""

    index: int
    config: Any
    time_ms: float
    best_ms: float


@dataclasses.dataclass(frozen=True, slots=True)
class CandidateFailed:
    """A candidate raised, was found wrong, or took its process with it."""

    index: int
    config: Any
    error: str


@dataclasses.dataclass(frozen=True, slots=True)
class CandidateDropped:
    """A candidate need not be started: it cannot run, or cannot be the fastest."""

    index: int
    config: Any
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallTuned:
    """A call has its winner, measured now or known before."""

    call: TunedCall


@dataclasses.dataclass(frozen=True, slots=True)
class CallLeftOut:
    """A call was not measured at all: the budget ended before."""

    inv: Invocation[Any, Any]
    shapes: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class CandidateLeftOut:
    """A candidate was not measured, and may be the next time: the budget ended before it, or before its build."""

    index: int
    config: Any
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class BuildStarted:
    """A compiler that takes minutes was started beside the measurements."""

    build: str


@dataclasses.dataclass(frozen=True, slots=True)
class BuildMade:
    """It came to its end in time; its candidates are measured."""

    build: str
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class BuildFailed:
    """It failed; its candidates are left out."""

    build: str
    error: str


@dataclasses.dataclass(frozen=True, slots=True)
class BuildsLeft:
    """The tuning has ended, and these go on by themselves: the next one finds them."""

    builds: tuple[str, ...]


type TuningEvent = (
    TuningStarted
    | CallStarted
    | CallResumed
    | CandidateStarted
    | CandidateMeasured
    | CandidateFailed
    | CandidateDropped
    | CallTuned
    | CallLeftOut
    | CandidateLeftOut
    | BuildStarted
    | BuildMade
    | BuildFailed
    | BuildsLeft
)
"""All that a tuning says."""
