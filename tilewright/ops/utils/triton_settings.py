"""Settings by which a process has told Triton to make other code than it makes by itself. Triton is not imported."""

import os
import re
import sys

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
