"""What every choice of a config looks like, and whatever can make one."""

import abc
import dataclasses
from typing import Any

from tilewright.ops.config.context import Overrides
from tilewright.ops.kernel.kernel import Invocation


@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
    """A chosen config.

    Attributes:
      config: the config.
      step: where it came from: "explicit", "overlay", "lock", "memory", "disk", "shipped", "autotune", "nearest" or
        "heuristic".
      key: the key under which the call was looked up; empty for an explicit config.
      time_ms: its measured time, if there is one.
      detail: for people: which lock, or which shapes it was measured for and how far these are.
    """

    config: Any
    step: str
    key: str = ""
    time_ms: float | None = None
    detail: str = ""


class ConfigChooser(abc.ABC):
    """Whatever can pick the config of an invocation."""

    @abc.abstractmethod
    def choose(self, inv: Invocation[Any, Any], *, cfg: object = None, overrides: Overrides | None = None) -> Selection:
        """The config of a call; may measure, if the policy lets it."""

    @abc.abstractmethod
    def lookup(self, inv: Invocation[Any, Any], *, cfg: object = None, overrides: Overrides | None = None) -> Selection:
        """What ``choose`` would return if nothing could be measured, without leaving a trace."""

    @property
    @abc.abstractmethod
    def version(self) -> int:
        """A number that changes when an earlier choice might now come out differently."""
