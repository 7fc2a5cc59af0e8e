"""The launch of all kernels: a grid of programs (CTAs) of a few warpgroups, with barriers that the kernels place."""

from collections.abc import Callable
from typing import Any

import jax
from jax.ref import AbstractRef

from tilewright.kernels.hopper import mosaic as plgpu
from tilewright.kernels.hopper.ring import CLUSTER_AXIS, RingPlan
from tilewright.kernels.hopper.shared import TileStack
from tilewright.kernels.hopper.turns import TurnsPlan
from tilewright.kernels.in_place import apart
from tilewright.kernels.pallas_types import Ref
from tilewright.ops.utils.running import device_kernel_name


def compiler_params() -> Any:
    """The compiler parameters of all kernels.

    ``unsafe_no_auto_barriers``, as every ordering is written in the kernels. ``reduction_scratch_bytes=0``, as the rows
    of a tile are reduced within a warp, without shared memory.
    """
    return plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0)


def run_kernel[Operands, Results, Scratch](
    named_body: Callable[[Operands, Results, Scratch], None],
    operands: object,
    results: object,
    scratch: object,
    *,
    role: str,
    num_ctas: int,
    warpgroups: int | None = None,
    cluster: int = 1,
) -> Any:
    """Runs ``named_body(operands, results, scratch)`` in every CTA; returns arrays in the places of ``results``.

    The three are pytrees, named tuples for instance, and the body gets trees of the same structure with references as
    leaves. Memory is allocated in the order of the leaves.

    Args:
      operands: leaves are arrays and references to arrays.
      results: leaves are ``jax.ShapeDtypeStruct``.
      scratch: leaves are scratch types, and plans of rings, of stacks of tiles and of turns, for which the body gets
        these.
      role: of the kernel in its call, for its name in a profile.
      num_ctas: of the grid, whose axis is "program"; the number of clusters, if these have several CTAs.
      warpgroups: of a CTA; the body tells them apart by the axis "warpgroup". None is one, without an index.
      cluster: CTAs of a cluster, told apart by the axis `CLUSTER_AXIS` if there are several.
    """
    arrays, operand_tree = jax.tree.flatten(operands)
    out_types, result_tree = jax.tree.flatten(results)
    parts, scratch_tree = jax.tree.flatten(scratch)
    scratch_types, part_tree = jax.tree.flatten(
        [part.scratch() if isinstance(part, RingPlan | TileStack | TurnsPlan) else part for part in parts]
    )
    first_result, first_scratch = len(arrays), len(arrays) + len(out_types)

    def body(*refs: Ref) -> None:
        # Pallas passes references by position; from here on a kernel has them by name.
        part_refs = jax.tree.unflatten(part_tree, refs[first_scratch:])
        bound = [
            part.bind(*each) if isinstance(part, RingPlan | TileStack | TurnsPlan) else each
            for part, each in zip(parts, part_refs, strict=True)
        ]
        named_body(
            jax.tree.unflatten(operand_tree, refs[:first_result]),
            jax.tree.unflatten(result_tree, refs[first_result:first_scratch]),
            jax.tree.unflatten(scratch_tree, bound),
        )

    body.__name__ = device_kernel_name(role)
    if updates := any(isinstance(jax.typeof(x), AbstractRef) for x in arrays):
        arrays = [x if isinstance(jax.typeof(x), AbstractRef) else apart(x) for x in arrays]
    # A kernel of one result returns an array, not a tuple of one.
    kernel = plgpu.kernel(
        body,
        out_type=out_types[0] if len(out_types) == 1 else tuple(out_types),
        scratch_types=scratch_types,
        grid=(num_ctas,),
        grid_names=("program",),
        # A cluster of one CTA is left out: nothing would use its axis.
        **({} if cluster == 1 else {"cluster": (cluster,), "cluster_names": (CLUSTER_AXIS,)}),
        num_threads=warpgroups,
        thread_name=None if warpgroups is None else "warpgroup",
        compiler_params=compiler_params(),
    )
    found = jax.tree.leaves(kernel(*arrays))
    return jax.tree.unflatten(result_tree, apart(found) if updates else found)
