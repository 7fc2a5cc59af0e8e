"""Builds that are made by another process while candidates are measured, and go on when the tuning has ended."""

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
from tilewright.ops.tuning.events import BuildFailed, BuildMade, BuildStarted, TuningEvent
from tilewright.ops.utils.processes import module_path, usable_cores

TIMEOUT_S = 1800.0
"""Seconds after which one build is ended: the slowest took 150."""

# Those that go on by themselves: an object that is collected while its process runs would be warned of.
_left_alone: list[subprocess.Popen[bytes]] = []


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """The order that a process of builds reads from its standard input.

    Attributes:
      builds: each pickled by itself, so that one that cannot be read there fails alone.
      jobs: compilers at once.
      timeout_s: seconds for each build.
    """

    builds: tuple[bytes, ...]
    jobs: int
    timeout_s: float


class BackgroundBuilds:
    """Makes builds in processes of their own, at low priority, and knows how far they are.

    Each build is made once, whoever asks for it and however often: processes that want the same one wait for each
    other by the lock of its cache.

    Args:
      timeout_s: seconds after which one build is ended, and has failed; ``TIMEOUT_S`` by default.
    """

    def __init__(self, timeout_s: float | None = None):
        self._timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
        self._why: dict[Build, str | None] = {}  # None while it is being made, then why it failed, or ""
        self._events: list[TuningEvent] = []
        self._changed = threading.Condition()
        self._processes: list[subprocess.Popen[bytes]] = []

    def add(self, builds: Sequence[Build]) -> None:
        """Begins with those that are neither made nor begun, in their order."""
        fresh = [each for each in dict.fromkeys(builds) if each not in self._why]
        for each in fresh:
            self._why[each] = "" if each.is_made() else None
        wanted = [each for each in fresh if self._why[each] is None]
        if wanted:
            self._start(wanted)

    def is_made(self, build: Build) -> bool:
        """Tells if a build that was added is there."""
        with self._changed:
            return self._why[build] == ""

    def failure(self, build: Build) -> str:
        """Why a build that was added will not come; empty if it did, or may."""
        with self._changed:
            return self._why[build] or ""

    @property
    def unfinished(self) -> list[Build]:
        """Those that are neither made nor given up."""
        with self._changed:
            return [build for build, why in self._why.items() if why is None]

    def wait(self, seconds: float) -> None:
        """Returns when something has changed that `news` has not told yet, or after some seconds."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._events), seconds)

    def news(self) -> list[TuningEvent]:
        """The events since it was asked last."""
        with self._changed:
            events, self._events = self._events, []
        return events

    def leave(self) -> list[Build]:
        """Lets what is unfinished go on by itself, also when this process ends; returns it."""
        for process in self._processes:
            if process.poll() is None:
                _left_alone.append(process)
        return self.unfinished

    def stop(self) -> None:
        """Ends what is unfinished, with its compilers."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()  # its compilers are no children of this process: it ends them
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _start(self, builds: Sequence[Build]) -> None:
        # A quarter of the cores is the tuner's own: it compiles, too, and its clock must not wait.
        spared = max(1, usable_cores() // 4)
        jobs = parallel_compilers((each.memory_bytes for each in builds), spared=spared)
        try:
            order = Order(tuple(map(pickle.dumps, builds)), min(jobs, len(builds)), self._timeout_s)
        except Exception as error:  # whatever a build's attributes raise
            for each in builds:
                self._end(each, f"it cannot be sent to another process: {error}")
            return
        environment = os.environ | {
            "PYTHONPATH": module_path(),
            "JAX_PLATFORMS": "cpu",  # the device is for those who measure
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "tilewright.ops.tuning.builds.worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True, env=environment,
        )  # fmt: skip
        self._processes.append(process)
        following = threading.Thread(
            target=self._follow, args=(process, order, tuple(builds)), name="tilewright-builds", daemon=True
        )
        following.start()

    def _follow(self, process: subprocess.Popen[bytes], order: Order, builds: Sequence[Build]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        # Here, for the process reads only when it has imported what it needs, and a pipe does not hold it all.
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(pickle.dumps(order))
        for line in process.stdout:
            with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):  # a line of somebody else's
                said = json.loads(line)
                build, why = builds[said["index"]], said["why"]
                if why is None:
                    self._tell(BuildStarted(str(build)))
                else:
                    self._end(build, why, said["seconds"])
        process.wait()
        for build in builds:
            if build in self.unfinished:
                self._end(build, f"the process that compiled it ended with code {process.returncode}")

    def _end(self, build: Build, why: str, seconds: float = 0.0) -> None:
        """Notes that a build failed for a reason, or is made if there is none."""
        with self._changed:
            self._why[build] = why
        self._tell(BuildFailed(str(build), why) if why else BuildMade(str(build), seconds))

    def _tell(self, event: TuningEvent) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()


def build_in_background(builds: Sequence[Build]) -> None:
    """Has builds made by another process, which goes on by itself."""
    background = BackgroundBuilds()
    background.add(builds)
    background.leave()


BUILD_IN_BACKGROUND.fill(build_in_background)
