"""Where Tilewright keeps files, how whole ones are read and replaced, and how processes take turns at one."""

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
    """The folder ``name`` under ``TILEWRIGHT_CACHE_DIR``, or else under the user's cache folder; it need not exist."""
    root = os.environ.get("TILEWRIGHT_CACHE_DIR")
    if not root:
        import platformdirs

        root = platformdirs.user_cache_dir("tilewright")
    return absolute(os.path.join(root, name))


def absolute(path: str | os.PathLike[str]) -> Path:
    """``path`` from the root on, ``~`` expanded, symbolic links as they are."""
    return Path(os.path.abspath(os.path.expanduser(path)))


def make_folder(path: Path) -> None:
    """Makes a folder and those above it, for their owner alone, unless they are there."""
    if not path.is_dir():
        make_folder(path.parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)


def read_file(path: str | os.PathLike[str], limit: int) -> bytes:
    """The content of a regular file.

    Raises:
      OSError: it cannot be read.
      ValueError: it is no regular file, or larger than ``limit`` bytes.
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
    """Makes ``data`` the whole content of a file: other processes see the old content or the new, whatever happens.

    Args:
      mode: its permissions, less those that the process's umask takes away.
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
    """Lets one process at a time in, by a lock file that is gone when nobody is.

    A process that is killed inside lets the next one in. Where the file system has no locks, everybody gets in, and
    that is logged.

    Args:
      wait: is called between two attempts.

    Raises:
      OSError: the file cannot be made.
      Whatever ``wait`` raises.
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
            # While it is held: who opened it before will find that it is gone and open the next one.
            with contextlib.suppress(OSError):
                os.unlink(path)
            os.close(descriptor)


def try_lock(path: Path) -> int | None:
    """A descriptor that holds the lock, or ``None`` if another has it; ``OSError`` where there are no locks."""
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
