"""The schedule checker: a right kernel at its real size passes, each fault has its error."""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.hopper.schedule import check_schedules
from tests.kernels.hopper.streaming_matmul import Fault, streaming_matmul
from tests.support.ring_protocol import ProtocolError
from tilewright.kernels.hopper.ring import RingPlan
from tilewright.kernels.hopper.shared import SharedTile


def operands(b_dtype=jnp.bfloat16) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return jax.ShapeDtypeStruct((512, 8192), jnp.bfloat16), jax.ShapeDtypeStruct((8192, 128), b_dtype)


@pytest.mark.parametrize("b_dtype", [jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_a_right_kernel_passes_at_its_real_size(num_stages: int, b_dtype):
    events = check_schedules(functools.partial(streaming_matmul, num_stages=num_stages), *operands(b_dtype))
    assert events > 4 * 128 * 8  # blocks, steps, and what each step does at the least


def test_fewer_programs_are_fewer_events():
    kernel = functools.partial(streaming_matmul, num_stages=2)
    one, two, every = (check_schedules(kernel, *operands(), max_programs=count) for count in (1, 2, None))
    assert 4 * one == 2 * two == every


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault.RELEASE_BEFORE_WAIT, "which its product at .* still reads"),
        (Fault.NO_FULL_WAIT, "nothing orders the two"),
        (Fault.NO_RELEASE, "waits for ever"),
        (Fault.NO_FENCE, "and no fence lies between the two"),
        (Fault.NO_LAST_WAIT, "ends with 1 stores in flight"),
    ],
)
def test_each_fault_has_its_error(fault: Fault, reason: str):
    with pytest.raises(ProtocolError, match=reason):
        check_schedules(functools.partial(streaming_matmul, num_stages=2, fault=fault), *operands())


def reader(counts: jax.Array, source: jax.Array, *, releases: int = 1, take: int | None = None) -> jax.Array:
    """Loads as many tiles as ``counts`` says and waits for all of them, or for ``take``."""
    plan = RingPlan(SharedTile((64, 64), source.dtype), 2, 1)

    def body(counts_ref, source_ref, out_ref, *scratch) -> None:
        del out_ref
        ring, warpgroup = plan.bind(*scratch), jax.lax.axis_index("warpgroup")
        total = counts_ref[jax.lax.axis_index("block")]

        @pl.when(warpgroup == 0)
        def _() -> None:
            @pl.loop(0, total if take is None else take)
            def _(step) -> None:
                ring.load_from_shared(step)
                for _ in range(releases):
                    ring.release(step)

        @pl.when(warpgroup == 1)
        def _() -> None:
            @pl.loop(0, total)
            def _(step) -> None:
                ring.load_from_dram(step, source_ref.at[pl.ds(step * 64, 64)])

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 64), source.dtype),
        scratch_types=list(plan.scratch()),
        grid=(counts.shape[0],),
        grid_names=("block",),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(counts, source)


SOURCE = jax.ShapeDtypeStruct((1024, 64), jnp.bfloat16)


def test_known_arrays_steer_a_kernel():
    shifted = lambda counts, source: reader(jnp.cumsum(counts) + 1, source)  # computed on the way, too
    few = check_schedules(shifted, np.array([1, 2], np.int32), SOURCE)
    many = check_schedules(shifted, np.array([5, 6], np.int32), SOURCE)
    assert few < many
    with pytest.raises(NotImplementedError, match="depends on data"):
        check_schedules(shifted, jax.ShapeDtypeStruct((2,), jnp.int32), SOURCE)


def test_a_copy_that_nobody_waits_for():
    counts = np.array([2], np.int32)
    assert check_schedules(functools.partial(reader, take=2), counts, SOURCE)
    with pytest.raises(ProtocolError, match="nobody has waited"):
        check_schedules(functools.partial(reader, take=1), counts, SOURCE)


def test_a_barrier_that_runs_ahead_of_who_waits():
    with pytest.raises(ProtocolError, match=r"before warpgroup 1 has seen|nothing orders"):
        check_schedules(functools.partial(reader, releases=2), np.array([6], np.int32), SOURCE)


def test_a_function_without_kernels_is_refused():
    with pytest.raises(ValueError, match="no Mosaic GPU kernel"):
        check_schedules(jnp.sin, jax.ShapeDtypeStruct((4,), jnp.float32))
