"""Compiled groups on disk: one folder each, keyed by everything they were compiled from, private to their owner."""

import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tilewright.errors import BuildError
from tilewright.ops.kernel.builds import Cancelled
from tilewright.ops.utils.folders import absolute, cache_folder, locked, make_folder, try_lock
from tilewright.ops.utils.serialize import canonical_json

logger = logging.getLogger(__name__)

SCHEMA = 1
LIBRARY = "library.so"
RECORD = "record.json"

_RECORD_LIMIT = 1 << 20
_LEFTOVER = re.compile(r"\.(?:build|lock)-([0-9a-f]{32})(?:-[0-9a-f]+)?")
_LEFTOVER_LIFETIME_S = 86400.0  # used where there are no locks to show which processes are alive
_POLL_S = 0.05


@dataclasses.dataclass(frozen=True, slots=True)
class BuildKey:
    """The key of one group's shared object.

    Attributes:
      target: nvcc's name of the architecture, such as "90a".
      content: hash of the generated sources, the table's headers and the flags.
      packages: hashes of the headers of packages, for installed packages only.
      compiler: the compiler's identity; empty if nothing can be compiled here, and then a build by any compiler is
        accepted.
    """

    table: str
    group: str
    target: str
    content: str
    packages: Mapping[str, str]
    compiler: str

    @property
    def prefix(self) -> str:
        return f"{self.table}-{self.group}-sm_{self.target}-{self.content[:24]}"

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.prefix}-{self.environment[:12]}"

    @property
    def environment(self) -> str:
        return _digest(canonical_json({"compiler": self.compiler, "packages": dict(self.packages)}).encode())

    @property
    def lock_name(self) -> str:
        return _digest(self.name.encode())[:32]


class TimedOut(Exception):  # not a TimeoutError: that is an OSError, which here means that the file system has no locks
    """A step exceeded its time limit; the message says which."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limit:
    """The limits of a build: cancellation, and a maximum time."""

    cancelled: threading.Event
    timeout_s: float

    def waiting(self, step: str) -> Callable[[], None]:
        """Returns a function that waits a moment on each call; the time limit starts now.

        It raises `Cancelled` once the build is cancelled, and ``TimedOut(what)`` when the time is over.
        """
        deadline = time.monotonic() + self.timeout_s

        def wait() -> None:
            if self.cancelled.wait(_POLL_S):
                raise Cancelled
            if time.monotonic() > deadline:
                raise TimedOut(step)

        return wait


class BuildCache:
    """The folder ``cuda`` in Tilewright's cache folder; any number of processes may build into it at once.

    Args:
      path: another folder; it is created on the first build.
      shipped: use the objects of an installed wheel instead of building; by default only with the user's own folder.
    """

    def __init__(self, path: Path | None = None, *, shipped: bool | None = None) -> None:
        # absolute, because nvcc runs in another folder
        self.path = cache_folder("cuda") if path is None else absolute(path)
        self.shipped = path is None if shipped is None else shipped

    def find(self, key: BuildKey) -> Path | None:
        """The shared object of a group, if it exists and matches its record; its bytes are read.

        Raises:
          BuildError: the cache may be written by others.
        """
        if not self._check_folder():
            return None
        # Without a compiler here any compiler's build is used, the newest first.
        names = [key.name] if key.compiler else self._names(key.prefix)
        for name in names:
            folder = self.path / name
            if not folder.is_dir():
                continue
            reason = _reason_not_intact(folder, key)
            if not reason:
                return folder / LIBRARY
            logger.warning("the build in %s is not used: %s", folder, reason)
        return None

    def publish(self, key: BuildKey, staging: Path, remarks: Mapping[str, Any]) -> Path:
        """Renames a staging folder with its finished ``library.so`` to the group's folder, replacing an earlier one."""
        # Whatever the umask was: files that others could have written are not loaded.
        for path in staging.iterdir():
            os.chmod(path, 0o600)
        library = staging / LIBRARY
        record = {
            "schema": SCHEMA,
            **dataclasses.asdict(key),
            "packages": dict(key.packages),
            "sha256": _digest(library.read_bytes()),
            "bytes": library.stat().st_size,
            **remarks,
        }
        _write_private(staging / RECORD, (json.dumps(record, indent=1) + "\n").encode())
        final = self.path / key.name
        while True:
            try:
                os.rename(staging, final)
            except OSError as error:
                # A folder can replace only an empty folder; anything else is moved away first.
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
            else:
                return final / LIBRARY
            # The existing folder was not intact when the build began, or is equal: its name holds the hash of its key.
            aside = self._temporary(key)
            with contextlib.suppress(FileNotFoundError):
                os.rename(final, aside)
                _remove(aside)

    @contextlib.contextmanager
    def staging(self, key: BuildKey) -> Iterator[Path]:
        """A folder to build in, removed at the end unless it was published."""
        folder = self._temporary(key)
        os.mkdir(folder, 0o700)
        try:
            yield folder
        finally:
            _remove(folder)

    @contextlib.contextmanager
    def lock(self, key: BuildKey, limit: Limit) -> Iterator[None]:
        """Lets one process at a time build a group, since the processes of one host, one per GPU, would all compile the
        same.

        Removes the leftovers of killed processes. Without locks (some network file systems) every process builds, and
        the last one's folder remains.

        Raises:
          BuildError: the cache may be written by others.
          OSError: the cache cannot be written.
          Cancelled: the build was cancelled.
          TimedOut: another process held the lock for too long.
        """
        self._make()
        self._sweep()
        # Cancelled meanwhile: an uncontended lock does not call `waiting`.
        if limit.cancelled.is_set():
            raise Cancelled
        with locked(self.path / f".lock-{key.lock_name}", limit.waiting("another process is building it")):
            yield

    def _check_folder(self) -> bool:
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise BuildError(f"the CUDA build cache {self.path} cannot be read: {error.strerror}") from error
        if status.st_uid != os.geteuid():
            raise BuildError(
                f"the CUDA build cache {self.path} belongs to user {status.st_uid}, not to user {os.geteuid()}; "
                "nothing is loaded from it. Set TILEWRIGHT_CACHE_DIR to a folder of your own"
            )
        if status.st_mode & 0o022:
            raise BuildError(
                f"the CUDA build cache {self.path} is writable by others (mode {stat.S_IMODE(status.st_mode):o}); "
                "nothing is loaded from it. Delete it"
            )
        # Others can only read it, so its contents may be loaded.
        if status.st_mode & 0o077:
            os.chmod(self.path, 0o700)
        return True

    def _make(self) -> None:
        make_folder(self.path)
        self._check_folder()

    def _names(self, prefix: str) -> list[str]:
        """The folders of builds, newest first."""
        found = []
        for name in os.listdir(self.path):
            if name.startswith(prefix):
                with contextlib.suppress(FileNotFoundError):  # another process may have replaced it
                    found.append((os.lstat(self.path / name).st_mtime, name))
        return [name for _, name in sorted(found, reverse=True)]

    def _temporary(self, key: BuildKey) -> Path:
        return self.path / f".build-{key.lock_name}-{secrets.token_hex(8)}"

    def _sweep(self) -> None:
        """Removes the staging folders and locks of processes that have ended."""
        left: dict[str, list[Path]] = {}
        for path in self.path.iterdir():
            match = _LEFTOVER.fullmatch(path.name)
            if match:
                left.setdefault(match[1], []).append(path)
        for name, paths in left.items():
            lock = self.path / f".lock-{name}"
            try:
                descriptor = try_lock(lock)
            except OSError:
                _remove(*(path for path in paths if _older_than(path, _LEFTOVER_LIFETIME_S)))
                continue
            # No process holds the lock, so the one that made these is gone. They go before the lock is released.
            if descriptor is not None:
                _remove(*paths, lock)
                os.close(descriptor)


def _reason_not_intact(folder: Path, key: BuildKey) -> str:
    """The reason why a build must not be loaded; empty if it is intact."""
    for path, kind in ((folder, stat.S_ISDIR), (folder / RECORD, stat.S_ISREG), (folder / LIBRARY, stat.S_ISREG)):
        try:
            status = os.lstat(path)
        except OSError as error:
            return f"{path.name}: {error.strerror}"
        if not kind(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            return f"{path.name} is not the owner's alone"
    # Only after the checks of owner and mode: nothing of others is parsed.
    record = _read_record(folder)
    if record is None:
        return "its record cannot be read"
    for name in ("table", "group", "target", "content"):
        if record.get(name) != getattr(key, name):
            return f"it was made with another {name}"
    if key.compiler and record.get("compiler") != key.compiler:
        return "it was made with another compiler"
    packages = record.get("packages")
    if not isinstance(packages, dict) or any(packages.get(name) != digest for name, digest in key.packages.items()):
        return "it was made with other headers"
    if _digest((folder / LIBRARY).read_bytes()) != record.get("sha256"):
        return "its bytes are not those that were compiled"
    return ""


def _read_record(folder: Path) -> dict[str, Any] | None:
    try:
        with open(folder / RECORD, "rb") as file:
            record = json.loads(file.read(_RECORD_LIMIT).decode())
    except (OSError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and record.get("schema") == SCHEMA else None


def _write_private(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _remove(*paths: Path) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.unlink(path)


def _older_than(path: Path, seconds: float) -> bool:
    try:
        return time.time() - os.lstat(path).st_mtime > seconds
    except OSError:
        return False


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
