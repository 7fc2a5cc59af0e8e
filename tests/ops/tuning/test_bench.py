"""What is compiled beside what is measured, and what is not."""

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tilewright.ops.config.tuner import Timer
from tilewright.ops.tuning.bench import LocalBench
from tilewright.ops.tuning.device_lock import DeviceLock


class Device:
    """Says who used it together with whom."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: list[str] = []
        self.together: set[frozenset[str]] = set()
        self.most = 0

    @contextlib.contextmanager
    def used(self, who: str) -> Any:
        with self._lock:
            self._users.append(who)
            self.together.add(frozenset(self._users))
            self.most = max(self.most, self._users.count("compiler"))
        try:
            time.sleep(0.01)
            yield
        finally:
            with self._lock:
                self._users.remove(who)


class Work:
    """A workload whose compiler runs things on the device, as XLA's does when it tries out tiles."""

    operands = ()
    checked = True

    def __init__(self, device: Device, fails: int = -1):
        self._device, self._fails = device, fails
        self.started: list[int] = []

    def compile(self, config: int, turn: Any = contextlib.nullcontext) -> Any:
        with turn(), self._device.used("compiler"):
            if config == self._fails:
                raise ValueError("it does not compile")
        return lambda: config

    def wait_for_oracle(self) -> None:
        pass

    def check(self, results: Any) -> list[str]:
        self.started.append(results)
        return []


class Clock(Timer):
    def __init__(self, device: Device):
        self._device = device

    def calls(self, function: Any, args: Any) -> int:
        return 1

    def sample_ms(self, function: Any, args: Any, calls: int) -> float:
        with self._device.used("clock"):
            return 1.0


@pytest.mark.parametrize("fails", [-1, 2])
def test_nothing_compiles_while_the_clock_runs(fails: int, tmp_path: Path) -> None:
    device = Device()
    work: Any = Work(device, fails)
    bench = LocalBench(work, range(12), Clock(device), warmup=0, ahead=4, device_lock=DeviceLock(tmp_path / "device"))
    trials = []
    for index in range(12):
        bench.expect(range(index, 12))
        trials.append(bench.start(index))
        if index != fails:
            bench.sample_ms(index)
    bench.close()
    assert work.started == [i for i in range(12) if i != fails]
    assert [bool(trial.error) for trial in trials] == [i == fails for i in range(12)]
    assert device.together == {frozenset({"compiler"}), frozenset({"clock"})}
    assert device.most > 1  # while nothing is measured they do compile side by side
