"""JAX kernels that choose their own configuration, correctly."""

import importlib
from typing import TYPE_CHECKING, Any

from tilewright import errors as errors
from tilewright import ops as ops
from tilewright._version import __version__ as __version__
from tilewright.errors import LockError as LockError
from tilewright.errors import NoConfigError as NoConfigError
from tilewright.errors import UnsupportedError as UnsupportedError
from tilewright.ops import tune as tune

if TYPE_CHECKING:
    from tilewright import modules as modules


def __getattr__(name: str) -> Any:
    # The ops load on first use: a program that imports the framework alone need not wait for them.
    if name == "modules":
        return importlib.import_module("tilewright.modules")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
