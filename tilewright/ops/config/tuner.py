"""Settings of a tuning's measurements, as given to a selection chain."""

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, get_args

Isolation = Literal["none", "process", "auto"]
Search = Literal["halving", "exhaustive"]


class Timer(abc.ABC):
    """Takes the timing samples of a tuning.

    Attributes:
      repeats_to: the relative repeatability of medians of interleaved samples on a quiet machine; it holds even if the
        spread of the samples is smaller.
    """

    repeats_to: ClassVar[float] = 0.02

    @abc.abstractmethod
    def calls(self, function: Callable[..., Any], args: Sequence[Any]) -> int:
        """The number of calls per sample that makes a sample reliable."""

    @abc.abstractmethod
    def sample_ms(self, function: Callable[..., Any], args: Sequence[Any], calls: int) -> float:
        """Takes one sample, in milliseconds per call."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tuner:
    """Settings of the measurements.

    Attributes:
      warmup: untimed calls of each candidate after its first.
      iters: timed samples of each candidate that has not been dropped.
      isolation: "process" runs candidates in a separate process, which is replaced when it crashes, hangs, leaks or
        loses its device; "none" runs them in this process; "auto" is "process" if the call can be sent to another
        process.
      timeout_s: seconds for one candidate to compile, run and be checked, or to be sampled; in a separate process only.
      search: see `Limits`.
      timer: takes the samples; by default the timer for the device.
    """

    warmup: int = 2
    iters: int = 5
    isolation: Isolation = "none"
    timeout_s: float = 120.0
    search: Search = "halving"
    timer: Timer | None = None

    def __post_init__(self) -> None:
        check_counts(warmup=(self.warmup, 0), iters=(self.iters, 1))
        for name, kind in (("isolation", Isolation), ("search", Search)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} must be one of {', '.join(map(repr, get_args(kind)))}"
                )
        number = isinstance(self.timeout_s, int | float) and not isinstance(self.timeout_s, bool)
        if not number or not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s={self.timeout_s!r} must be a positive number of seconds")
        if self.timer is not None and not isinstance(self.timer, Timer):
            raise TypeError(f"timer={self.timer!r} must be a Timer or None")


def check_counts(**counts: tuple[int, int]) -> None:
    """Raises unless each number is an integer of at least the second of its pair."""
    for name, (count, minimum) in counts.items():
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"{name}={count!r} must be an integer")
        if count < minimum:
            raise ValueError(f"{name}={count!r} must be at least {minimum}")
