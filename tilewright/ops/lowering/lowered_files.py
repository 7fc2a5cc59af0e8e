"""Lowered and compiled kernels on disk: one file each, known by all that it depends on, for their owner alone.

A file is a line that says what it is, a line of JSON (the key, what is said of the content, checksums), and the
content: MLIR bytecode or XLA's executable, which nothing in Python executes. Whatever cannot be read or written is
logged and counts as a miss.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tilewright.ops.utils.folders import cache_folder, make_folder, read_file, replace_file
from tilewright.ops.utils.serialize import canonical_json

logger = logging.getLogger(__name__)

SCHEMA = 1
FILE_LIMIT = 64 << 20
FOLDER_LIMIT = 256 << 20

_MAGIC = b"tilewright lowered %d\n" % SCHEMA
_HEADER = {"key": dict, "about": dict, "bytes": int, "sha256": str, "checksum": str}
_NAME = re.compile(r"[\w.\-]+-[0-9a-f]{32}\.lowered", re.ASCII)
_TEMPORARY = re.compile(r"\.[\w.\-]+\.lowered\.\d+-[0-9a-f]{16}\.tmp", re.ASCII)
_TEMPORARY_LIFETIME_S = 3600.0

Document = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class LoweredFile:
    """One entry.

    Attributes:
      about: what its writer said of the content.
      content: the bytes; may be empty.
    """

    about: dict[str, Any]
    content: bytes


class LoweredFiles:
    """The folder ``lowered`` among Tilewright's caches; any number of processes may use it at once, without locks.

    It never grows beyond a limit: what was used longest ago goes first.

    Args:
      path: another folder; it is made on the first write.
      limit: of the bytes in the folder.
    """

    def __init__(self, path: Path | None = None, limit: int = FOLDER_LIMIT) -> None:
        self._given = path
        self._limit = limit

    @property
    def path(self) -> Path:
        """The folder; the user's is looked up at each use, as the environment may change."""
        return cache_folder("lowered") if self._given is None else self._given

    def get(self, key: Document) -> LoweredFile | None:
        """The entry of a key, if it is there and is what was written."""
        path = self.path / _file_name(key)
        try:
            if not _is_owners_alone(self.path, stat.S_ISDIR) or not _is_owners_alone(path, stat.S_ISREG):
                return None
            found = _parsed(read_file(path, FILE_LIMIT), key)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("the lowered kernel in %s is not used: %s", path, error)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # the order in which entries go
        return found

    def has(self, key: Document) -> bool:
        """Looks for a file under a key, which may be damaged."""
        return (self.path / _file_name(key)).exists()

    def put(self, key: Document, about: Document, content: bytes) -> bool:
        """Writes an entry in place of what was there; whether that succeeded, else the reason is logged."""
        header = {"key": key, "about": about, "bytes": len(content), "sha256": _digest(content)}
        text = canonical_json({**header, "checksum": _checksum(header)}).encode()
        data = _MAGIC + text + b"\n" + content
        path = self.path / _file_name(key)
        if len(data) > FILE_LIMIT:
            logger.info("a lowered kernel of %d bytes is not kept, the limit is %d", len(data), FILE_LIMIT)
            return False
        try:
            make_folder(self.path)
            if not _is_owners_alone(self.path, stat.S_ISDIR):
                return False
            replace_file(path, data, mode=0o600)
            self._trim()
        except OSError as error:
            logger.warning("a lowered kernel cannot be kept in %s: %s", path, error)
            return False
        return True

    def usage(self) -> tuple[int, int]:
        """How many entries there are, and their bytes."""
        sizes = [status.st_size for _, status in self._entries()]
        return len(sizes), sum(sizes)

    def clear(self) -> int:
        """Deletes all entries, damaged ones too, and returns how many; leaves what is not ours."""
        self._sweep(0.0)
        return sum(_unlink(path) for path, _ in self._entries())

    def _entries(self) -> list[tuple[Path, os.stat_result]]:
        """The files of entries, those that were used longest ago first."""
        found = []
        for name in self._names(_NAME):
            with contextlib.suppress(OSError):  # another process may have deleted it meanwhile
                found.append((self.path / name, os.lstat(self.path / name)))
        return sorted(found, key=lambda entry: entry[1].st_mtime)

    def _names(self, pattern: re.Pattern[str]) -> list[str]:
        try:
            return [name for name in os.listdir(self.path) if pattern.fullmatch(name)]
        except OSError:
            return []

    def _trim(self) -> None:
        """Deletes what was used longest ago until the rest is within the limit, and what killed writers left."""
        self._sweep(_TEMPORARY_LIFETIME_S)
        entries = self._entries()
        excess = sum(status.st_size for _, status in entries) - self._limit
        for path, status in entries:
            if excess <= 0:
                return
            _unlink(path)
            excess -= status.st_size

    def _sweep(self, lifetime_s: float) -> None:
        for name in self._names(_TEMPORARY):
            with contextlib.suppress(OSError):
                if time.time() - os.lstat(self.path / name).st_mtime >= lifetime_s:
                    os.unlink(self.path / name)


def _file_name(key: Document) -> str:
    """The name of the file for a key: something to recognise it by, and a hash."""
    said = f"{key.get('op', '')}-{key.get('stage', '')}-{key.get('platform', 'results')}"
    prefix = re.sub(r"[^A-Za-z0-9_.]+", "-", said)[-64:].lstrip("-.")
    return f"{prefix}-{_digest(canonical_json(key).encode())[:32]}.lowered"


def _is_owners_alone(path: Path, kind: Callable[[int], bool]) -> bool:
    """Tells if nobody else can have written a file or folder; logs why not."""
    # The folder may be a link that its owner made; an entry is never one.
    status = os.stat(path) if kind is stat.S_ISDIR else os.lstat(path)
    if kind(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022:
        return True
    logger.warning("%s is not used for lowered kernels: it is not its owner's alone", path)
    return False


def _parsed(data: bytes, key: Document) -> LoweredFile:
    """An entry from the bytes of a file.

    Raises:
      ValueError: it is none, it is damaged, or it is that of another key.
    """
    if not data.startswith(_MAGIC):
        raise ValueError(f"not an entry of schema {SCHEMA}")
    line, separator, content = data[len(_MAGIC) :].partition(b"\n")
    try:
        header = json.loads(line.decode())
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not separator or not isinstance(header, dict) or header.keys() != _HEADER.keys():
        raise ValueError("its header is not complete")
    if any(not isinstance(header[name], kind) for name, kind in _HEADER.items()):
        raise ValueError("a field of its header is of another type")
    checksum = header.pop("checksum")
    if checksum != _checksum(header):
        raise ValueError("its checksum does not match its header")
    if canonical_json(header["key"]) != canonical_json(key):
        raise ValueError("it holds another key")
    if len(content) != header["bytes"] or _digest(content) != header["sha256"]:
        raise ValueError("its bytes are not those that were written")
    return LoweredFile(header["about"], content)


def _checksum(header: Document) -> str:
    return _digest(canonical_json(dict(header)).encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _unlink(path: Path) -> bool:
    try:
        os.unlink(path)
    except OSError:
        return False
    return True
