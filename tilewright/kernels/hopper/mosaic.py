"""``jax.experimental.pallas.mosaic_gpu``, imported when a kernel is traced.

The import takes a third of a second, which a process that finds its lowered kernels on disk saves: configs are chosen
and rebuilt without it.
"""

import functools
import sys
import types
from typing import Any


def __getattr__(name: str) -> Any:
    """The first name that is asked for; all others are looked up in JAX's module by ``getattr`` itself."""
    if name.startswith("__"):  # the import system asks any module for these
        raise AttributeError(name)
    from jax.experimental.pallas import mosaic_gpu

    # Nothing is kept here, where a name that is replaced in JAX's module would stay as it was.
    found = {"__getattr__": functools.partial(getattr, mosaic_gpu)}
    sys.modules[__name__].__class__ = type("Mosaic", (types.ModuleType,), found)
    globals().pop("__getattr__", None)
    return getattr(mosaic_gpu, name)
