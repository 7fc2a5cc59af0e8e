"""The launch of all kernels for TPUs: a grid whose last axes run in order on a core."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tilewright.kernels.tpu.device import vmem_bytes
from tilewright.ops.utils.device import current_device
from tilewright.ops.utils.running import device_kernel_name

type Order = Literal["parallel", "arbitrary"]


def run_kernel(
    body: Callable[..., None],
    *operands: Any,
    role: str,
    grid: Sequence[int],
    orders: Sequence[Order],
    in_specs: Any,
    out_specs: Any,
    out_shape: Any,
    scratch_shapes: Any = (),
    scalars: int = 0,
    flops: int = 0,
    transcendentals: int = 0,
    bytes_accessed: int = 0,
    aliases: dict[int, int] | None = None,
    has_side_effects: bool = False,
    vmem_limit: int | None = None,
) -> Any:
    """Runs ``body(*scalar_refs, *in_refs, *out_refs, *scratch_refs)`` in every step of a grid; returns the outputs.

    Args:
      operands: the scalars first, then an array for each of ``in_specs``.
      role: of the kernel in its call, for its name in a profile.
      orders: of each axis: the steps of a "parallel" one may run on different cores, in any order.
      scalars: how many operands are small int32 arrays in SMEM, which index maps get after the grid's indices.
      flops, transcendentals, bytes_accessed: of all steps, by which XLA schedules other operations beside the kernel.
      aliases: operands that outputs replace in place, by position among all operands.
      has_side_effects: the kernel writes what is no output.
      vmem_limit: bytes of VMEM that the kernel may have; all by default. XLA keeps arrays of its own beside a kernel
        that asks for less, and refuses some programs whose kernel asks for all.
    """
    name, available = device_kernel_name(role), vmem_bytes(current_device())
    call = pl.pallas_call(
        body,
        out_shape=_varying_like(operands, out_shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=scalars,
            grid=tuple(grid),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=scratch_shapes,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=tuple(orders),
            vmem_limit_bytes=min(vmem_limit or available, available),
            has_side_effects=has_side_effects,
        ),
        cost_estimate=pl.CostEstimate(
            flops=flops, transcendentals=transcendentals, bytes_accessed=bytes_accessed, remote_bytes_transferred=0
        ),
        input_output_aliases=aliases or {},
        name=name,
    )
    with jax.named_scope(name):
        return call(*operands)


def _varying_like(operands: Sequence[jax.Array], out_shape: Any) -> Any:
    """The results' types, varying over the manual mesh axes over which any operand does: ``shard_map`` checks that."""
    kinds = [jax.typeof(operand).manual_axis_type for operand in operands]
    varying = frozenset[str]().union(*(kind.varying for kind in kinds))
    if not varying:
        return out_shape
    kind = type(kinds[0])(varying=varying)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=kind), out_shape)
