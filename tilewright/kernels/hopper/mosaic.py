"""``jax.experimental.pallas.mosaic_gpu``, imported when a kernel is traced.

The import takes a third of a second, which a process that finds its lowered kernels on disk saves: configs are chosen
and rebuilt without it.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # the import system asks any module for these
        raise AttributeError(name)
    from jax.experimental.pallas import mosaic_gpu

    # Nothing is kept here, where a replaced name would stay as it was: a kernel reads about a hundred names while it is
    # traced, 1.6 µs each, of half a second.
    return getattr(mosaic_gpu, name)
