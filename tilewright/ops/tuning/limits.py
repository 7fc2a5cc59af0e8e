"""What bounds a search, and what it knows of candidates before they run."""

import abc
import dataclasses
import math
from collections.abc import Callable

from tilewright.ops.config.tuner import Search


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a race.

    Attributes:
      iters: samples of each candidate that stays in it.
      search: "halving" drops the slower half, noise allowed for, whenever the number of samples has doubled;
        "exhaustive" samples all that are not hopeless to the end.
      bound_ms: no device of the kind computes the call in less; 0 if nothing is known.
      may_start: whether there is time left to start candidates that have not run yet.
      may_go_on: whether there is time left.
      cancelled: whether the user has had enough; then not even the heuristic is started.
      seconds_left: for candidates to be started in; nothing is compiled ahead that would not be measured by then.
    """

    iters: int
    search: Search
    bound_ms: float
    may_start: Callable[[], bool]
    may_go_on: Callable[[], bool]
    cancelled: Callable[[], bool]
    seconds_left: Callable[[], float] = lambda: math.inf


class Gate(abc.ABC):
    """Tells which candidates can be started now, where some must be built first."""

    @abc.abstractmethod
    def is_open(self, index: int) -> bool:
        """Tells if a candidate can be started."""

    @abc.abstractmethod
    def refusal(self, index: int) -> str:
        """Why a candidate will not be built; empty if it is, or may be."""


class OpenGate(Gate):
    """The gate where nothing must be built."""

    def is_open(self, index: int) -> bool:
        return True

    def refusal(self, index: int) -> str:
        return ""


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """What is known of a candidate before it is compiled.

    Attributes:
      refusal: why it cannot run; empty if nothing is known against it.
      min_ms: the call takes no less with it; 0 if nothing is known.
      family: candidates of one implementation have the same; empty if nothing is known.
    """

    refusal: str = ""
    min_ms: float = 0.0
    family: str = ""
