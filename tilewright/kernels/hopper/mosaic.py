"""``jax.experimental.pallas.mosaic_gpu``, imported when a kernel is traced.

The import takes a third of a second, which a process that finds its lowered kernels on disk saves: configs are chosen
and rebuilt without it.
"""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # the import system asks any module for these
        raise AttributeError(name)
    return getattr(importlib.import_module("jax.experimental.pallas.mosaic_gpu"), name)
