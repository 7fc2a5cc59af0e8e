"""Module paths of earlier systems, which import what stands elsewhere in this package.

They are looked up after all that Python finds by itself, so they cost nothing before they are used. Type checkers do
not see them: a checked program imports the same names from ``tilewright.ops``.
"""

import importlib
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from importlib.abc import Loader  # which takes longer to import than the rest of the package

PACKAGES = frozenset({"tilewright.ops.core", "tilewright.ops.execution"})
"""Packages that had nothing but modules."""

MODULES: Mapping[str, str] = MappingProxyType(
    {
        "tilewright.kernels._registry": "tilewright.compat.base",
        "tilewright.ops.config.cache": "tilewright.ops",  # its names come from several modules
        "tilewright.ops.core.kernel": "tilewright.ops.kernel.kernel",
        "tilewright.ops.core.types": "tilewright.ops.types",
        "tilewright.ops.execution.batch": "tilewright.ops.batch",
        "tilewright.ops.execution.executor": "tilewright.ops.executor",
        "tilewright.ops.execution.tuning": "tilewright.ops",  # likewise
        "tilewright.ops.registry": "tilewright.ops.kernel.registry",
    }
)
"""For each path the module that it imports."""


class FormerPaths:
    """Finds and loads the modules of the paths."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name not in MODULES and name not in PACKAGES:
            return None
        return ModuleSpec(name, cast("Loader", self), is_package=name in PACKAGES)

    def create_module(self, spec: ModuleSpec) -> None:
        """Leaves it to Python to make the module."""

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in MODULES:
            # An import returns the entry of `sys.modules` at its end: the module itself, not a second one.
            sys.modules[module.__name__] = importlib.import_module(MODULES[module.__name__])


def install() -> None:
    """Makes the paths importable."""
    sys.meta_path.append(FormerPaths())
