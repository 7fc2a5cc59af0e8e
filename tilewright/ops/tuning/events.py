"""The events of a tuning."""

import dataclasses
from collections.abc import Callable
from typing import Any

from tilewright.ops.config.results import TunedCall
from tilewright.ops.kernel.candidates import Candidate
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
    """A call is about to be tuned, or to be resumed after it waited for a build."""

    inv: Invocation[Any, Any]
    shapes: str
    num_candidates: int
    resumed: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class CandidateStarted:
    """A candidate is about to be compiled and run."""

    index: int
    config: Any


@dataclasses.dataclass(frozen=True, slots=True)
class CandidateDone:
    """A candidate was measured, failed, or was not started: its ``check`` and its ``error`` tell.

    Attributes:
      best_ms: the shortest time so far, this candidate's included; ``None`` if there is none yet.
    """

    index: int
    candidate: Candidate
    best_ms: float | None


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
class BuildStarted:
    """A build, which takes minutes, was started in the background."""

    build: str


@dataclasses.dataclass(frozen=True, slots=True)
class BuildEnded:
    """A build was made, so that its candidates will be measured; or it failed, and they are left out."""

    build: str
    seconds: float
    error: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class BuildsLeft:
    """The tuning ended with unfinished builds, which continue: the next tuning finds them."""

    builds: tuple[str, ...]


type TuningEvent = (
    TuningStarted
    | CallStarted
    | CandidateStarted
    | CandidateDone
    | CallTuned
    | CallLeftOut
    | BuildStarted
    | BuildEnded
    | BuildsLeft
)
"""Every event of a tuning."""
