"""Kernel variants, and the table of them: the first variant whose requirements a call meets is launched."""

import abc
import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tilewright.kernels.cuda.requirements import Field, Predicate
from tilewright.kernels.cuda.toolchain import HeaderPackage

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")

# Field names with another meaning in the generated C++; nvcc reports other clashes.
_TAKEN = frozenset({"default", "double", "float", "int", "long", "new", "register", "short", "signed", "unsigned"})
_TAKEN |= {"describe", "kFieldCount", "problem", "text", "unpack", "values"}


class Variant(abc.ABC):
    """One instance of a kernel template; subclasses are frozen dataclasses whose fields are its template arguments."""

    __slots__ = ()

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """An identifier, unique in the table."""

    @property
    @abc.abstractmethod
    def group(self) -> str:
        """An identifier; the variants of a group are compiled together into one shared object."""

    @property
    @abc.abstractmethod
    def cpp_class(self) -> str:
        """The class in the table's header, such as ``RmsNorm<float, 256>``; see `instance`."""

    @property
    @abc.abstractmethod
    def sort_key(self) -> tuple[Any, ...]:
        """The key by which variants are sorted; they are tried in ascending order."""

    @property
    @abc.abstractmethod
    def arch_range(self) -> tuple[int, int]:
        """The range of compute capabilities, times ten: from the first up to, not including, the second."""

    @property
    @abc.abstractmethod
    def requirements(self) -> tuple[Predicate, ...]:
        """The requirements besides the compute capability."""

    def runs_on(self, capability: int) -> bool:
        """True if it is for a compute capability, such as 90."""
        low, high = self.arch_range
        return low <= capability < high


def instance(template: str, *arguments: bool | int | str) -> str:
    """Writes a template with its arguments in C++: ``instance("RmsNorm", "float", 256, True)``."""
    written = (str(each).lower() if isinstance(each, bool) else str(each) for each in arguments)
    return f"{template}<{', '.join(written)}>"


@dataclasses.dataclass(frozen=True, slots=True)
class VariantTable:
    """All variants of one kernel, in the order in which they are tried.

    Attributes:
      name: an identifier, part of file and FFI target names.
      header: the ``.cuh`` file with the classes of the variants. Everything that it includes from ``include_folders``,
        ``packages`` or its own folder is part of the build's key.
      fields: names of the integers that describe a problem, in the order in which C++ receives them.
      include_folders: further folders of headers.
      packages: headers that come with CUDA or in a wheel.
      flags: further flags for nvcc; commas split the values of ``-D``.
      memory_per_job: maximum bytes of memory that the compiler needs for one group.
    """

    name: str
    header: Path
    fields: tuple[str, ...]
    variants: tuple[Variant, ...]
    include_folders: tuple[Path, ...] = ()
    packages: tuple[HeaderPackage, ...] = ()
    flags: tuple[str, ...] = ()
    memory_per_job: int = 1 << 30

    def __post_init__(self) -> None:
        # With the name, so that the order, and so the generated sources and their hash, never depend on the
        # enumeration.
        ordered = sorted(self.variants, key=lambda variant: (variant.sort_key, variant.name))
        object.__setattr__(self, "variants", tuple(ordered))
        _check_names("table", [self.name])
        _check_names("field", self.fields)
        if not self.fields:
            raise ValueError("VariantTable needs at least one field")
        for name in _TAKEN.intersection(self.fields):
            raise ValueError(f"a field cannot be called {name!r}, which has another meaning in the generated C++")
        _check_names("variant", [variant.name for variant in self.variants])
        _check_names("group", self.groups)
        if self.memory_per_job < 1:
            raise ValueError(f"VariantTable needs a positive number of bytes, got {self.memory_per_job=}")
        for variant in self.variants:
            self._check_variant(variant)

    def _check_variant(self, variant: Variant) -> None:
        low, high = variant.arch_range
        if not low < high:
            raise ValueError(f"{variant.name} is for no architecture: arch_range={variant.arch_range}")
        for requirement in variant.requirements:
            for operand in requirement.operands():
                if isinstance(operand, Field) and operand.name not in self.fields:
                    raise ValueError(f"{variant.name} requires something of {operand.name!r}, which is no field")

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups, in the order of their first variants."""
        return tuple(dict.fromkeys(variant.group for variant in self.variants))

    def in_group(self, group: str) -> tuple[Variant, ...]:
        """The variants of one group.

        Raises:
          ValueError: there is no such group.
        """
        found = tuple(variant for variant in self.variants if variant.group == group)
        if not found:
            raise ValueError(f"the table {self.name} has no group {group!r}; it has {list(self.groups)}")
        return found

    def groups_for(self, capability: int) -> tuple[str, ...]:
        """The groups with variants for a compute capability, such as 90."""
        return tuple(dict.fromkeys(variant.group for variant in self.for_capability(capability)))

    def for_capability(self, capability: int) -> tuple[Variant, ...]:
        """The variants for a compute capability, such as 90."""
        return tuple(variant for variant in self.variants if variant.runs_on(capability))


def _check_names(kind: str, names: Iterable[str]) -> None:
    known: set[str] = set()
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(f"the name of a {kind} must be an identifier, got {name!r}")
        if name in known:
            raise ValueError(f"there are two {kind}s of the name {name!r}")
        known.add(name)
