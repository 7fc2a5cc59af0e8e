"""Plain data of a tuning: configs of a call and their measurements."""

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
        """Half the distance between the quartiles: a smaller difference of two medians is not significant."""
        if len(self.samples_ms) < 3:
            return max(self.samples_ms) - min(self.samples_ms)
        low, _, high = statistics.quantiles(self.samples_ms, n=4, method="inclusive")
        return (high - low) / 2


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """One config of one call.

    Attributes:
      samples_ms: milliseconds per call; empty if it never ran.
      check: "passed"; "failed"; "unchecked" if the kernel has no reference; "dropped" if it was never started, because
        it cannot run or cannot be the fastest; or "left out" if there was no time to start or to build it.
      error: the message of its exception, the finding of its check, or the reason why it was not started; else empty.
      heuristic: True for the config that would run without tuning.
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
        """The median of the samples."""
        return statistics.median(self.samples_ms) if self.samples_ms else None

    @property
    def noise_ms(self) -> float:
        return Timing(self.samples_ms).noise_ms if self.samples_ms else 0.0

    @property
    def eligible(self) -> bool:
        """True if it ran, was measured and was not found wrong."""
        return bool(self.samples_ms) and not self.error

    @property
    def dropped(self) -> bool:
        """True if it was never started, for the reason in ``error``."""
        return self.check in ("dropped", "left out")

    @property
    def left_out(self) -> bool:
        """True if it was not measured for lack of time, and so might be the fastest."""
        return self.check == "left out"

    @property
    def failed(self) -> bool:
        """True if it was started and raised, or was found wrong."""
        return bool(self.error) and not self.dropped

    def fields(self) -> dict[str, Any]:
        """The fields that can be sent to another process."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "exception"}

    def as_json(self) -> dict[str, Any]:
        return self.fields() | {"config": tagged(self.config), "samples_ms": list(self.samples_ms)}

    @classmethod
    def of_json(cls, payload: dict[str, Any]) -> "Candidate":
        return cls(
            **(
                payload
                | {"config": untagged(payload["config"]), "samples_ms": tuple(map(float, payload["samples_ms"]))}
            )
        )


def kind_of(config: object) -> str:
    """The backend that a config names; empty if it names none."""
    backend = getattr(config, "backend", "")
    return backend if type(backend) is str else ""  # of a `KernelConfig` it is a kind of hardware
