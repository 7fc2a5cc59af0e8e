"""The shared object of a group in this process: its variants, their facts, and its FFI target."""

import ctypes
import dataclasses
import functools
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from tilewright.errors import BuildError
from tilewright.kernels.cuda.build import Group, locate
from tilewright.kernels.cuda.cache import BuildCache
from tilewright.kernels.cuda.requirements import FACT_FIELDS

ABI = 1

_lock = threading.Lock()
_loaded: dict[tuple[Path, Group], "Library"] = {}


@dataclasses.dataclass(frozen=True)
class Library:
    """A loaded group.

    Attributes:
      target: the name of its FFI target; it contains the hash of the group's sources.
      facts: by variant, in the form that predicates read.
    """

    target: str
    facts: Mapping[str, Mapping[str, int]]
    _functions: ctypes.CDLL
    _indices: Mapping[str, int]

    def workspace(self, variant: str, problem: Sequence[int]) -> int:
        """Bytes of scratch memory that a variant needs for a problem."""
        values = (ctypes.c_int64 * len(problem))(*problem)
        return int(self._functions.tilewright_workspace(self._indices[variant], values))

    @functools.cached_property
    def registered(self) -> str:
        """The name of the FFI target, registered with XLA."""
        # Locked: XLA refuses a second registration, and programs are lowered in several threads.
        with _lock:
            if self.target not in _registered:
                jax.ffi.register_ffi_target(
                    self.target, jax.ffi.pycapsule(self._functions.tilewright_call), platform="CUDA"
                )
                _registered.add(self.target)
        return self.target


_registered: set[str] = set()


def loaded(group: Group, cache: BuildCache) -> Library | None:
    """The library of a group that is loaded, or built or shipped and loadable; ``None`` if it does not exist."""
    known = _loaded.get((cache.path, group))
    if known is not None:
        return known
    found = locate(group, cache)  # verifies the object's bytes
    return None if found is None else _load(group, cache, found.path)


def load(group: Group, cache: BuildCache, path: Path) -> Library:
    """The library of a group that was just built."""
    return _loaded.get((cache.path, group)) or _load(group, cache, path)


def _load(group: Group, cache: BuildCache, path: Path) -> Library:
    with _lock:
        known = _loaded.get((cache.path, group))
        if known is None:
            known = _loaded[cache.path, group] = _open(path)
    return known


def _open(path: Path) -> Library:
    try:
        functions = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} cannot be loaded: {error}") from error
    functions.tilewright_abi.restype = ctypes.c_int64
    if functions.tilewright_abi() != ABI:
        raise BuildError(f"{path} speaks version {functions.tilewright_abi()} of our interface, not {ABI}")
    functions.tilewright_variant_count.restype = ctypes.c_int64
    functions.tilewright_variant_name.restype = ctypes.c_char_p
    functions.tilewright_variant_name.argtypes = [ctypes.c_int64]
    functions.tilewright_facts.restype = None
    functions.tilewright_facts.argtypes = [ctypes.c_int64, ctypes.POINTER(ctypes.c_int64)]
    functions.tilewright_workspace.restype = ctypes.c_int64
    functions.tilewright_workspace.argtypes = [ctypes.c_int64, ctypes.POINTER(ctypes.c_int64)]
    count = functions.tilewright_variant_count()
    names = [functions.tilewright_variant_name(index).decode() for index in range(count)]
    facts = {name: _facts(functions, index) for index, name in enumerate(names)}
    # The folder's name holds the hash of its sources: another version of a group has another target in this process.
    target = f"tilewright_{path.parent.name}".replace("-", "_")
    return Library(target, facts, functions, {name: index for index, name in enumerate(names)})


def _facts(functions: ctypes.CDLL, index: int) -> dict[str, int]:
    out = (ctypes.c_int64 * len(FACT_FIELDS))()
    functions.tilewright_facts(index, out)
    return dict(zip(FACT_FIELDS, out, strict=True))
