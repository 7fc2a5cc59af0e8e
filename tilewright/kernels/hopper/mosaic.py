"""``jax.experimental.pallas.mosaic_gpu``, imported when a kernel is traced.

The import takes a third of a second. A process that finds its lowered kernels on disk needs nothing of it: configs are
chosen and rebuilt without.
"""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # what is asked of any module says nothing of that one
        raise AttributeError(name)
    return getattr(importlib.import_module("jax.experimental.pallas.mosaic_gpu"), name)
