"""Builds that another process makes while candidates are measured, and that continue after the tuning."""

import contextlib
import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

from tilewright.ops.config.unbuilt import BUILD_IN_BACKGROUND
from tilewright.ops.kernel.builds import Build, parallel_compilers
from tilewright.ops.tuning.events import BuildEnded, BuildStarted, TuningEvent
from tilewright.ops.utils.processes import module_path, usable_cores

TIMEOUT_S = 1800.0
"""Seconds after which one build is killed: the slowest took 150."""

# Detached processes, kept referenced: collecting a Popen object whose process runs would raise a warning.
_detached: list[subprocess.Popen[bytes]] = []


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """The order that a build process reads from its standard input.

    Attributes:
      builds: each pickled separately, so that if one cannot be unpickled there, only that one fails.
      jobs: number of compilers at once.
      timeout_s: seconds for each build.
    """

    builds: tuple[bytes, ...]
    jobs: int
    timeout_s: float


class BackgroundBuilds:
    """Makes builds in separate processes at low priority, and tracks their state.

    Each build is made once, however often it is requested: processes that want the same one wait for each other by the
    lock of its cache.

    Args:
      timeout_s: seconds after which one build is killed and counts as failed; ``TIMEOUT_S`` by default.
    """

    def __init__(self, timeout_s: float | None = None):
        self._timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
        self._states: dict[Build, str | None] = {}  # None while it is being made, then the reason why it failed, or ""
        self._events: list[TuningEvent] = []
        self._changed = threading.Condition()
        self._processes: list[subprocess.Popen[bytes]] = []

    def add(self, builds: Sequence[Build]) -> None:
        """Starts the builds that are neither made nor started, in their order."""
        fresh = [each for each in dict.fromkeys(builds) if each not in self._states]
        for each in fresh:
            self._states[each] = "" if each.is_made() else None
        missing = [each for each in fresh if self._states[each] is None]
        if missing:
            self._start(missing)

    def is_made(self, build: Build) -> bool:
        """True if a build that was added is made."""
        with self._changed:
            return self._states[build] == ""

    def failure(self, build: Build) -> str:
        """The reason why a build that was added failed; empty if it is made or may still be."""
        with self._changed:
            return self._states[build] or ""

    @property
    def unfinished(self) -> list[Build]:
        """The builds that are neither made nor failed."""
        with self._changed:
            return [build for build, why in self._states.items() if why is None]

    def wait(self, seconds: float) -> None:
        """Returns when there is an event that `news` has not returned yet, or after some seconds."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._events), seconds)

    def take_events(self) -> list[TuningEvent]:
        """The events since the last call."""
        with self._changed:
            events, self._events = self._events, []
        return events

    def detach(self) -> list[Build]:
        """Detaches the processes, which continue even when this process ends; returns the unfinished builds."""
        for process in self._processes:
            if process.poll() is None:
                _detached.append(process)
        return self.unfinished

    def stop(self) -> None:
        """Ends the processes, with their compilers."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()  # its compilers are not children of this process: it ends them itself
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _start(self, builds: Sequence[Build]) -> None:
        # A quarter of the cores is left to the tuner, which compiles too and whose clock must not wait.
        spared = max(1, usable_cores() // 4)
        jobs = parallel_compilers((each.memory_bytes for each in builds), spared=spared)
        try:
            order = Order(tuple(map(pickle.dumps, builds)), min(jobs, len(builds)), self._timeout_s)
        except Exception as error:  # a build's attributes may raise anything
            for each in builds:
                self._end(each, f"it cannot be sent to another process: {error}")
            return
        environment = os.environ | {
            "PYTHONPATH": module_path(),
            "JAX_PLATFORMS": "cpu",  # the device is left to the measurements
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "tilewright.ops.tuning.builds.worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True, env=environment,
        )  # fmt: skip
        self._processes.append(process)
        follower = threading.Thread(
            target=self._follow, args=(process, order, tuple(builds)), name="tilewright-builds", daemon=True
        )
        follower.start()

    def _follow(self, process: subprocess.Popen[bytes], order: Order, builds: Sequence[Build]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        # Write in this thread: the process reads only after its imports, and a pipe may not hold everything.
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(pickle.dumps(order))
        for line in process.stdout:
            with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):  # a line from other code
                message = json.loads(line)
                build, why = builds[message["index"]], message["why"]
                if why is None:
                    self._emit(BuildStarted(str(build)))
                else:
                    self._end(build, why, message["seconds"])
        process.wait()
        for build in builds:
            if build in self.unfinished:
                self._end(build, f"the process that compiled it ended with code {process.returncode}")

    def _end(self, build: Build, why: str, seconds: float = 0.0) -> None:
        """Records that a build failed, or that it is made if ``why`` is empty."""
        with self._changed:
            self._states[build] = why
        self._emit(BuildEnded(str(build), seconds, why))

    def _emit(self, event: TuningEvent) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()


def build_in_background(builds: Sequence[Build]) -> None:
    """Makes builds in another process, which continues when this one ends."""
    background = BackgroundBuilds()
    background.add(builds)
    background.detach()


BUILD_IN_BACKGROUND.fill(build_in_background)
