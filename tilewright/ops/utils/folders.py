"""Where Tilewright keeps files, and how whole ones are read and replaced."""

import contextlib
import os
import secrets
import stat
from pathlib import Path


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


def replace_file(path: Path, data: bytes) -> None:
    """Makes ``data`` the whole content of a file: other processes see the old content or the new, whatever happens."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(8)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o644)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
