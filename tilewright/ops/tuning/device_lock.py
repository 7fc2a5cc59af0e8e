"""Who uses a device while kernels are timed: over all processes of a user on a machine."""

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
except ImportError:  # not a POSIX system: then each process is for itself, as on a device that has no turns
    fcntl = None  # type: ignore[assignment]

# Who has a turn may call what asks for one: a candidate that is traced may call a kernel that is tuned first.
_HAS_TURN: ContextVar[bool] = ContextVar("tilewright_turn", default=False)


class Turns:
    """Many that compile or compute at once, for a compiler tries its own choices out on the device; or one alone.

    Two lock files: who wants to be alone closes the gate first, so that nobody overtakes who waits. What ends a process
    ends its turn.

    Args:
      path: of the lock files, without their endings; ``None`` where everybody may go on at any time.
    """

    def __init__(self, path: Path | None):
        self._path = path

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Waits for who is alone, and for who waits to be."""
        if self._path is None or fcntl is None or _HAS_TURN.get():
            yield
            return
        with contextlib.ExitStack() as held:
            with self._locked("gate", fcntl.LOCK_SH):
                held.enter_context(self._locked("device", fcntl.LOCK_SH))
            held.enter_context(_turn())
            yield

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Waits until nobody else has a turn."""
        if self._path is None or fcntl is None or _HAS_TURN.get():
            yield
            return
        with self._locked("gate", fcntl.LOCK_EX), self._locked("device", fcntl.LOCK_EX), _turn():
            yield

    @contextlib.contextmanager
    def _locked(self, ending: str, how: int) -> Iterator[None]:
        assert self._path is not None
        descriptor = os.open(f"{self._path}.{ending}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, how)
            yield
        finally:
            os.close(descriptor)  # and with it the lock: no other descriptor is of this opening of the file


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    reset = _HAS_TURN.set(True)
    try:
        yield
    finally:
        _HAS_TURN.reset(reset)


def turns_on(device: Device) -> Turns:
    """Those of an accelerator. On a CPU there are none: every other program disturbs as much."""
    if device.kind == "cpu" or fcntl is None:
        return Turns(None)
    # Processes may see different cards of a machine, each under the number 0.
    seen = next((os.environ[name] for name in ("CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS") if name in os.environ), "")
    name = re.sub(r"[^A-Za-z0-9]+", "-", f"{device.name} {seen}").strip("-")
    return Turns(_folder() / name)


def _folder() -> Path:
    """A folder of this user's alone on a disk of this machine, for locks over networks are slow or none."""
    path = Path(tempfile.gettempdir()) / f"tilewright-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():  # another user made it first
        return Path(tempfile.mkdtemp(prefix="tilewright-"))
    return path
