"""The custom calls that a module on disk may contain, made known to XLA without importing what lowers to them."""

import importlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from tilewright.ops.utils.triton_settings import triton_settings

MOSAIC_GPU = "mosaic_gpu_v2"
TRITON = "triton_kernel_call_ffi"

_LOWERING = "jax.experimental.mosaic.gpu"
_LIBRARY = "MOSAIC_GPU_RUNTIME_LIB_PATH"


def register(targets: Iterable[str]) -> None:
    """Makes custom calls known to XLA, so that it can compile a module that contains them.

    Raises:
      KeyError: a module with one of them must not come from disk: it refers to state of the process that made it.
      ImportError: this JAX lacks one of them.
    """
    for target in targets:
        _TARGETS[target]()


def can_be_kept(targets: Iterable[str]) -> bool:
    """True if a module with these custom calls, made now, is what any other process would make."""
    return _TARGETS.keys() >= set(targets) and not are_made_otherwise(targets)


def are_made_otherwise(targets: Iterable[str]) -> bool:
    """True if this process makes such custom calls otherwise than one without settings of Triton."""
    return TRITON in targets and bool(triton_settings())


def _register_mosaic_gpu() -> None:
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


def _register_triton() -> None:
    """Loads the extension of JAX that defines the custom call; Triton itself is not imported.

    Raises:
      ImportError: this JAX has no such extension, for it comes with the CUDA plugin.
    """
    from jax._src.lib import gpu_triton

    if not callable(getattr(gpu_triton, "TritonKernelCall", None)):
        raise ImportError("JAX's CUDA plugin, which runs Triton kernels, is not installed")


_TARGETS = {MOSAIC_GPU: _register_mosaic_gpu, TRITON: _register_triton}
