"""The limits of a search, and predictions about candidates before they run."""

import dataclasses
import math
from collections.abc import Callable

from tilewright.ops.config.tuner import Search


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a candidate search.

    Attributes:
      iters: samples of each candidate that is not dropped.
      search: "halving" drops the slower half, allowing for noise, whenever the number of samples has doubled;
        "exhaustive" samples every candidate within ``RESAMPLE_RATIO`` of the best to the end.
      bound_ms: a lower bound of the call's time on this kind of device; 0 if unknown.
      may_start: True while there is time to start candidates that have not run yet.
      may_continue: True while there is time to take samples.
      cancelled: True once the user has interrupted; then not even the heuristic is started.
      seconds_left: time in which candidates can be started; compiling ahead is limited to those that fit.
      is_open: True for the index of a candidate that can be started now: everything that it needs is built.
      refusal: the reason why the candidate of an index will not be built; empty if it is, or may be.
    """

    iters: int
    search: Search
    bound_ms: float
    may_start: Callable[[], bool]
    may_continue: Callable[[], bool]
    cancelled: Callable[[], bool]
    seconds_left: Callable[[], float] = lambda: math.inf
    is_open: Callable[[int], bool] = lambda index: True
    refusal: Callable[[int], str] = lambda index: ""


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """Facts about a candidate before it is compiled.

    Attributes:
      refusal: the reason why it cannot run; empty if none is known.
      min_ms: a lower bound of the call's time with it; 0 if unknown.
      family: the same for all candidates of one implementation; empty if unknown.
    """

    refusal: str = ""
    min_ms: float = 0.0
    family: str = ""
