"""A clock for tunings that says what a test wants."""

from typing import Any

import jax
import pytest

from tilewright.ops.tuning import timing, workload


class Clock(dict[Any, Any]):
    """Milliseconds of a call, or several that are taken in turn, by the candidate: its ``block``, or all of its config.

    Attributes:
      samples: of which candidate each sample was, in order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.samples: list[Any] = []
        self._compiled: dict[int, tuple[Any, Any]] = {}  # with the function, whose id would be taken again
        self._compile = workload.Workload.compile
        monkeypatch.setattr(workload.Workload, "compile", lambda *args: self._remember(*args))
        monkeypatch.setattr(timing, "sample_ms", self._sample)

    def _remember(self, work: Any, config: Any, *turn: Any) -> Any:
        function = self._compile(work, config, *turn)
        self._compiled[id(function)] = getattr(config, "block", config), function
        return function

    def _sample(self, function: Any, args: Any, calls: int) -> float:
        jax.block_until_ready(function(*args))
        candidate, _ = self._compiled[id(function)]
        self.samples.append(candidate)
        said = self[candidate]
        return said[(self.samples.count(candidate) - 1) % len(said)] if isinstance(said, tuple) else said


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)
