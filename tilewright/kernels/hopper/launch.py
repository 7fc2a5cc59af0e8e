"""How all kernels are launched: a grid of programs, each a few warpgroups that pass barriers placed by hand."""

from collections.abc import Callable, Sequence
from typing import Any

from tilewright.kernels.hopper import mosaic as plgpu


def compiler_params() -> Any:
    """The parameters of all kernels: barriers are placed by hand, and rows are reduced in a warp, without scratch."""
    return plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0)


def warpgroup_kernel(
    body: Callable[..., None], out_type: object, scratch: Sequence[Any], programs: int, warpgroups: int | None = None
) -> Callable[..., Any]:
    """A kernel over the axis "program"; with more than one warpgroup they are told apart by the axis "warpgroup".

    Args:
      body: takes references to the operands, to the results and to the scratch memory, in this order.
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
