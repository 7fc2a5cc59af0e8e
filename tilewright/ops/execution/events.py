"""What a tuning says while it runs."""

import dataclasses
from collections.abc import Callable
from typing import Any

from tilewright.ops.core.kernel import Invocation
from tilewright.ops.execution.results import TunedCall

Event = Callable[[Any], None]


@dataclasses.dataclass(frozen=True, slots=True)
class CallStarted:
    """A call is about to be tuned."""

    inv: Invocation[Any, Any]
    shapes: str
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
