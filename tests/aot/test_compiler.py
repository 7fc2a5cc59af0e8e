"""The compiler's reports on a kernel that fits its registers, on some that do not, and on texts of ptxas."""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest

from tests.aot.compiler import KernelReport, compile_for_h100, missing_packages, parse_reports

needs_compiler = pytest.mark.skipif(bool(missing_packages()), reason=missing_packages() or "nothing")
TILED: Any = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
SIDE = 128
SHAPE = (SIDE, SIDE)
STRUCT = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)

CLEAN = """\
Resources(smem_scratch_bytes=4096, tmem_scratch_cols=0)
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'forward_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for forward_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 1 bytes smem
ptxas info    : Compile time = 196.789 ms
"""
SERIALISED = """\
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized in 'backward'
""" + CLEAN.replace("forward", "backward")


def squares(multiples: int, block: Any) -> jax.Array:
    """`block @ block` in `multiples` accumulators that live at once, 128 registers each."""

    def body(block_ref: Any, out_ref: Any, left: Any, right: Any, barrier: Any) -> None:
        plgpu.copy_gmem_to_smem(block_ref, left, barrier)
        plgpu.copy_gmem_to_smem(block_ref, right, barrier)
        plgpu.barrier_wait(barrier)

        def products(*accumulators: Any) -> None:
            for accumulator in accumulators:
                plgpu.wgmma(accumulator, left, right)
            plgpu.wgmma_wait(0)
            out_ref[...] = functools.reduce(jnp.multiply, [accumulator[...] for accumulator in accumulators])

        pl.run_scoped(products, *[plgpu.ACC(SHAPE, jnp.float32)] * multiples)

    scratch = [plgpu.SMEM(SHAPE, jnp.bfloat16, transforms=TILED)] * 2
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(SHAPE, jnp.float32),
        scratch_types=[*scratch, plgpu.Barrier(num_arrivals=2)],
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(block)


@needs_compiler
def test_a_kernel_that_fits() -> None:
    # Twice, because a kernel that is compiled already must be reported again.
    for _ in range(2):
        (report,) = compile_for_h100(functools.partial(squares, 1), STRUCT)
        assert report.faults == []
        assert SIDE < report.registers < 255
        assert report.shared_bytes == 2 * 2 * SIDE * SIDE


@needs_compiler
def test_a_kernel_that_cannot_fit() -> None:
    (report,) = compile_for_h100(functools.partial(squares, 3), STRUCT)
    assert report.registers == 255
    assert min(report.spill_stores, report.spill_loads, report.stack) > 500
    assert report.serialised
    assert len(report.faults) == 2


@needs_compiler
def test_every_kernel_of_a_program_is_reported() -> None:
    reports = compile_for_h100(lambda x: squares(1, (squares(3, x * 2) + 1).astype(x.dtype)) + 1, STRUCT)
    assert sorted(bool(report.faults) for report in reports) == [False, True]


@needs_compiler
def test_too_much_shared_memory_is_an_error() -> None:
    def body(x_ref: Any, out_ref: Any, smem: Any) -> None:
        smem[...] = x_ref[...]
        out_ref[...] = smem[...]

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((512, 128), jnp.float32),
        scratch_types=[plgpu.SMEM((512, 128), jnp.float32)],
    )
    with pytest.raises(Exception, match=r"(?i)shared memory|smem"):
        compile_for_h100(kernel, jax.ShapeDtypeStruct((512, 128), jnp.float32))


def test_parsing() -> None:
    clean = KernelReport("forward", 168, 0, 0, 0, serialised=False, shared_bytes=4096)
    serialised = KernelReport("backward", 168, 0, 0, 0, serialised=True, shared_bytes=4096)
    assert parse_reports(CLEAN + SERIALISED) == [clean, serialised]
    assert serialised.faults == ["backward: its wgmmas are serialised"]
    spilling = CLEAN.replace("0 bytes spill stores", "16 bytes spill stores")
    assert "self.spill_stores=16" in parse_reports(spilling)[0].faults[0]
    assert parse_reports(CLEAN + CLEAN.split("\n", 1)[1])[0].shared_bytes is None
    with pytest.raises(ValueError, match="registers or spills of forward"):
        parse_reports(CLEAN.replace("Used", "Took"))
