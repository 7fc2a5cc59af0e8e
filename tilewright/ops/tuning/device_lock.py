"""A lock on a device while kernels are timed, shared by all processes of a user on a machine."""

import contextlib
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

from tilewright.ops.types import Device

try:
    import fcntl
except ImportError:  # not a POSIX system: processes do not wait for each other, as on a CPU
    fcntl = None  # type: ignore[assignment]

# The lock is re-entrant: a candidate that is traced may call a kernel that must be tuned first.
_HOLDS_LOCK: ContextVar[bool] = ContextVar("tilewright_turn", default=False)


class DeviceLock:
    """A readers-writer lock: shared by processes that compile or compute, exclusive for one that measures.

    Compilers share the device too, because they time their own choices on it. There are two lock files: a process that
    wants exclusive access locks the gate first, so that later readers cannot overtake it. The system releases a
    process's locks when it ends for any reason.

    Args:
      path: path of the lock files without their endings; ``None`` for a lock that never waits.
    """

    def __init__(self, path: Path | None):
        self._path = path

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Waits for a process that measures, and for one that waits to measure."""
        if self._path is None or fcntl is None or _HOLDS_LOCK.get():
            yield
            return
        with contextlib.ExitStack() as held:
            with self._locked("gate", fcntl.LOCK_SH):
                held.enter_context(self._locked("device", fcntl.LOCK_SH))
            held.enter_context(_held())
            yield

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Waits until no other process holds the lock."""
        if self._path is None or fcntl is None or _HOLDS_LOCK.get():
            yield
            return
        with self._locked("gate", fcntl.LOCK_EX), self._locked("device", fcntl.LOCK_EX), _held():
            yield

    @contextlib.contextmanager
    def _locked(self, ending: str, how: int) -> Iterator[None]:
        assert self._path is not None
        descriptor = os.open(f"{self._path}.{ending}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, how)
            yield
        finally:
            os.close(descriptor)  # this releases the lock, which no other descriptor shares


@contextlib.contextmanager
def _held() -> Iterator[None]:
    reset = _HOLDS_LOCK.set(True)
    try:
        yield
    finally:
        _HOLDS_LOCK.reset(reset)


def device_lock_on(device: Device) -> DeviceLock:
    """The lock of an accelerator; for a CPU one that never waits, since any other program disturbs as much."""
    if device.kind == "cpu" or fcntl is None:
        return DeviceLock(None)
    # Processes may see different devices of a machine, each as number 0.
    visible = next(
        (os.environ[name] for name in ("CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS") if name in os.environ), ""
    )
    name = re.sub(r"[^A-Za-z0-9]+", "-", f"{device.name} {visible}").strip("-")
    return DeviceLock(_folder() / name)


def _folder() -> Path:
    """A folder of this user on a local disk: locks on network file systems are slow or missing."""
    path = Path(tempfile.gettempdir()) / f"tilewright-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():  # another user made it first
        return Path(tempfile.mkdtemp(prefix="tilewright-"))
    return path
