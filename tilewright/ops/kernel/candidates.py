"""Configs of a call and what was measured of them: the plain data of a tuning."""

import dataclasses
import statistics
from typing import Any

from tilewright.ops.utils.serialize import tagged, untagged


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """Samples of one function in milliseconds per call."""

    samples_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.samples_ms)

    @property
    def noise_ms(self) -> float:
        """Half the distance between the quartiles: what two medians must differ by to mean anything."""
        if len(self.samples_ms) < 3:
            return max(self.samples_ms) - min(self.samples_ms)
        low, _, high = statistics.quantiles(self.samples_ms, n=4, method="inclusive")
        return (high - low) / 2


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """One config of one call.

    Attributes:
      samples_ms: milliseconds per call; empty if it never ran.
      check: "passed", "failed", "unchecked" where the kernel has no reference, "dropped" if it was never started: it
        cannot run, or cannot be the fastest; or "left out" if there was no time to start it, or to build it.
      error: the message of its exception, what its check found, or why it was not started; empty if all was well.
      heuristic: whether it is what would run without tuning.
      exception: the exception itself; not kept by JSON.
    """

    config: Any
    samples_ms: tuple[float, ...] = ()
    check: str = "unchecked"
    error: str = ""
    heuristic: bool = False
    exception: Exception | None = dataclasses.field(default=None, compare=False)

    @property
    def time_ms(self) -> float | None:
        """The median of its samples."""
        return statistics.median(self.samples_ms) if self.samples_ms else None

    @property
    def noise_ms(self) -> float:
        return Timing(self.samples_ms).noise_ms if self.samples_ms else 0.0

    @property
    def eligible(self) -> bool:
        """Whether it ran, was measured and was not found wrong."""
        return bool(self.samples_ms) and not self.error

    @property
    def dropped(self) -> bool:
        """Whether it was never started, for the reason in ``error``."""
        return self.check in ("dropped", "left out")

    @property
    def left_out(self) -> bool:
        """Tells if it was not measured for want of time, and may be the fastest for all that is known."""
        return self.check == "left out"

    @property
    def failed(self) -> bool:
        """Whether it was started and did not come to a time, or was found wrong."""
        return bool(self.error) and not self.dropped

    def fields(self) -> dict[str, Any]:
        """All that another process can be told."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "exception"}

    def as_json(self) -> dict[str, Any]:
        return self.fields() | {"config": tagged(self.config), "samples_ms": list(self.samples_ms)}

    @classmethod
    def of_json(cls, said: dict[str, Any]) -> "Candidate":
        return cls(**(said | {"config": untagged(said["config"]), "samples_ms": tuple(map(float, said["samples_ms"]))}))


def kind_of(config: object) -> str:
    """The implementation that a config names; empty if it names none."""
    return str(getattr(config, "implementation", ""))
