"""The registry of kernel names: the class that owns each, and the caches to clear when another class replaces it."""

import abc
import json
import weakref
from collections.abc import Hashable

# The class that owns a name and version. A name stays owned after its kernels are gone, since their configs remain.
_OWNERS: "dict[tuple[str, str], tuple[str, weakref.ref[type]]]" = {}
_CACHES: "weakref.WeakSet[ConfigHolder]" = weakref.WeakSet()


class ConfigHolder(abc.ABC):
    """An object that keeps configs in memory by the keys of invocations."""

    @abc.abstractmethod
    def forget(self, name: str, version: str) -> None:
        """Drops the configs of the kernels of that name and version."""


def register_config_holder(memory: ConfigHolder) -> None:
    """Registers an object, for its lifetime, to be told when a kernel's class is replaced."""
    _CACHES.add(memory)


def key_is_of(key: Hashable, name: str, version: str) -> bool:
    """True if the key is that of an invocation of a kernel with that name and version."""
    try:
        described = json.loads(key) if isinstance(key, str) else None
    except ValueError:
        return False
    return isinstance(described, dict) and (described.get("op"), described.get("version")) == (name, version)


def claim(name: str, version: str, kind: type) -> None:
    """Makes a class the owner of a name and version.

    Raises:
      ValueError: a class with another qualified name is the owner.
    """
    qualified_name = f"{kind.__module__}:{kind.__qualname__}"
    owner, owner_class = _OWNERS.get((name, version), (qualified_name, None))
    if owner != qualified_name:
        raise ValueError(
            f"the kernel {qualified_name} has the {name=} and {version=} of {owner}, whose configs it would share; "
            "give it another name or version"
        )
    if owner_class is None or owner_class() is not kind:
        _OWNERS[name, version] = (qualified_name, weakref.ref(kind))
    if owner_class is not None and owner_class() is not kind:
        for memory in list(_CACHES):
            memory.forget(name, version)
