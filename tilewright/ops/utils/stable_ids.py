"""Ids by which files name classes, so that files stay readable after a class moves to another module.

An id is ``"package/Name"``, such as ``"tilewright/masks.CausalMask"``. Cache keys, tuned tables, lock files and labels
name a class by its id if it has one, and else by ``"module:Qualname"``.
"""

import contextlib
import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_ID = re.compile(r"[A-Za-z_]\w*/[\w.]+", re.ASCII)
_NAME_IN_JSON = re.compile(r'"([\w.]+:[\w.]+)"', re.ASCII)
_ID_IN_JSON = re.compile(r'"([A-Za-z_]\w*/[\w.]+)"', re.ASCII)

type Fields = Mapping[str, Any]

_CLASSES: dict[str, type] = {}
_IDS: dict[type, str] = {}
_CURRENT: dict[str, str] = {}
_FORMER: dict[str, tuple[str, ...]] = {}
_CONVERTED: dict[str, Callable[[Fields], Fields]] = {}


def stable_id[T: type](
    id: str, *, formerly: Iterable[str] = (), converted: Callable[[Fields], Fields] | None = None
) -> Callable[[T], T]:
    """Decorates a class with the id that files use to name it.

    If a process reads the id before the class is defined, the package is imported; if that does not define the class,
    ``load(id)`` of the package's module ``stable_ids`` is called, if there is such a module.

    Args:
      id: ``"package/Name"`` with an importable top-level package; it must never be given to another class.
      formerly: the names ``"module:Qualname"`` that earlier versions wrote for the class, the latest first.
      converted: maps the fields of a dataclass that any version wrote to those that the class has.

    Raises:
      ValueError: the id is malformed, or belongs to another class.
    """
    if not _ID.fullmatch(id):
        raise ValueError(f"{id=} is not of the form 'package/Name'")
    names = tuple(formerly)

    def decorate(kind: T) -> T:
        known = _CLASSES.get(id)
        # A class that is defined again, as when a notebook cell runs twice, replaces the previous one.
        if known is not None and (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):
            raise ValueError(f"{id=} of {kind!r} is the id of {known!r}")
        _CLASSES[id], _IDS[kind], _FORMER[id] = kind, id, names
        _CURRENT.update(dict.fromkeys(names, id))
        if converted is not None:
            _CONVERTED[id] = converted
        return kind

    return decorate


id_of = _IDS.get
"""The id of a class itself, or ``None``; ids of its base classes do not count."""


def current_fields(kind: type, fields: Fields) -> Fields:
    """The fields of a dataclass, from those that any version wrote."""
    converted = _CONVERTED.get(_IDS.get(kind, ""))
    return fields if converted is None else converted(fields)


def is_id(name: str) -> bool:
    """Distinguishes an id from a name ``"module:Qualname"``."""
    return "/" in name


def loaded_class(name: object) -> type | None:
    """The loaded class of an id or former name, else None. Imports nothing, since a file may name any module."""
    if not isinstance(name, str):
        return None
    return _CLASSES.get(_CURRENT.get(name, name))


def find_class(name: str) -> type | None:
    """The class of an id or former name, imported if necessary; ``None`` if there is none."""
    package = re.split(r"[./:]", name, maxsplit=1)[0]
    if loaded_class(name) is None:
        with contextlib.suppress(ImportError):
            importlib.import_module(package)
    if loaded_class(name) is None:
        try:
            finder = importlib.import_module(f"{package}.stable_ids")
        except ImportError:
            return None
        finder.load(name)
    return loaded_class(name)


def with_current_names(text: str) -> str:
    """Replaces former class names in JSON text by ids; imports the classes of packages already in use."""
    return _NAME_IN_JSON.sub(lambda match: f'"{_current(match[1])}"', text) if ":" in text else text


def _current(name: str) -> str:
    if name not in _CURRENT and re.split(r"[.:]", name, maxsplit=1)[0] in sys.modules:
        find_class(name)
    return _CURRENT.get(name, name)


def with_former_names(text: str) -> list[str]:
    """JSON text as earlier versions wrote it, the latest first; empty if it names no class that was renamed."""
    ids = {match[1] for match in _ID_IN_JSON.finditer(text)}
    depth = max((len(_FORMER.get(id, ())) for id in ids), default=0)
    return [_ID_IN_JSON.sub(functools.partial(_former, generation), text) for generation in range(depth)]


def _former(generation: int, match: re.Match[str]) -> str:
    names = _FORMER.get(match[1], ()) or (match[1],)
    return f'"{names[min(generation, len(names) - 1)]}"'
