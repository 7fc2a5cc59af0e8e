"""Compiled groups in installed wheels: found without importing anything, and used only if they match exactly.

A wheel has each group in a folder ``tilewright_kernels/cu13/<name>``, for CUDA 13, with ``library.so`` and
``record.json``. A group is used if table, group, architecture, generated sources, our headers and flags are equal, and
if its bytes match the record, whichever nvcc and CUTLASS made it. The files' owner and mode are not checked: a user who
can write beside Python's modules can change the modules, which run in any case. The hash detects truncated copies and
folders that mix two versions.
"""

import ctypes
import dataclasses
import functools
import hashlib
import importlib.machinery
import logging
import re
import sys
from pathlib import Path

import jax
import msgspec

from tilewright.kernels.cuda.cache import LIBRARY, RECORD
from tilewright.ops.utils.folders import read_file

logger = logging.getLogger(__name__)

NAMESPACE = "tilewright_kernels"
"""The namespace package into which the wheels for each CUDA version put their folders."""

SCHEMA = 1

FIRST_DRIVERS = {12: "525", 13: "580"}
"""The first driver for each major version of CUDA, for messages."""

_CUDA = re.compile(r"cu(\d+)")
_RECORD_LIMIT = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class ShippedKey:
    """The key of a shipped group; it depends neither on the compiler nor on jaxlib nor on header packages.

    Attributes:
      target: nvcc's name of the architecture, such as "90a".
      content: hash of generated sources, our headers and flags.
    """

    table: str
    group: str
    target: str
    content: str

    @property
    def beginning(self) -> str:
        """The common beginning of its folders' names, for any architecture and content."""
        return f"{self.table}-{self.group}-sm_"

    @property
    def prefix(self) -> str:
        """The beginning of its folders' names; several such folders may exist, with different bytes."""
        return f"{self.beginning}{self.target}-{self.content[:24]}-"


class ShippedRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The record beside a shipped object.

    Attributes:
      ffi: version of XLA's FFI headers that it was compiled with.
      cuda: version of the CUDA runtime that is linked into it.
      compiler: the compiler, for people.
      packages: hashes of the header packages that it was compiled with, for people.
      sha256: hash of the object.
      seconds: compile time.
    """

    schema: int
    table: str
    group: str
    target: str
    content: str
    ffi: tuple[int, int]
    cuda: tuple[int, int]
    compiler: str
    packages: dict[str, str]
    sha256: str
    seconds: float

    @property
    def key(self) -> ShippedKey:
        return ShippedKey(self.table, self.group, self.target, self.content)

    @property
    def folder(self) -> str:
        """The name of its folder, from which the name of its FFI target is derived: no other object has it."""
        return f"{self.key.prefix}{self.sha256[:12]}"


def find_shipped(key: ShippedKey) -> Path | None:
    """The shared object of a group in an installed wheel, usable here, for the newest CUDA.

    An unusable one is a miss, and the reason is logged once; the result is cached for the process.
    """
    return _find(key, shipped_folders())


def shipped_folders() -> tuple[Path, ...]:
    """The folders of the installed wheels, those for the newest CUDA first."""
    return _folders(tuple(sys.path))


@functools.lru_cache(maxsize=8)
def _folders(path: tuple[str, ...]) -> tuple[Path, ...]:
    # Search paths only: other finders, such as those of editable installations, may run arbitrary code.
    spec = importlib.machinery.PathFinder.find_spec(NAMESPACE, list(path))
    namespace_folders = () if spec is None else spec.submodule_search_locations or ()
    entries = (entry for namespace_folder in namespace_folders for entry in _entries(Path(namespace_folder)))
    found = [(int(match[1]), entry) for entry in entries if (match := _CUDA.fullmatch(entry.name))]
    return tuple(entry for _, entry in sorted(found, key=lambda each: -each[0]))


@functools.lru_cache(maxsize=64)
def _entries(folder: Path) -> tuple[Path, ...]:
    try:
        return tuple(sorted(folder.iterdir()))
    except OSError:
        return ()


@functools.lru_cache(maxsize=4096)
def _find(key: ShippedKey, folders: tuple[Path, ...]) -> Path | None:
    for folder in folders:
        group = [entry for entry in _entries(folder) if entry.name.startswith(key.beginning)]
        # Narrowed from the group to its exact content, so that a warning can say what differs.
        of_target = [entry for entry in group if entry.name.startswith(f"{key.beginning}{key.target}-")]
        matching = [entry for entry in of_target if entry.name.startswith(key.prefix)]
        for entry in matching:
            reason = _reason_not_usable(entry, key)
            if not reason:
                return entry / LIBRARY
            logger.warning("the shipped kernel %s is not used: %s", entry, reason)
        if of_target and not matching:
            reason = "it was compiled from other sources, those of another version of Tilewright"
            logger.warning("the shipped kernel %s is not used: %s", of_target[0], reason)
        if group and not of_target:
            targets = {entry.name.removeprefix(key.beginning).partition("-")[0] for entry in group}
            architectures = ", ".join(f"sm_{target}" for target in sorted(targets))
            logger.warning(
                "%s ships %s %s for %s, not for sm_%s", folder, key.table, key.group, architectures, key.target
            )
    return None


def _reason_not_usable(folder: Path, key: ShippedKey) -> str:
    """The reason why a shipped object cannot be used; empty if it can."""
    try:
        record = msgspec.json.decode(read_file(folder / RECORD, _RECORD_LIMIT), type=ShippedRecord)
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        return f"its record cannot be read: {error}"
    if record.schema != SCHEMA or record.folder != folder.name or record.key != key:
        return "its record is that of another object"
    reason = _ffi_reason(record.ffi) or _driver_reason(record.cuda[0])
    if reason:
        return reason
    library = folder / LIBRARY
    try:
        if hashlib.sha256(library.read_bytes()).hexdigest() != record.sha256:
            return "its bytes are not those that were compiled"
        ctypes.CDLL(str(library))  # fails if it is for another processor architecture or a newer C library
    except OSError as error:
        return f"it cannot be loaded: {error}"
    return ""


def _ffi_reason(compiled: tuple[int, int]) -> str:
    """Applies XLA's rule: it accepts handlers of older versions of its interface, and refuses newer ones."""
    available = ffi_version()
    if compiled[0] == available[0] and compiled[1] <= available[1]:
        return ""
    versions = [".".join(map(str, each)) for each in (compiled, available)]
    return f"it needs version {versions[0]} of XLA's FFI, and jaxlib has {versions[1]}"


@functools.cache
def ffi_version() -> tuple[int, int]:
    """The version of XLA's FFI in jaxlib, read from its headers."""
    text = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text(encoding="utf-8")
    numbers = dict(re.findall(r"^#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", text, re.MULTILINE))
    return int(numbers["MAJOR"]), int(numbers["MINOR"])


def _driver_reason(cuda: int) -> str:
    """The reason why the driver cannot run code linked with this major version of CUDA; empty without a driver.

    A driver runs code that any release of its own or an older CUDA compiled for the device.
    """
    driver = driver_version()
    if driver is None or driver[0] >= cuda:
        return ""
    first = f", which comes with driver {FIRST_DRIVERS[cuda]}" if cuda in FIRST_DRIVERS else ""
    return f"it needs a driver for CUDA {cuda}{first}; this machine's is for CUDA {driver[0]}.{driver[1]}"


@functools.cache
def driver_version() -> tuple[int, int] | None:
    """The newest CUDA that this machine's driver supports, such as (13, 0); ``None`` without a driver."""
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10
