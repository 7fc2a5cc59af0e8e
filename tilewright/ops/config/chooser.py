"""The interface by which a config is chosen for a call, and the form of the choice."""

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
      step: the step of the chain that it came from: "explicit", "overlay", "lock", "agreed", "memory", "disk",
        "shipped", "autotune", "simulated", "nearest" or "heuristic".
      key: the key under which the call was looked up; empty for an explicit config.
      time_ms: the config's measured time, if there is one.
      detail: for people: which lock, which process decided and from which of its steps, or which shapes it was measured
        for and how far away they are.
      preferred: of the steps "nearest" and "heuristic", the config that they give if everything is built; ``None`` if
        it is this one.
    """

    config: Any
    step: str
    key: str = ""
    time_ms: float | None = None
    detail: str = ""
    preferred: Any = None


class ConfigChooser(abc.ABC):
    """Chooses the config of an invocation."""

    @abc.abstractmethod
    def choose(self, inv: Invocation[Any, Any], *, cfg: object = None, overrides: Overrides | None = None) -> Selection:
        """Returns the config of a call; may measure, if the policy allows it."""

    @abc.abstractmethod
    def lookup(self, inv: Invocation[Any, Any], *, cfg: object = None, overrides: Overrides | None = None) -> Selection:
        """Returns what ``choose`` would choose without measuring; has no side effects."""

    def state(self, op: str, overrides: Overrides) -> str:
        """A text that differs wherever another process may choose other configs for an op; empty if none can tell."""
        return ""

    @property
    @abc.abstractmethod
    def version(self) -> int:
        """A number that changes whenever an earlier choice might now come out differently."""
