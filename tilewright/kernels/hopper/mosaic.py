"""``jax.experimental.pallas.mosaic_gpu``, imported when a kernel is traced.

The import takes a third of a second, which a process that finds its lowered kernels on disk saves: configs are chosen
and rebuilt without it.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # the import system asks any module for these
        raise AttributeError(name)
    from jax.experimental.pallas import mosaic_gpu

    found = getattr(mosaic_gpu, name)
    globals()[name] = found  # asked for once: kernels read hundreds of these names
    return found
