"""The `triton` platform: kernels written with ``@triton.jit``, compiled by Triton, launched inside JAX programs.

Nothing here imports Triton before a kernel is launched, so a backend can be asked for its reasons without it. A
backend keeps its ``@triton.jit`` functions in a module of their own, which it imports when it runs.
"""

from tilewright.kernels.triton.description import Launch
from tilewright.kernels.triton.launch import launch, recorded_launches
from tilewright.kernels.triton.requirements import MIN_CAPABILITY, unavailable

__all__ = ["MIN_CAPABILITY", "Launch", "launch", "recorded_launches", "unavailable"]
