"""JAX kernels that choose their own configuration, correctly."""

import importlib
from typing import TYPE_CHECKING, Any

from tilewright import errors as errors
from tilewright._version import __version__ as __version__
from tilewright.compat.paths import install as _install_former_paths
from tilewright.errors import LockError as LockError
from tilewright.errors import NoConfigError as NoConfigError
from tilewright.errors import TargetDeviceError as TargetDeviceError
from tilewright.errors import UnsupportedError as UnsupportedError

if TYPE_CHECKING:
    from jax import checkpoint_policies as checkpoint_policies

    from tilewright import modules as modules
    from tilewright import ops as ops
    from tilewright.modules import context_parallel_attention as context_parallel_attention
    from tilewright.modules import unzigzag as unzigzag
    from tilewright.modules import zigzag as zigzag
    from tilewright.ops import explain as explain
    from tilewright.ops import target_device as target_device
    from tilewright.ops import tune as tune

_install_former_paths()

_HOMES = {
    "checkpoint_policies": "jax",  # which count calls of this package as matmuls
    "context_parallel_attention": "tilewright.modules",
    "explain": "tilewright.ops",
    "target_device": "tilewright.ops",
    "tune": "tilewright.ops",
    "unzigzag": "tilewright.modules",
    "zigzag": "tilewright.modules",
}
"""The modules of the functions that are imported on first use."""


if not TYPE_CHECKING:  # to type checkers a misspelt name is an error

    def __getattr__(name: str) -> Any:
        # On first use: a program that imports only the framework need not wait for the ops, and the shell, which asks
        # the command line for completions at every press of a key, need not wait for JAX.
        if name in ("modules", "ops"):
            return importlib.import_module(f"tilewright.{name}")
        if name in _HOMES:
            globals()[name] = found = getattr(importlib.import_module(_HOMES[name]), name)
            return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, "modules", "ops"})
