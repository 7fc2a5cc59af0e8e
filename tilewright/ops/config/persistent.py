"""The on-disk cache of configs: one file per entry, without locks, robust to damaged files."""

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import json
import logging
import os
import re
import sys
import threading
import time
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tilewright.ops.utils.fingerprint import toolchain_fingerprint
from tilewright.ops.utils.folders import absolute, cache_folder, make_folder, read_file, replace_file
from tilewright.ops.utils.serialize import Json, canonical_json, current_name, qualified_name, tagged, untagged
from tilewright.ops.utils.stable_ids import loaded_class, with_former_names

logger = logging.getLogger(__name__)

SCHEMA = 1
ENTRY_LIMIT = 16 << 20
EXPORT_LIMIT = 1 << 30
TEMPORARY_LIFETIME_S = 3600.0

_FIELDS = {
    "schema": int,
    "checksum": str,
    "key": object,
    "created": str,
    "config": object,
    "readable": str,
    "source": str,
    "toolchain": dict,
    "metadata": dict,
    "measurements": list,
}
_ENTRY_NAME = re.compile(r"[\w.\-]+-[0-9a-f]{32}\.json", re.ASCII)
_TEMPORARY_NAME = re.compile(r"\.[\w.\-]+\.\d+-[0-9a-f]{16}\.tmp", re.ASCII)

# Exceptions that a config's constructor may raise on fields that an older version of its class accepted.
REBUILD_ERRORS = (ValueError, RuntimeError, AssertionError)

Document = dict[str, Any]
Source = Callable[[Any], str]


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """The content of one file.

    Attributes:
      config: ``None`` if its type is not loaded in this process; ``readable`` still shows it.
      measurements: those given to `PersistentCache.put`, or plain JSON data if a type is not loaded.
      toolchain: versions of the packages that compiled the kernels.
      source: hash of the source that the config depends on.
      stale: measured with another toolchain or source than the present one, so not a hit.
    """

    key: Hashable
    config: Any
    readable: str
    measurements: tuple[Any, ...]
    metadata: dict[str, Any]
    toolchain: dict[str, str]
    source: str
    created: datetime.datetime
    stale: bool


class PersistentCache:
    """Maps keys to configs in a folder that any number of processes may share, also on a network file system.

    A file that cannot be read or written is logged and counts as a miss. Reading a file never imports a module: types
    are looked up among the loaded ones. Two caches merge by copying files.

    Args:
      path: the folder, ``~`` expanded; it is created on the first write. By default ``configs`` under
        ``TILEWRIGHT_CACHE_DIR`` or else under the user's cache folder, determined on first use.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._given = None if path is None else os.fspath(path)
        self._version = 0
        self._writes = 0
        self._lock = threading.Lock()

    @functools.cached_property
    def path(self) -> Path:
        """The folder of the entries."""
        return cache_folder("configs") if self._given is None else absolute(self._given)

    @property
    def version(self) -> int:
        """A number that grows with every change made through this object; other processes' changes do not count."""
        return self._version

    def state(self, op: str) -> str:
        """A text that changes with the entries of an op, also by other processes; empty if they cannot be listed."""
        try:
            stats = {each.name: each.stat() for each in self.path.glob(f"{op}-*.json")}
        except OSError:
            return ""
        found = sorted((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats.items())
        return hashlib.sha256(repr(found).encode()).hexdigest()

    def put(
        self,
        key: Hashable,
        cfg: object,
        *,
        measurements: Iterable[object] = (),
        metadata: Mapping[str, object] | None = None,
        source: str = "",
    ) -> bool:
        """Writes ``cfg`` under ``key``, replacing an earlier entry.

        Args:
          key: a string, or a value with a tagged JSON form.
          cfg: a value with a tagged JSON form that holds no arrays.
          measurements: every measurement of the tuning that found it.
          metadata: further remarks.
          source: hash of the source that the config depends on, compared by `get`.

        Returns:
          True if it was written; if not, the reason is logged.

        Raises:
          TypeError: an argument has no JSON form, or would not survive the round trip. Nothing is written then.
        """
        document = {
            "schema": SCHEMA,
            "checksum": "",
            "key": tagged(key),
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds"),
            "config": tagged_config(cfg),
            "readable": repr(cfg),
            "source": source,
            "toolchain": toolchain_fingerprint(),
            "metadata": tagged(dict(metadata or {})),
            "measurements": [tagged(item) for item in measurements],
        }
        document["checksum"] = _checksum(document)
        return self._write(document)

    def get(self, key: Hashable, *, expected_type: type | None = None, source: Source | None = None) -> Any | None:
        """The config under ``key``, or ``None`` if there is no usable one.

        Args:
          key: the key that was given to `put`.
          expected_type: a config of another type is a miss; without it any loaded type is accepted.
          source: the hash of the current source that a config depends on; an entry with another is stale, hence a miss.
        """
        entry = self._stored(key, expected_type, source)
        return None if entry is None or entry[1] else entry[0]

    def has_file(self, key: Hashable) -> bool:
        """True if there is a file for ``key``; it may turn out to be damaged or stale when it is read."""
        return any((self.path / _file_name(data)).is_file() for data in _forms(key))

    def stale_config(
        self, key: Hashable, *, expected_type: type | None = None, source: Source | None = None
    ) -> Any | None:
        """The config of an entry that is stale only by toolchain or source, as a first candidate of the next tuning."""
        entry = self._stored(key, expected_type, source)
        return entry[0] if entry is not None and entry[1] else None

    def _stored(self, key: Hashable, expected_type: type | None, source: Source | None) -> tuple[Any, bool] | None:
        """The config under a key, if it can be rebuilt, and whether it is stale."""
        document = self._load(key)
        config = None if document is None else self._config(document, expected_type)
        return None if document is None or config is None else (config, _stale(document, config, source))

    def entry(self, key: Hashable, *, expected_type: type | None = None, source: Source | None = None) -> Entry | None:
        """The whole entry under ``key``, stale or not; the arguments mean the same as in `get`."""
        document = self._load(key)
        if document is None:
            return None
        config = self._config(document, expected_type)
        if config is None and expected_type is not None:
            return None
        return _entry(document, config, source)

    def entries(self) -> list[Entry]:
        """Every intact entry, stale ones too."""
        return [_entry(document, self._config(document, None), None) for document in self._documents()]

    def remove(self, key: Hashable) -> bool:
        """Deletes the entry of ``key``; returns False if there was none."""
        return sum(self._unlink(_file_name(data)) for data in _forms(key)) > 0

    def clear(self) -> int:
        """Deletes all entries, damaged ones too, and returns their number; leaves foreign files."""
        self._sweep(lifetime_s=0.0)
        return sum(self._unlink(name) for name in self._names())

    def merge(self, other: "str | os.PathLike[str] | PersistentCache", *, overwrite: bool = False) -> int:
        """Copies newer entries from another folder, or all with ``overwrite``; returns how many."""
        cache = other if isinstance(other, PersistentCache) else PersistentCache(other)
        return sum(self._adopt(document, overwrite) for document in cache._documents())

    def export(self, file: str | os.PathLike[str]) -> int:
        """Writes every intact entry into one JSON file and returns their number.

        Raises:
          OSError: the file cannot be written.
        """
        documents = self._documents()
        replace_file(absolute(file), json.dumps({"schema": SCHEMA, "entries": documents}, indent=1).encode())
        return len(documents)

    def import_(self, file: str | os.PathLike[str], *, overwrite: bool = False) -> int:
        """Copies newer entries from an exported file, or all with ``overwrite``; returns how many.

        Damaged entries are logged and left out.

        Raises:
          OSError: the file cannot be read.
          ValueError: the file is not an export.
        """
        source = os.path.expanduser(file)
        exported = parse_document(read_file(source, EXPORT_LIMIT))
        if exported.get("schema") != SCHEMA or not isinstance(exported.get("entries"), list):
            raise ValueError(f"{source} is not an export of schema {SCHEMA}")
        adopted = damaged = 0
        for document in exported["entries"]:
            try:
                _verify(document)
            except ValueError as error:
                damaged += 1
                logger.warning("an entry of %s is left out: %s", source, error)
            else:
                adopted += self._adopt(document, overwrite)
        logger.info("took %d of %d entries from %s, %d damaged", adopted, len(exported["entries"]), source, damaged)
        return adopted

    def __contains__(self, key: Hashable) -> bool:
        return self.get(key) is not None

    def __iter__(self) -> Iterator[Hashable]:
        """The keys of all intact entries at this moment, stale ones too."""
        return iter([untagged_if_loaded(document["key"]) for document in self._documents()])

    def __len__(self) -> int:
        return len(self._documents())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def _load(self, key: Hashable) -> Document | None:
        for data in _forms(key):
            document = self._load_file(_file_name(data))
            if document is not None and canonical_json(document["key"]) == canonical_json(data):
                return document
            if document is not None:
                logger.warning("%s holds another key than %r", _file_name(data), key)
        return None

    def _load_file(self, name: str) -> Document | None:
        try:
            document = _verify(parse_document(read_file(self.path / name, ENTRY_LIMIT)))
            if _file_name(document["key"]) != name:
                raise ValueError("its key belongs under another name")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("no config is read from %s: %s", name, error)
            return None
        return document

    def _config(self, document: Document, expected_type: type | None) -> Any | None:
        try:
            return rebuild_config(document["config"], expected_type)
        except REBUILD_ERRORS as error:
            _say_unused(_file_name(document["key"]), _class_name(document["config"]), error)
            return None

    def _documents(self) -> list[Document]:
        documents = (self._load_file(name) for name in self._names())
        return [document for document in documents if document is not None]

    def _names(self, pattern: re.Pattern[str] = _ENTRY_NAME) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self.path) if pattern.fullmatch(name))
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            logger.warning("the config cache cannot be listed: %s", error)
            return []

    def _adopt(self, document: Document, overwrite: bool) -> bool:
        existing = None if overwrite else self._load_file(_file_name(document["key"]))
        if existing is not None and _created(existing) >= _created(document):
            return False
        return self._write(document)

    def _write(self, document: Document) -> bool:
        data = json.dumps(document, indent=1).encode()
        name = _file_name(document["key"])
        if len(data) > ENTRY_LIMIT:
            logger.warning("%s is not written: %d bytes are more than %d", name, len(data), ENTRY_LIMIT)
            return False
        try:
            make_folder(self.path)
            self._writes += 1
            if self._writes % 256 == 1:
                self._sweep(TEMPORARY_LIFETIME_S)
            replace_file(self.path / name, data)
        except (OSError, ValueError) as error:
            logger.warning("%s is not written: %s", name, error)
            return False
        self._changed()
        return True

    def _unlink(self, name: str) -> bool:
        try:
            os.unlink(self.path / name)
        except FileNotFoundError:
            return False
        except (OSError, ValueError) as error:
            logger.warning("%s is not removed: %s", name, error)
            return False
        self._changed()
        return True

    def _changed(self) -> None:
        with self._lock:
            self._version += 1

    def _sweep(self, lifetime_s: float) -> None:
        """Deletes temporary files of processes that were killed during a write."""
        for name in self._names(_TEMPORARY_NAME):
            with contextlib.suppress(OSError):
                if time.time() - os.stat(self.path / name).st_mtime >= lifetime_s:
                    os.unlink(self.path / name)


def _class_name(config: Json) -> str:
    """The name that an entry has for the class of its config; empty for a config of plain data."""
    names = (config.get(tag) for tag in ("$dataclass", "$namedtuple", "$enum")) if isinstance(config, dict) else ()
    return next((name for name in names if isinstance(name, str)), "")


class _OfScriptError(ValueError):
    """The class of a config belongs to a script that was run."""


def _say_unused(file: str, kind: str, error: Exception) -> None:
    """Logs that a config is not used; of a class that a script defines once, with the remedy."""
    if isinstance(error, _OfScriptError):
        _say_of_script(kind, file, str(error))
    else:
        logger.warning("the config of %s is not used: %s", file, error)


_SAID: set[str] = set()
"""The classes of scripts whose configs were said to be of no use in this process."""


def _say_of_script(kind: str, file: str, reason: str) -> None:
    if kind in _SAID:
        return
    _SAID.add(kind)
    logger.warning(
        "the config of %s is not used: %s; a script that is run has classes of __main__, which are not those that a "
        "program has by importing it: move %s, and the kernel that it is a config of, into a module that both import, "
        "and tune again",
        file, reason, kind.rpartition(":")[2],
    )  # fmt: skip


def _forms(key: Hashable) -> Iterator[Json]:
    """Yields the tagged form of a key, and then the forms in which earlier versions wrote it."""
    data: Json = tagged(key)
    yield data
    # The key of an invocation is itself JSON, in a string.
    if isinstance(data, str):
        yield from with_former_names(data)
    else:
        yield from map(json.loads, with_former_names(json.dumps(data)))


def _file_name(key: Json) -> str:
    """The name of the file for a tagged key: a readable prefix and a hash."""
    digest = hashlib.sha256(canonical_json(key).encode()).hexdigest()[:32]
    text = key if isinstance(key, str) else canonical_json(key)
    with contextlib.suppress(ValueError, RecursionError):
        parsed = json.loads(text)  # an invocation's key is itself JSON that names its op
        if isinstance(parsed, dict) and "op" in parsed:
            text = f"{parsed['op']}-{parsed.get('direction', '')}"
    prefix = re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-.")[-48:].lstrip("-.")
    return f"{prefix or 'entry'}-{digest}.json"


def _checksum(document: Document) -> str:
    content = canonical_json({name: value for name, value in document.items() if name != "checksum"})
    return f"sha256:{hashlib.sha256(content.encode()).hexdigest()}"


def parse_document(data: bytes) -> Document:
    """Parses a JSON object from a file that may hold anything; ``ValueError`` if it is not one."""
    try:
        document = json.loads(data.decode())
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(document, dict):
        raise ValueError(f"a JSON object was expected, not {type(document).__name__}")
    return document


def _verify(document: object) -> Document:
    """Returns the document if it is an intact entry, else raises ``ValueError``."""
    if not isinstance(document, dict) or document.get("schema") != SCHEMA or document["schema"] is True:
        raise ValueError(f"not an entry of schema {SCHEMA}")
    if document.keys() != _FIELDS.keys():
        raise ValueError(f"its fields are {sorted(document)}, not {sorted(_FIELDS)}")
    try:
        checksum = _checksum(document)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if document["checksum"] != checksum:
        raise ValueError("its checksum does not match its content")
    for name, kind in _FIELDS.items():
        if not isinstance(document[name], kind):
            raise ValueError(f"its field {name!r} is {document[name]!r}")
    if _created(document).tzinfo is None:
        raise ValueError(f"its time {document['created']!r} lacks a time zone")
    return document


def _created(document: Document) -> datetime.datetime:
    return datetime.datetime.fromisoformat(document["created"])


def _stale(document: Document, config: object, source: Source | None) -> bool:
    if document["toolchain"] != toolchain_fingerprint():
        return True
    return config is not None and source is not None and document["source"] != source(config)


def _entry(document: Document, config: object, source: Source | None) -> Entry:
    return Entry(
        key=untagged_if_loaded(document["key"]),
        config=config,
        readable=document["readable"],
        measurements=tuple(untagged_if_loaded(item) for item in document["measurements"]),
        metadata=untagged_if_loaded(document["metadata"]),
        toolchain=document["toolchain"],
        source=document["source"],
        created=_created(document),
        stale=_stale(document, config, source),
    )


def untagged_if_loaded(data: Json) -> Any:
    """The value of tagged JSON if all its types are loaded, else ``data`` unchanged; imports nothing."""
    try:
        return untagged(data, resolve=_find_loaded)
    except REBUILD_ERRORS:
        return data


def rebuild_config(data: Json, expected_type: type | None) -> Any:
    """Rebuilds a config of loaded types from its tagged form; raises one of ``REBUILD_ERRORS`` if that fails."""
    if expected_type is None:
        return untagged(data, resolve=_find_loaded)
    expected = qualified_name(expected_type)
    for tag in ("$dataclass", "$namedtuple", "$enum"):
        if isinstance(data, dict) and current_name(data.get(tag, expected)) != expected:
            raise _unusable(f"it is a {data[tag]}, not a {expected}", str(data[tag]), expected)
    config = untagged(
        data, resolve=lambda name: expected_type if current_name(name) == expected else _find_loaded(name)
    )
    if type(config) is not expected_type:
        raise _unusable(f"it is a {(found := qualified_name(type(config)))}, not a {expected}", found, expected)
    return config


def _find_loaded(qualified: str) -> Any:
    """The object that a qualified name refers to among the loaded modules; runs no code to find it."""
    module, _, name = qualified.partition(":")
    found: Any = loaded_class(qualified)
    if found is not None:
        return found
    found = sys.modules.get(module)
    for part in name.split("."):
        # Not getattr, which may run a module's __getattr__ and thereby import something.
        found = vars(found).get(part) if isinstance(found, types.ModuleType | type) else None
    if found is None:
        raise _unusable(f"{qualified} is not loaded", qualified)
    return found


def _unusable(message: str, *classes: str) -> ValueError:
    """The error for a config of a class that is not the one that a program has."""
    return (_OfScriptError if any(name.startswith("__main__:") for name in classes) else ValueError)(message)


def tagged_config(cfg: object) -> Json:
    """The tagged form of a config, for `rebuild_config`; ``TypeError`` if it would not survive the round trip."""
    found: dict[str, type] = {}
    data: Json = tagged(cfg, found=found)
    try:
        rebuilt = untagged(data, resolve=lambda name: found.get(name) or _find_loaded(name))
    except ValueError as error:
        raise TypeError(f"{cfg!r} cannot be rebuilt from its fields: {error}") from error
    text = canonical_json(data)
    equal = rebuilt == cfg or '"$float":"nan"' in text  # a NaN differs from itself
    if '"$array":' in text or type(rebuilt) is not type(cfg) or tagged(rebuilt) != data or not equal:
        raise TypeError(f"{cfg!r} would come back from JSON as {rebuilt!r}")
    return data
