"""Runs candidates in a separate process, which is replaced when it crashes, hangs or leaks."""

import contextlib
import dataclasses
import importlib
import logging
import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from tilewright.ops.config.selection import ConfigSelectorChain
from tilewright.ops.config.tuner import Timer
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.kernel.parts import Arguments
from tilewright.ops.tuning.bench import Bench, CandidateError, OutOfTimeError, Trial
from tilewright.ops.tuning.workload import forward_of
from tilewright.ops.types import Device
from tilewright.ops.utils.processes import module_path

logger = logging.getLogger(__name__)

# Seconds to import jax, find the device, and run the oracle.
_NO_TIME = "there was no time left to measure it"
START_TIMEOUT_S = 600.0
# A process whose memory has grown by more than this is replaced before the next candidate.
LEAK_LIMIT = 2 << 30
# Characters kept from the end of a dead process's output.
MAX_OUTPUT_CHARS = 2000


@dataclasses.dataclass(frozen=True)
class Task:
    """Everything that a worker must know to tune a call.

    Attributes:
      forward: the forward config that a backward pass is measured after; ``None`` for a forward pass.
      settings: jax's settings that affect numerics, by name.
    """

    inv: Invocation[Any, Any]
    configs: tuple[Any, ...]
    inputs: Arguments | None
    forward: Any
    timer: Timer | None
    warmup: int
    verify: bool
    settings: dict[str, Any]

    @classmethod
    def of(
        cls,
        inv: Invocation[Any, Any],
        configs: Sequence[Any],
        inputs: Arguments | None,
        chooser: ConfigSelectorChain,
        timer: Timer | None,
        warmup: int,
        *,
        verify: bool,
    ) -> "Task":
        forward = None
        if inv.direction == "backward":
            forward = chooser.lookup(forward_of(inv)).config
        names = (
            "jax_enable_x64",
            "jax_default_matmul_precision",
            "jax_threefry_partitionable",
            "jax_numpy_dtype_promotion",
        )
        settings = {name: getattr(jax.config, name) for name in names if hasattr(jax.config, name)}
        given = jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, inputs)
        plain = dataclasses.replace(inv.abstract(), metadata=None)
        return cls(plain, tuple(configs), given, forward, timer, warmup, verify, settings)


def is_shared(device: Device) -> bool:
    """True if several processes may use a device, as no TPU lets them."""
    return device.kind != "tpu"


def reason_not_sendable(task: Task) -> str:
    """The reason why another process cannot run the task; empty if it can."""
    if not is_shared(task.inv.target):
        return f"a {task.inv.target.name} belongs to one process"
    if os.name != "posix":
        return f"processes are isolated on POSIX systems alone, this is {os.name!r}"
    if jax.config.jax_default_device is not None:
        return f"jax_default_device is {jax.config.jax_default_device}, which another process may number otherwise"
    parts = [type(task.inv.kernel), *{type(config) for config in task.configs}]
    if task.timer is not None:
        parts.append(type(task.timer))
    for kind in parts:
        if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
            return f"{kind.__module__}.{kind.__qualname__} cannot be imported there"
        if getattr(importlib.import_module(kind.__module__), kind.__qualname__.partition(".")[0], None) is None:
            return f"{kind.__module__} has no {kind.__qualname__}"
    try:
        pickle.dumps(task)
    except Exception as error:  # a kernel's attributes may raise anything
        return f"it cannot be pickled: {error}"
    return ""


class WorkerDied(Exception):
    """A worker ended, or was killed, before it answered."""


class Worker:
    """A process that runs one task after the other.

    Args:
      module: what it runs, with the number of a file on which it is asked as its argument.
      environment: variables that it has beside those of this process.

    Attributes:
      initial_bytes: bytes that it held when its task began, and then after the task's first candidate, which waits for
        the oracle's results.
      held_bytes: bytes that it holds now.
    """

    def __init__(
        self, module: str = "tilewright.ops.tuning.worker", environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        parent_end, worker_end = Pipe()
        self._connection: Connection = parent_end
        inherited = os.environ | {
            "PYTHONPATH": module_path(),
            # The worker shares the device with this process.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        if jax.config.jax_platforms:
            inherited["JAX_PLATFORMS"] = jax.config.jax_platforms
        with worker_end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(worker_end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=(worker_end.fileno(),),
                start_new_session=True,  # this process handles Ctrl-C
                env=inherited | dict(environment),
            )
        self.initial_bytes = 0
        self.held_bytes = 0

    def begin(self, task: Task, timeout_s: float = START_TIMEOUT_S) -> None:
        """Gives the worker a task that replaces the previous one.

        Raises:
          WorkerDied: the worker did not start, or died.
          RuntimeError: the call could not be made runnable; the message is the worker's.
        """
        try:
            self.ask(timeout_s, "begin", pickle.dumps(task))
        except BaseException:
            self.end()
            raise
        self.initial_bytes = self.held_bytes

    def ask(self, timeout_s: float, *request: object) -> Any:
        """Sends a request and returns the answer.

        Raises:
          WorkerDied: there was no answer, and the worker has ended.
          RuntimeError: the worker reported an error.
        """
        try:
            self._connection.send(request)
            if not self._connection.poll(timeout_s):
                self.end()
                raise WorkerDied(f"it did not answer within {timeout_s:g} s")
            status, answer, self.held_bytes = self._connection.recv()
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise WorkerDied(self._cause_of_death()) from error
        if status != "ok":
            raise RuntimeError(answer)
        return answer

    def end(self) -> None:
        """Kills the process and its children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()
        self._output.close()

    def _cause_of_death(self) -> str:
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:
            code = None
        how = "it closed its connection" if code is None else f"it exited with code {code}"
        if code is not None and code < 0:
            how = f"it was killed by {signal.Signals(-code).name}"
        self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, self._output.tell() - MAX_OUTPUT_CHARS))
        output = self._output.read().decode(errors="replace").strip()
        self.end()
        return f"{how}\n{output}" if output else how


_prestarted: "list[Worker]" = []


def prestart() -> None:
    """Starts a worker for this process's next tuning, which takes seconds while the caller does other work."""
    if os.name == "posix" and not _prestarted:
        _prestarted.append(Worker())


class IdleWorker:
    """Keeps one idle worker between tasks: starting a process and finding the device takes seconds."""

    def __init__(self) -> None:
        self._worker: Worker | None = _prestarted.pop() if _prestarted else None

    def warm(self) -> None:
        """Starts the worker early, so that it starts up while the caller does other work."""
        self._worker = self._worker or Worker()

    def take(self) -> Worker:
        worker, self._worker = self._worker, None
        return worker or Worker()

    def give_back(self, worker: Worker) -> None:
        self.close()
        self._worker = worker

    def close(self) -> None:
        """Ends the worker."""
        if self._worker is not None:
            self._worker.end()
        self._worker = None


class ProcessBench(Bench):
    """The bench in a worker, which is replaced when it dies, hangs, leaks, or loses its device.

    Args:
      idle: provides the worker, and takes it back if it is still healthy.
      deadline: a time of ``time.monotonic``; a worker that has not answered by then is killed, which does not count
        against the candidate.
    """

    def __init__(self, task: Task, *, timeout_s: float, idle: IdleWorker, deadline: float = math.inf):
        self._task, self._timeout_s, self._idle, self._deadline = task, timeout_s, idle, deadline
        self._worker: Worker | None = None
        self._started: set[int] = set()

    def prepare(self) -> None:
        with contextlib.suppress(WorkerDied):  # the first candidate will meet the error too
            self._begun()

    def expect(self, indices: Sequence[int]) -> Sequence[int]:
        if self._worker is not None:
            with contextlib.suppress(WorkerDied):
                expected: Sequence[int] = self._ask("expect", list(indices))
                return expected
        return []

    def start(self, index: int) -> Trial:
        self._replace_if_it_leaks()
        try:
            trial: Trial = self._ask("start", index)
            if trial.error:
                self._replace_unless_healthy()
        except WorkerDied as error:
            if time.monotonic() >= self._deadline:
                return Trial("left out", _NO_TIME)
            return Trial(error=f"the process that ran it is no more: {error}")
        if not trial.error:
            self._started.add(index)
            if len(self._started) == 1:
                self._begun().initial_bytes = self._begun().held_bytes
        return trial

    def is_ready(self, index: int) -> bool:
        self._replace_if_it_leaks()
        return index in self._started

    def sample_ms(self, index: int) -> float:
        sample: float = self._of_started("sample_ms", index)
        return sample

    def recheck(self, index: int) -> list[str]:
        wrong: list[str] = self._of_started("recheck", index)
        return wrong

    def close(self) -> None:
        self._replace_if_it_leaks()
        if self._worker is not None:
            self._idle.give_back(self._worker)
        self._worker = None
        self._started.clear()

    def _of_started(self, request: str, index: int) -> Any:
        self._check_time()
        try:
            error, answer = self._ask(request, index)
            if error:
                self._started.discard(index)
                self._replace_unless_healthy()
        except WorkerDied as death:
            self._check_time()
            raise CandidateError(f"the process that ran it is no more: {death}") from death
        if error:
            raise CandidateError(error)
        return answer

    def _check_time(self) -> None:
        if time.monotonic() >= self._deadline:
            raise OutOfTimeError(_NO_TIME)

    def _ask(self, *request: object) -> Any:
        try:
            return self._begun().ask(self._seconds(self._timeout_s), *request)
        except WorkerDied:
            self._worker = None
            self._started.clear()
            raise

    def _begun(self) -> Worker:
        """The worker, with its task begun."""
        if self._worker is None:
            worker = self._idle.take()
            worker.begin(self._task, self._seconds(START_TIMEOUT_S))
            self._worker = worker
        return self._worker

    def _seconds(self, timeout_s: float) -> float:
        """The seconds to wait for an answer."""
        return max(0.1, min(timeout_s, self._deadline - time.monotonic()))

    def _replace_if_it_leaks(self) -> None:
        if self._worker is not None and self._worker.held_bytes - self._worker.initial_bytes > LEAK_LIMIT:
            logger.info("a worker holds %.1f GB and is replaced", self._worker.held_bytes / 1e9)
            self._replace()

    def _replace_unless_healthy(self) -> None:
        """After an illegal address a process cannot use the device, which is not the fault of the next candidates."""
        if not self._ask("healthy"):
            logger.info("a worker has lost its device and is replaced")
            self._replace()

    def _replace(self) -> None:
        if self._worker is not None:
            self._worker.end()
        self._worker = None
        self._started.clear()
