"""A matrix product that streams both operands through rings: the smallest kernel that uses every verb."""

from enum import Enum
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.hopper.launch import run_kernel
from tilewright.kernels.hopper.ring import Ring, RingPlan
from tilewright.kernels.hopper.shared import SharedTile
from tilewright.kernels.pallas_types import Ref

CONSUMERS = 2
ROWS = 64  # per consumer
DEPTH = 64  # per step


class Fault(Enum):
    """What a faulty kernel leaves out or does too early."""

    NONE = "none"
    RELEASE_BEFORE_WAIT = "release before wait"
    NO_FULL_WAIT = "no full wait"
    NO_RELEASE = "no release"
    NO_FENCE = "no fence"
    NO_LAST_WAIT = "no last wait"


def ring_plans(
    columns: int, dtype: Any, num_stages: int, transposed: bool, writers: int = 0
) -> tuple[RingPlan, RingPlan]:
    """The rings of both operands."""
    b_tile = (columns, DEPTH) if transposed else (DEPTH, columns)
    a = SharedTile((CONSUMERS * ROWS, DEPTH), dtype)
    return RingPlan(a, num_stages, CONSUMERS), RingPlan(SharedTile(b_tile, dtype), num_stages, CONSUMERS, writers)


def streaming_matmul(
    a: jax.Array,
    b: jax.Array,
    *,
    num_stages: int,
    transposed: bool = False,
    fault: Fault = Fault.NONE,
) -> jax.Array:
    """``a @ b``, or ``a @ b.T``; an int8 ``b`` is converted on its way to shared memory.

    ``a`` is [any multiple of 128, any multiple of 64]; the result has a block per 128 rows.
    """
    columns = b.shape[0] if transposed else b.shape[1]
    steps = a.shape[1] // DEPTH
    converts = b.dtype != a.dtype
    plans = ring_plans(columns, a.dtype, num_stages, transposed, int(converts))

    def consume(a_ring: Ring, b_ring: Ring, warpgroup: jax.Array, out_ref: Any, out_smem: Any) -> None:
        own_rows = pl.ds(warpgroup * ROWS, ROWS)

        def accumulate(acc: Any) -> jax.Array:
            @pl.loop(0, steps)
            def _(step: jax.Array) -> None:
                if fault is not Fault.NO_FULL_WAIT:
                    a_ring.load_from_shared(step)
                b_ring.load_from_shared(step)
                plgpu.wgmma(acc, a_ring.get_mma_tile(step).at[own_rows], b_ring.get_mma_tile(step, transposed))
                if fault is not Fault.RELEASE_BEFORE_WAIT:
                    plgpu.wgmma_wait(0)
                if fault is not Fault.NO_RELEASE:
                    a_ring.release(step)
                b_ring.release(step)

            return acc[...]

        out = pl.run_scoped(accumulate, plgpu.ACC((ROWS, columns), jnp.float32))
        out_smem[own_rows] = out.astype(a.dtype)
        if fault is not Fault.NO_FENCE:
            plgpu.commit_smem()
        first = lax.axis_index("program") * CONSUMERS * ROWS + warpgroup * ROWS
        plgpu.copy_smem_to_gmem(out_smem.at[own_rows], out_ref.at[pl.ds(first, ROWS)])
        if fault is not Fault.NO_LAST_WAIT:
            plgpu.wait_smem_to_gmem(0)

    def produce(a_ring: Ring, b_ring: Ring, a_ref: Any, b_ref: Any) -> None:
        rows = pl.ds(lax.axis_index("program") * CONSUMERS * ROWS, CONSUMERS * ROWS)

        @pl.loop(0, steps)
        def _(step: jax.Array) -> None:
            depth = pl.ds(step * DEPTH, DEPTH)
            a_ring.load_from_dram(step, a_ref.at[rows, depth])
            a_ring.copy_to_shared(step)
            b_tile = b_ref.at[:, depth] if transposed else b_ref.at[depth]
            if converts:
                values = b_ring.load_from_dram(step, b_tile, layout=plgpu.Layout.WGMMA)
                assert values is not None
                b_ring.copy_to_shared(step, values.astype(a.dtype))
            else:
                b_ring.load_from_dram(step, b_tile)
                b_ring.copy_to_shared(step)

        a_ring.drain(steps)
        b_ring.drain(steps)

    def body(operands: tuple[Ref, Ref], out_ref: Ref, scratch: tuple[Ring, Ring, Ref]) -> None:
        a_ring, b_ring, out_smem = scratch
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup < CONSUMERS)(lambda: consume(a_ring, b_ring, warpgroup, out_ref, out_smem))
        pl.when(warpgroup == CONSUMERS)(lambda: produce(a_ring, b_ring, *operands))

    out_type = jax.ShapeDtypeStruct((a.shape[0], columns), a.dtype)
    scratch = (*plans, SharedTile((CONSUMERS * ROWS, columns), a.dtype).scratch())
    num_ctas = a.shape[0] // (CONSUMERS * ROWS)
    out: jax.Array = run_kernel(
        body, (a, b), out_type, scratch, role="stream", num_ctas=num_ctas, warpgroups=CONSUMERS + 1
    )
    return out
