"""The launch of all kernels: a grid of programs (CTAs) of a few warpgroups, with barriers that the kernels place."""

from collections.abc import Callable, Sequence
from typing import Any

from tilewright.kernels.hopper import mosaic as plgpu


def compiler_params() -> Any:
    """The compiler parameters of all kernels.

    ``unsafe_no_auto_barriers``, as every ordering is written in the kernels. ``reduction_scratch_bytes=0``, as the rows
    of a tile are reduced within a warp, without shared memory.
    """
    return plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0)


def warpgroup_kernel(
    body: Callable[..., None], out_type: object, scratch: Sequence[Any], programs: int, warpgroups: int | None = None
) -> Callable[..., Any]:
    """A kernel over the grid axis "program"; of several warpgroups each has its index on the axis "warpgroup".

    Args:
      body: takes references to the operands, to the results and to the scratch memory, in this order.
      programs: CTAs of the grid.
      warpgroups: warpgroups of a CTA, or None for one without an index.
    """
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=(programs,),
        grid_names=("program",),
        num_threads=warpgroups,
        thread_name=None if warpgroups is None else "warpgroup",
        compiler_params=compiler_params(),
    )
