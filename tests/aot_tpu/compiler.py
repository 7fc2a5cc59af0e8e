"""What libtpu compiles from Pallas kernels for a TPU that is not there: memory, spilled registers, estimated cycles.

Wants ``jax[tpu]`` of jax's own version.
"""

from tilewright.ops.tuning.libtpu import TpuReport, report
from tilewright.ops.utils.known_devices import find_device
from tilewright.ops.utils.topology import missing_compiler

__all__ = ["TPUS", "TpuReport", "missing_packages", "report"]

TPUS = ("TPU v5e", "TPU v5p", "TPU v6e", "TPU7x")


def missing_packages() -> str:
    """Why nothing can be compiled here; empty if it can."""
    missing = missing_compiler(find_device(TPUS[0]))
    return f"{missing} (make aot-tpu installs it)" if missing else ""
