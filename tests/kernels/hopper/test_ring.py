"""The ring in real kernels, interpreted: every verb, and the faults that the interpreter sees."""

import functools
import re

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.hopper.streaming_matmul import Fault, streaming_matmul
from tests.support.mosaic_interpret import KernelError, interpret_mosaic
from tilewright.kernels.hopper.ring import RingPart, RingPlan
from tilewright.kernels.hopper.shared import SharedTile


def operands(b_dtype=jnp.bfloat16, transposed: bool = False, steps: int = 5) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """Small integers, whose products are exact in whatever order they are added."""
    a_key, b_key = jax.random.split(jax.random.key(7))
    a = jax.random.randint(a_key, (128, 64 * steps), -2, 3)
    b = jax.random.randint(b_key, (64 * steps, 64), -2, 3)
    product = np.asarray(a) @ np.asarray(b)
    return a.astype(jnp.bfloat16), (b.T if transposed else b).astype(b_dtype), product


@pytest.mark.parametrize("detect_races", [False, True])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_streaming_product_is_right(num_stages: int, detect_races: bool):
    a, b, product = operands()
    with interpret_mosaic(detect_races):
        out = jax.jit(functools.partial(streaming_matmul, num_stages=num_stages))(a, b)
    np.testing.assert_array_equal(np.asarray(out, np.int64), product)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_transposed_view_and_fewer_steps_than_stages(steps: int):
    a, b, product = operands(transposed=True, steps=steps)
    with interpret_mosaic(detect_races=True):
        out = jax.jit(functools.partial(streaming_matmul, num_stages=3, transposed=True))(a, b)
    np.testing.assert_array_equal(np.asarray(out, np.int64), product)


def test_int8_is_converted_on_its_way_to_shared_memory():
    a, b, product = operands(jnp.int8)
    with interpret_mosaic(detect_races=True):
        out = jax.jit(functools.partial(streaming_matmul, num_stages=2))(a, b)
    np.testing.assert_array_equal(np.asarray(out, np.int64), product)


@pytest.mark.parametrize("fault", [Fault.RELEASE_BEFORE_WAIT, Fault.NO_FULL_WAIT])
def test_faults_are_races(fault: Fault):
    a, b, _ = operands()
    with pytest.raises(KernelError), interpret_mosaic(detect_races=True):
        jax.jit(functools.partial(streaming_matmul, num_stages=2, fault=fault))(a, b).block_until_ready()


def test_scratch_has_the_shapes_and_arrivals_of_the_plan():
    plan = RingPlan(SharedTile((128, 96), jnp.bfloat16), 3, consumers=2)
    smem, full, empty = plan.scratch()
    assert smem.shape == (3, 128, 96)
    assert list(smem.transforms) == list(plan.tile.transforms) != []
    assert (full.num_arrivals, full.num_barriers) == (1, (3,))
    assert (empty.num_arrivals, empty.num_barriers) == (2, (3,))
    assert plan.shared_bytes == 3 * 128 * 96 * 2 + 2 * 3 * 8
    narrow = SharedTile((64, 64), jnp.int8)
    assert RingPlan(narrow, 2, 2, writers=2).scratch()[1].num_arrivals == 2
    assert RingPlan((RingPart(narrow, copies=4),), 2, 1).scratch()[1].num_arrivals == 4


def test_parts_of_a_stage_share_its_barriers():
    lhs, rhs = SharedTile((64, 64), jnp.bfloat16), SharedTile((64, 128), jnp.bfloat16, 128, panelled=True)
    plan = RingPlan((RingPart(lhs, 2), RingPart(rhs, multicast=True)), 3, consumers=2, cluster=2, owners=2)
    stages, _, full, empty = plan.scratch()
    assert stages.shape == (3, 2, 64, 64)
    assert (full.num_arrivals, full.num_barriers) == (2 + 2, (6,))
    assert (type(empty), empty.num_arrivals, empty.num_barriers) == (plgpu.ClusterBarrier, 2, (3,))
    assert plan.shared_bytes == 3 * (2 * 64 * 64 + 64 * 128) * 2 + (6 + 3) * 8
    assert plan.targets == [(0, (0,)), (0, (1,)), (1, ())]
    with pytest.raises(ValueError, match=re.escape("self.plan.owners=2")):
        RingPlan(lhs, 3, consumers=1, owners=2).bind(None, None, None).after(3)


def test_rows_of_numbers_stay_as_they_are():
    row = SharedTile((128,), jnp.float32)
    assert (row.transforms, row.swizzle, RingPlan(row, 2, 3).shared_bytes) == ((), 0, 1024 + 32)
    assert SharedTile((4, 6), jnp.float32, 0).transforms == ()
    assert SharedTile((4, 6), jnp.float32, 0).layout.matrix().tolist() == np.arange(24).reshape(4, 6).tolist()
    assert SharedTile((64, 128), jnp.bfloat16, 64).transforms[1].swizzle == 64


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_stages": 0}, "self.num_stages=0"),
        ({"num_stages": 33}, "self.num_stages=33"),
        ({"consumers": 0}, "self.consumers=0"),
        ({"writers": -1}, "self.writers=-1"),
        ({"num_stages": 17, "owners": 2}, "self.owners=2"),
        ({"cluster": 0}, "self.cluster=0"),
        ({"stage": (RingPart(SharedTile((64, 64), jnp.bfloat16), copies=2),), "writers": 1}, "need TMA"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(change: dict, reason: str):
    with pytest.raises(ValueError, match=re.escape(reason)):
        RingPlan(**({"stage": SharedTile((64, 64), jnp.bfloat16), "num_stages": 2, "consumers": 1} | change))


@pytest.mark.parametrize("copies", [0, 3])
def test_copies_that_do_not_share_the_rows_are_refused(copies: int):
    with pytest.raises(ValueError, match=re.escape(f"self.copies={copies}")):
        RingPart(SharedTile((64, 64), jnp.bfloat16), copies=copies)


@pytest.mark.parametrize(
    ("shape", "swizzle", "reason"),
    [
        ((), None, "self.shape=()"),
        ((64, 0), None, "self.shape=(64, 0)"),
        ((60, 64), None, "rows=60"),
        ((128,), 64, "only matrices"),
    ],
)
def test_a_tile_that_cannot_be_is_refused(shape: tuple[int, ...], swizzle: int | None, reason: str):
    with pytest.raises(ValueError, match=re.escape(reason)):
        SharedTile(shape, jnp.bfloat16, swizzle)


def test_values_go_only_where_there_are_writers():
    tile = SharedTile((64, 64), jnp.bfloat16)
    by_tma = RingPlan(tile, 2, 1).bind(None, None, None)
    by_threads = RingPlan(tile, 2, 1, writers=1).bind(None, None, None)
    with pytest.raises(ValueError, match="takes no values"):
        by_tma.copy_to_shared(0, jnp.zeros((64, 64)))
    with pytest.raises(ValueError, match="got no values"):
        by_threads.copy_to_shared(0)
    with pytest.raises(ValueError, match="passes no registers"):
        by_tma.load_from_dram(0, None, layout=plgpu.Layout.WGMMA)
