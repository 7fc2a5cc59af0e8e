"""The custom calls that a module on disk may contain, made known to XLA without importing what lowers to them."""

import importlib
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

MOSAIC_GPU = "mosaic_gpu_v2"
TRITON = "triton_kernel_call_ffi"

_LOWERING = "jax.experimental.mosaic.gpu"
_LIBRARY = "MOSAIC_GPU_RUNTIME_LIB_PATH"

# Variables by which Triton makes other code, or shows what it does while it makes it: those that its own cache heeds,
# and any that a later version may have.
_VARIABLE = re.compile(
    r"TRITON_|MLIR_|NVPTX_|PTXAS_OPTIONS|USE_IR_LOC|WARP_SPECIALIZE_|(DISABLE|ENABLE)_(FAST|LLVM|MMA|PTXAS)_|"
    r"(ALLOW|STORE)_\w*TMEM_|LLVM_(ENABLE_TIMING|EXTRACT_|IR_|PASS_)"
)
# These say where Triton finds and keeps files, and how its autotuner works, which the kernels here do not use. They are
# compiled to PTX of a given version, whatever ptxas is there.
_HARMLESS = re.compile(
    r"TRITON_(HOME|CACHE_\w+|REMOTE_CACHE_BACKEND|REDIS_\w+|PRINT_AUTOTUNING|(DUMP|OVERRIDE)_DIR|LIBCUDA_PATH|"
    r"CUD\w+_PATH|CUPTI\w*_PATH|PTXAS\w*_PATH|CUOBJDUMP_PATH|NVDISASM_PATH|PROTON_\w+)"
)
_KNOBS = ("compilation", "runtime", "language", "nvidia")


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
    return _TARGETS.keys() >= set(targets) and not (TRITON in targets and triton_settings())


def triton_settings() -> tuple[str, ...]:
    """Everything by which this process has told Triton to make other code than it makes by itself; empty usually.

    These are environment variables, and attributes of ``triton.knobs``, which only a process can have set that has
    imported Triton.
    """
    found = [
        f"{name}={value}"
        for name, value in os.environ.items()
        if value and _VARIABLE.match(name) and not _HARMLESS.fullmatch(name)
    ]
    if (knobs := sys.modules.get("triton.knobs")) is not None:
        for group in filter(None, (getattr(knobs, name, None) for name in _KNOBS)):
            usual = vars(type(group))
            found += [f"{name}={value}" for name, value in vars(group).items() if value != usual.get(name)]
        # Read from the environment once, when Triton is imported.
        if mode := getattr(getattr(knobs, "compilation", None), "instrumentation_mode", ""):
            found.append(f"instrumentation_mode={mode}")
    return tuple(sorted(found))


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
