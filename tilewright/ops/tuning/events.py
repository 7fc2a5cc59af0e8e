"""The events of a tuning."""

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
      num_calls: the number of calls to measure; the others are known.
      budget_s: seconds for the whole tuning; infinite without a limit.
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
    """A call that waited for a build is resumed."""

    inv: Invocation[Any, Any]
    num_candidates: int


@dataclasses.dataclass(frozen=True, slots=True)
class CandidateStarted:
    """A candidate is about to be compiled and run."""

    index: int
    config: Any


@dataclasses.dataclass(frozen=True, slots=True)
class CandidateMeasured:
    """A candidate ran; ``best_ms`` is the fastest time so far, including this one."""

    index: int
    config: Any
    time_ms: float
    best_ms: float


@dataclasses.dataclass(frozen=True, slots=True)
class CandidateFailed:
    """A candidate raised, was found wrong, or crashed its process."""

    index: int
    config: Any
    error: str


@dataclasses.dataclass(frozen=True, slots=True)
class CandidateDropped:
    """A candidate was not started: it cannot run, or cannot be the fastest."""

    index: int
    config: Any
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallTuned:
    """A call has a winner, measured now or known before."""

    call: TunedCall


@dataclasses.dataclass(frozen=True, slots=True)
class CallLeftOut:
    """A call was not measured at all: the budget ended first."""

    inv: Invocation[Any, Any]
    shapes: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class CandidateLeftOut:
    """A candidate was not measured for lack of time: the budget ended before it, or before its build."""

    index: int
    config: Any
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class BuildStarted:
    """A build, which takes minutes, was started in the background."""

    build: str


@dataclasses.dataclass(frozen=True, slots=True)
class BuildMade:
    """A build finished in time; its candidates will be measured."""

    build: str
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class BuildFailed:
    """A build failed; its candidates are left out."""

    build: str
    error: str


@dataclasses.dataclass(frozen=True, slots=True)
class BuildsLeft:
    """The tuning ended with unfinished builds, which continue: the next tuning finds them."""

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
"""Every event of a tuning."""
