"""Registers the custom call of Mosaic GPU kernels with XLA, without importing the lowering of such kernels."""

import importlib
import os
import sys
from pathlib import Path

_LOWERING = "jax.experimental.mosaic.gpu"
_LIBRARY = "MOSAIC_GPU_RUNTIME_LIB_PATH"


def register_mosaic_gpu() -> None:
    """Loads the extension that defines the custom call, and sets the variable for the path of its library.

    A lowered kernel needs nothing else from the lowering's import, and this takes a tenth of its time. If JAX keeps
    these files in other places, the lowering is imported.

    Raises:
      ImportError: this JAX has no Mosaic GPU.
    """
    if _LOWERING in sys.modules:
        return
    try:
        from jax._src.lib import mosaic_gpu

        library = Path(mosaic_gpu._mosaic_gpu_ext.__file__).parent / "libmosaic_gpu_runtime.so"
    except (ImportError, AttributeError):
        library = None
    if library is None or not library.exists():
        importlib.import_module(_LOWERING)
    else:
        os.environ[_LIBRARY] = str(library)
