"""The lock file: tuned configs pinned by hashes, so that every process of a job makes the same choices."""

import dataclasses
import functools
import hashlib
import json
import logging
import os
import shlex
import threading
from typing import Any, Literal, get_args

from tilewright.errors import LockError
from tilewright.ops.config.persistent import REBUILD_ERRORS, parse_document, rebuild_config, tagged_config
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.utils.describe import describe_key
from tilewright.ops.utils.device import local_devices
from tilewright.ops.utils.fingerprint import device_fingerprint, toolchain_fingerprint
from tilewright.ops.utils.folders import absolute, locked, read_file, replace_file
from tilewright.ops.utils.serialize import Json, canonical_json
from tilewright.ops.utils.stable_ids import with_former_names

logger = logging.getLogger(__name__)

SCHEMA = 1
LOCK_LIMIT = 1 << 30

Miss = Literal["allow", "error"]

_LACKS = "it lacks the call"


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """The locked config of one call.

    Attributes:
      shapes: the call in short form, for people.
      key: the cache key of the call.
      config: the config in its tagged JSON form.
      source: hash of the implementation's source at the time of the decision.
    """

    op: str
    direction: str
    shapes: str
    key: str
    config: Json
    source: str

    def __post_init__(self) -> None:
        for name in ("op", "direction", "shapes", "key", "source"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name}={getattr(self, name)!r} of a decision must be a string")
        parsed_key = key_fields(self.key)
        if (parsed_key.get("op"), parsed_key.get("direction")) != (self.op, self.direction):
            raise ValueError(f"{self.op=} {self.direction=} do not fit the decision's key {self.key!r}")

    @classmethod
    def of(cls, key: str, config: object, source: str) -> "Decision":
        """Makes the decision for a call.

        Raises:
          TypeError: the config has no JSON form, or would not survive the round trip.
          ValueError: the key is not that of an invocation.
        """
        parsed_key = key_fields(key)
        return cls(
            parsed_key.get("op", ""),
            parsed_key.get("direction", ""),
            describe_key(key),
            key,
            tagged_config(config),
            source,
        )

    @property
    def sha256(self) -> str:
        """The hash that detects alterations."""
        return _sha256(dataclasses.asdict(self))

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"sha256": self.sha256}

    @classmethod
    def of_json(cls, payload: object) -> "Decision":
        names = {field.name for field in dataclasses.fields(cls)} | {"sha256"}
        if not isinstance(payload, dict) or payload.keys() != names:
            raise ValueError(f"a decision has the fields {sorted(names)}, not {payload!r}")
        decision = cls(**{name: value for name, value in payload.items() if name != "sha256"})
        if decision.sha256 != payload["sha256"]:
            raise ValueError(f"the decision on {decision.op} ({decision.direction}) for {decision.shapes} was altered")
        return decision


@dataclasses.dataclass(frozen=True, eq=False)
class Lock:
    """The configs that every process of a job must run with.

    Two locks are equal if their hashes are. Equal decisions give equal bytes. Locks of the same device and toolchain
    merge with ``|``; if both decide a call, the right operand wins.

    Attributes:
      device: fingerprint of the device that all decisions are for.
      toolchain: versions of the packages that compiled the candidates.
      decisions: one for each call, sorted.
    """

    device: str
    toolchain: dict[str, str]
    decisions: tuple[Decision, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.device, str) or not self.device:
            raise ValueError(f"{self.device=} of a lock must be the fingerprint of a device")
        if not isinstance(self.toolchain, dict) or not all(isinstance(v, str) for v in self.toolchain.values()):
            raise ValueError(f"{self.toolchain=} of a lock must map names to versions")
        if not all(isinstance(decision, Decision) for decision in self.decisions):
            raise ValueError(f"{self.decisions=} of a lock must be Decisions")
        others = sorted({str(key_fields(d.key).get("device")) for d in self.decisions} - {self.device})
        if others:
            raise ValueError(f"a lock is of one device, {self.device!r}; it has decisions for {others}")
        ordered = sorted(self.decisions, key=lambda d: (d.op, d.direction, d.shapes, d.key))
        object.__setattr__(self, "decisions", tuple(ordered))
        if len(self._by_key) != len(ordered):
            raise ValueError("a lock decides each call once; this one has several decisions for one key")

    @functools.cached_property
    def _by_key(self) -> dict[str, Decision]:
        return {decision.key: decision for decision in self.decisions}

    @functools.cached_property
    def _content(self) -> dict[str, Any]:
        decisions = [decision.as_json() for decision in self.decisions]
        return {"schema": SCHEMA, "device": self.device, "toolchain": self.toolchain, "decisions": decisions}

    @functools.cached_property
    def sha256(self) -> str:
        """The hash over the whole lock."""
        return _sha256(self._content)

    def get(self, key: str) -> Decision | None:
        """The decision for the call with this key, current or former."""
        if key in self._by_key:
            return self._by_key[key]
        return next((self._by_key[each] for each in with_former_names(key) if each in self._by_key), None)

    def __len__(self) -> int:
        return len(self.decisions)

    def __eq__(self, other: object) -> bool:
        return self.sha256 == other.sha256 if isinstance(other, Lock) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.sha256)

    def __repr__(self) -> str:
        return f"Lock({len(self)} decisions on {self.device}, sha256 {self.sha256[:12]})"

    def __or__(self, other: "Lock") -> "Lock":
        if not isinstance(other, Lock):
            return NotImplemented
        if self.device != other.device:
            raise ValueError(f"locks of two devices do not merge: {self.device!r} and {other.device!r}")
        if self.toolchain != other.toolchain:
            raise ValueError(f"locks of two toolchains do not merge: {_differences(self.toolchain, other.toolchain)}")
        return Lock(self.device, dict(self.toolchain), tuple((self._by_key | other._by_key).values()))

    def to_json(self) -> str:
        """The lock as readable JSON that depends only on its decisions."""
        return json.dumps(self._content | {"sha256": self.sha256}, indent=1, sort_keys=True, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> "Lock":
        """Reads what ``to_json`` wrote; white space and the order of fields do not matter.

        Raises:
          ValueError: the text is not a lock, has another schema, or was altered.
        """
        document = parse_document(text.encode() if isinstance(text, str) else text)
        if document.get("schema") != SCHEMA or document["schema"] is True:
            raise ValueError(f"its schema is {document.get('schema')!r}; this version of Tilewright reads {SCHEMA}")
        if document.keys() != {"schema", "device", "toolchain", "decisions", "sha256"}:
            raise ValueError(f"its fields are {sorted(document)}")
        if not isinstance(document["decisions"], list):
            raise ValueError(f"its decisions are {document['decisions']!r}, not a list")
        try:
            decisions = tuple(Decision.of_json(each) for each in document["decisions"])
            lock = cls(document["device"], document["toolchain"], decisions)
            altered = lock.sha256 != document["sha256"]
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
        if altered:
            raise ValueError("its content does not match its sha256: it was altered")
        return lock

    def save(self, path: str | os.PathLike[str]) -> None:
        """Replaces the content of a file by the lock, atomically.

        Raises:
          OSError: the file cannot be written.
        """
        replace_file(absolute(path), self.to_json().encode())

    def add_to(self, path: str | os.PathLike[str]) -> "Lock":
        """Merges the decisions into a lock file, replacing earlier ones for the same calls, and returns the merged
        lock.

        Several processes may add at the same time without losing each other's decisions, except on a file system
        without advisory locks.

        Raises:
          LockError: the file exists and cannot be used.
          OSError: the file cannot be written.
          ValueError: the file's lock is for another device or toolchain.
        """
        file = absolute(path)
        with locked(file.with_name(f".{file.name}.lock")):
            merged = Lock.load(file) | self if file.exists() else self
            merged.save(file)
        return merged

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Lock":
        """Reads a lock file.

        Raises:
          LockError: the file is missing, unreadable, damaged, altered, or of another schema.
        """
        file = absolute(path)
        try:
            return cls.from_json(read_file(file, LOCK_LIMIT))
        except FileNotFoundError as error:
            raise LockError(f"there is no lock file {file}; make it with: {_command(str(file))}") from error
        except OSError as error:
            raise LockError(f"the lock file {file} cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise LockError(
                f"the lock file {file} cannot be used: {error}; restore it, or delete it and make it anew with: "
                f"{_command(str(file))}"
            ) from error


@dataclasses.dataclass(frozen=True, slots=True)
class ActiveLock:
    """A lock that selection follows.

    Attributes:
      path: the lock's file; empty if it was made in this process.
      miss: the action for a call that the lock does not decide: "allow" continues with the next step of the chain,
        "error" raises.
    """

    lock: Lock
    path: str = ""
    miss: Miss = "allow"

    def __post_init__(self) -> None:
        _check_miss(self.miss)

    @property
    def name(self) -> str:
        """The lock's name for messages."""
        return self.path or f"given in the program (sha256 {self.lock.sha256[:12]})"

    def answer(self, inv: Invocation[Any, Any]) -> tuple[Any, str]:
        """The config of a call, or ``None`` and the reason: none if the lock does not concern the call's device."""
        config, why = self._answer(inv)
        if why and self.miss == "allow":
            call_text = f" for {describe_key(inv.key)}" if why == _LACKS else ""
            _log_once(f"the lock {self.name} does not decide {inv.kernel.name} ({inv.direction}){call_text}: {why}")
        return config, why

    def _answer(self, inv: Invocation[Any, Any]) -> tuple[Any, str]:
        if inv.device_fingerprint != self.lock.device:
            there = f"it is of {self.lock.device}, which this process does not have"
            return None, "" if _has_device(self.lock.device) else f"{there}; the call is for {inv.device_fingerprint}"
        decision = next(filter(None, map(self.lock.get, (inv.key, *inv.former_keys))), None)
        if decision is None:
            return None, _LACKS
        try:
            config = rebuild_config(decision.config, inv.kernel.config_type(inv))
        except REBUILD_ERRORS as error:
            return None, f"its config cannot be rebuilt: {error}"
        source = inv.kernel.source(config)
        if decision.source != source:
            return None, f"the source of the implementation is {source}, but {decision.source} was locked"
        if self.lock.toolchain != toolchain_fingerprint():
            why = f"another toolchain was locked: {_differences(self.lock.toolchain, toolchain_fingerprint())}"
            if self.miss == "error":
                return None, why
            _log_once(f"the lock {self.name} decides all the same, but {why}")
        return config, ""

    def refusal(self, inv: Invocation[Any, Any], why: str) -> str:
        """The error message for a call that must not run without a decision."""
        return (
            f"the lock {self.name} does not decide {inv.kernel.name} ({inv.direction}) for {describe_key(inv.key)}, "
            f"and a miss is an error: {why}. Nothing was measured; decide the call with: {_command(self.path)}"
        )


def active_lock(lock: Lock | str | os.PathLike[str], miss: Miss) -> ActiveLock:
    """Wraps a lock, or loads one from its file, for selection to follow.

    Raises:
      LockError: the file cannot be used.
      TypeError, ValueError: an argument has a wrong type or value.
    """
    if isinstance(lock, Lock):
        return ActiveLock(lock, miss=miss)
    if not isinstance(lock, str | os.PathLike):
        raise TypeError(f"{lock=} of type {type(lock).__name__} must be a Lock, the path of a lock file, or None")
    return ActiveLock(Lock.load(lock), str(absolute(lock)), miss)


def _check_miss(miss: object) -> None:
    if miss not in get_args(Miss):
        raise ValueError(f"{miss=} must be 'allow' or 'error'")


_READING = threading.Lock()


def environment_lock() -> ActiveLock | None:
    """The lock that ``TILEWRIGHT_LOCK`` names, with the mode ``TILEWRIGHT_LOCK_MISS``, read once per process.

    Raises:
      LockError: the variables are inconsistent, or the lock cannot be loaded.
    """
    with _READING:  # two threads must not read two states of the file
        return _read_environment()


@functools.cache
def _read_environment() -> ActiveLock | None:
    path, miss = os.environ.get("TILEWRIGHT_LOCK", ""), os.environ.get("TILEWRIGHT_LOCK_MISS", "") or "allow"
    if miss not in get_args(Miss):
        raise LockError(f"TILEWRIGHT_LOCK_MISS={miss!r} must be 'allow' or 'error'")
    if path:
        return active_lock(path, miss)  # type: ignore[arg-type]
    if miss == "error":
        raise LockError("TILEWRIGHT_LOCK_MISS=error needs a lock: set TILEWRIGHT_LOCK to the path of one")
    return None


@functools.cache
def _has_device(device: str) -> bool:
    """True if this process has a device with this fingerprint."""
    return any(device_fingerprint(each) == device for each in local_devices(device.partition(":")[0]))


@functools.lru_cache(maxsize=4096)
def _log_once(message: str) -> None:
    logger.warning("%s", message)


def _command(path: str) -> str:
    return f"tilewright tune TARGET --lock {shlex.quote(path) if path else 'FILE'}"


def _differences(locked: dict[str, str], here: dict[str, str]) -> str:
    names = sorted(name for name in locked.keys() | here.keys() if locked.get(name) != here.get(name))
    return ", ".join(f"{name} {locked.get(name, 'absent')} there and {here.get(name, 'absent')} here" for name in names)


def key_fields(key: str) -> dict[str, Any]:
    """Parses the cache key of a call; ``ValueError`` if it is not one."""
    try:
        fields = json.loads(key)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{key!r} is not the key of a call") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{key!r} is not the key of a call")
    return fields


def _sha256(data: object) -> str:
    return hashlib.sha256(canonical_json(data).encode()).hexdigest()
