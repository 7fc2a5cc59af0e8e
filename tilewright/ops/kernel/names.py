"""The names of kernels: which class has one, and who must forget its configs when another takes its place."""

import abc
import json
import weakref
from collections.abc import Hashable

# The class that has a name and version, and what holds configs by them. A name stays taken when its kernels are gone:
# their configs are still there.
_OWNERS: "dict[tuple[str, str], tuple[str, weakref.ref[type]]]" = {}
_MEMORIES: "weakref.WeakSet[RemembersConfigs]" = weakref.WeakSet()


class RemembersConfigs(abc.ABC):
    """Something that holds configs in memory by the keys of invocations."""

    @abc.abstractmethod
    def forget(self, name: str, version: str) -> None:
        """Drops the configs of the kernels of that name and version."""


def remembers_configs(memory: RemembersConfigs) -> None:
    """Has an object told, as long as it lives, when a kernel's class is replaced."""
    _MEMORIES.add(memory)


def key_is_of(key: Hashable, name: str, version: str) -> bool:
    """Whether a key is that of an invocation of a kernel of that name and version."""
    try:
        described = json.loads(key) if isinstance(key, str) else None
    except ValueError:
        return False
    return isinstance(described, dict) and (described.get("op"), described.get("version")) == (name, version)


def claim(name: str, version: str, kind: type) -> None:
    """Makes a class the owner of a name and version.

    Raises:
      ValueError: a class of another qualified name is.
    """
    qualified = f"{kind.__module__}:{kind.__qualname__}"
    owner, known = _OWNERS.get((name, version), (qualified, None))
    if owner != qualified:
        raise ValueError(
            f"the kernel {qualified} has the {name=} and {version=} of {owner}, whose configs it would share; "
            "give it another name or version"
        )
    if known is None or known() is not kind:
        _OWNERS[name, version] = (qualified, weakref.ref(kind))
    if known is not None and known() is not kind:
        for memory in list(_MEMORIES):
            memory.forget(name, version)
