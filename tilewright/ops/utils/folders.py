"""The cache folder, atomic reading and replacing of files, and lock files between processes."""

import contextlib
import errno
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

_POLL_S = 0.05


def cache_folder(name: str) -> Path:
    """The folder ``name`` under ``TILEWRIGHT_CACHE_DIR`` or else the user's cache folder; it may not exist yet."""
    root = os.environ.get("TILEWRIGHT_CACHE_DIR")
    if not root:
        import platformdirs

        root = platformdirs.user_cache_dir("tilewright")
    return absolute(os.path.join(root, name))


def absolute(path: str | os.PathLike[str]) -> Path:
    """``path`` as an absolute path with ``~`` expanded; symbolic links are kept."""
    return Path(os.path.abspath(os.path.expanduser(path)))


def make_folder(path: Path) -> None:
    """Makes a folder and its missing parents, accessible only to the owner."""
    if not path.is_dir():
        make_folder(path.parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)


def read_file(path: str | os.PathLike[str], limit: int) -> bytes:
    """Reads a regular file.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is not a regular file, or larger than ``limit`` bytes.
    """
    # Without O_NONBLOCK, opening a FIFO would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("not a regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(limit + 1)
    finally:
        os.close(descriptor)
    if len(data) > limit:
        raise ValueError(f"larger than {limit} bytes")
    return data


def replace_file(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replaces a file atomically: other processes see either the old or the new content, even after a crash.

    Args:
      mode: the file's permissions before the process's umask is applied.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(8)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


@contextlib.contextmanager
def locked(path: Path, wait: Callable[[], object] = lambda: time.sleep(_POLL_S)) -> Iterator[None]:
    """Lets one process at a time enter, by means of a lock file that is removed afterwards.

    If the holder is killed, the next process enters. On a file system without locks every process enters, and that is
    logged.

    Args:
      wait: called between two attempts.

    Raises:
      OSError: the file cannot be made. Whatever ``wait`` raises.
    """
    descriptor = None
    try:
        while (descriptor := try_lock(path)) is None:
            wait()
    except OSError as error:
        if not os.access(path.parent, os.W_OK):
            raise
        logger.info("%s cannot be locked: %s", path, error)
    try:
        yield
    finally:
        if descriptor is not None:
            # Unlinked while it is held: a process that opened the old file notices that it is gone and opens a new one.
            with contextlib.suppress(OSError):
                os.unlink(path)
            os.close(descriptor)


def try_lock(path: Path) -> int | None:
    """Returns a descriptor that holds the lock, or ``None`` if another process has it; ``OSError`` without lock
    support.
    """
    try:
        import fcntl
    except ImportError as error:
        raise OSError(errno.ENOTSUP, "this system has no advisory locks") from error
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_ino == os.stat(path).st_ino:
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    os.close(descriptor)
    return None
