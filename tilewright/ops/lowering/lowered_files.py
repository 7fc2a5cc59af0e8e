"""Lowered and compiled kernels on disk, one file each, keyed by everything they depend on, private to their owner.

A file consists of a line that names its format, a line of JSON (key, description of the content, checksums), and the
content: MLIR bytecode or an XLA executable. Python executes neither. A file that cannot be read or written is logged
and counts as a miss.
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
      about: the writer's description of the content.
      content: the bytes; may be empty.
    """

    about: dict[str, Any]
    content: bytes


class LoweredFiles:
    """The folder ``lowered`` in Tilewright's cache folder; any number of processes may use it at once, without locks.

    Its size is limited: the least recently used files are deleted first.

    Args:
      path: another folder; it is created on the first write.
      limit: maximum bytes in the folder.
    """

    def __init__(self, path: Path | None = None, limit: int = FOLDER_LIMIT) -> None:
        self._given = path
        self._limit = limit

    @property
    def path(self) -> Path:
        """The folder; the default is determined at each use, since the environment may change."""
        return cache_folder("lowered") if self._given is None else self._given

    def get(self, key: Document) -> LoweredFile | None:
        """The entry of a key, or None if it is missing or damaged."""
        path = self.path / _file_name(key)
        try:
            if not _only_owner_can_write(self.path, stat.S_ISDIR) or not _only_owner_can_write(path, stat.S_ISREG):
                return None
            found = _parsed(read_file(path, FILE_LIMIT), key)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("the lowered kernel in %s is not used: %s", path, error)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # the order of deletion
        return found

    def has(self, key: Document) -> bool:
        """True if there is a file for a key; it may be damaged."""
        return (self.path / _file_name(key)).exists()

    def put(self, key: Document, about: Document, content: bytes) -> bool:
        """Writes an entry, replacing an earlier one; returns False if that failed, and logs the reason."""
        header = {"key": key, "about": about, "bytes": len(content), "sha256": _digest(content)}
        text = canonical_json({**header, "checksum": _checksum(header)}).encode()
        data = _MAGIC + text + b"\n" + content
        path = self.path / _file_name(key)
        if len(data) > FILE_LIMIT:
            logger.info("a lowered kernel of %d bytes is not kept, the limit is %d", len(data), FILE_LIMIT)
            return False
        try:
            make_folder(self.path)
            if not _only_owner_can_write(self.path, stat.S_ISDIR):
                return False
            replace_file(path, data, mode=0o600)
            self._trim()
        except OSError as error:
            logger.warning("a lowered kernel cannot be kept in %s: %s", path, error)
            return False
        return True

    def usage(self) -> tuple[int, int]:
        """The number of entries and their total bytes."""
        sizes = [status.st_size for _, status in self._entries()]
        return len(sizes), sum(sizes)

    def clear(self) -> int:
        """Deletes all entries, damaged ones too, and returns their number; leaves foreign files."""
        self._sweep(0.0)
        return sum(_unlink(path) for path, _ in self._entries())

    def _entries(self) -> list[tuple[Path, os.stat_result]]:
        """The files of entries, least recently used first."""
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
        """Deletes the least recently used entries beyond the limit, and temporary files of killed processes."""
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
    """The name of the file for a key: a readable prefix and a hash."""
    text = f"{key.get('op', '')}-{key.get('stage', '')}-{key.get('platform', 'results')}"
    prefix = re.sub(r"[^A-Za-z0-9_.]+", "-", text)[-64:].lstrip("-.")
    return f"{prefix}-{_digest(canonical_json(key).encode())[:32]}.lowered"


def _only_owner_can_write(path: Path, kind: Callable[[int], bool]) -> bool:
    """True if only the owner can have written a file or folder; otherwise logs that it is not used."""
    # The folder may be a symbolic link made by its owner; an entry must not be one.
    status = os.stat(path) if kind is stat.S_ISDIR else os.lstat(path)
    if kind(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022:
        return True
    logger.warning("%s is not used for lowered kernels: it is not its owner's alone", path)
    return False


def _parsed(data: bytes, key: Document) -> LoweredFile:
    """Parses an entry from the bytes of a file.

    Raises:
      ValueError: the bytes are not an entry, are damaged, or belong to another key.
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
