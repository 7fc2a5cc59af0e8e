"""The tile specs: derived numbers, worked examples, and what is refused."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.support.kv_buffer import KVBufferConfig, Role, over_budget
from tests.support.layouts import WarpAccess, bank_conflicts, is_bijective
from tilewright.kernels.hopper.layouts import Swizzle
from tilewright.kernels.hopper.shared import SharedTile

# 128 keys of depth 128 in strips of 32 by four warps, and an instruction of 16 × 16 × 16.
SIZES: dict[str, Any] = {
    "dtype": jnp.bfloat16,
    "block_n": 128,
    "warp_n": 32,
    "block_k": 32,
    "depth": 128,
    "mma_n": 16,
    "mma_k": 16,
    "num_threads": 256,
}
KEY = KVBufferConfig(role=Role.KEY, **SIZES)
VALUE = KVBufferConfig(role=Role.VALUE, **SIZES)


def test_the_two_operands_differ_as_they_must():
    assert (KEY.block_tile, KEY.warp_tile, KEY.wsize, KEY.iterator_axis) == ((128, 32), (32, 32), 32, 1)
    assert (VALUE.block_tile, VALUE.warp_tile, VALUE.wsize, VALUE.iterator_axis) == ((32, 128), (32, 32), 32, 0)
    assert (KEY.transposed, VALUE.transposed) == (True, False)
    assert KEY.num_warps_n == VALUE.num_warps_n == 4
    assert KEY.num_strips == VALUE.num_strips == 4


def test_derived_counts():
    assert (KEY.num_mmas, KEY.num_k_tiles, KEY.simd_width, KEY.num_repeats) == (2, 2, 8, 4)
    assert (VALUE.num_mmas, VALUE.num_k_tiles, VALUE.simd_width, VALUE.num_repeats) == (2, 2, 8, 16)
    chained = dataclasses.replace(KEY, group_size=2, num_stages=2)
    assert chained.num_k_tiles == 1
    assert (chained.load_vectors, chained.mma_vectors) == (2 * 2 * 1, 2)
    assert dataclasses.replace(KEY, mma_n=24).num_mmas == 2  # the last instruction is partly idle


def test_256_threads_of_decode_are_64_by_4_for_keys_and_16_by_16_for_values():
    key, value = (dataclasses.replace(config, decode=True) for config in (KEY, VALUE))
    assert key.thread_layout.shape == (64, 4)
    assert value.thread_layout.shape == (16, 16)
    assert KEY.thread_layout.shape == VALUE.thread_layout.shape == (64, 4)


def test_fewer_vectors_than_threads_leave_threads_idle():
    small = dataclasses.replace(KEY, decode=True, block_n=32, warp_n=32, num_threads=256)
    assert small.num_vectors == 128
    assert small.thread_layout.shape == (32, 4)


@given(
    st.sampled_from([Role.KEY, Role.VALUE]),
    st.sampled_from([64, 128, 256]),
    st.sampled_from([32, 64]),
    st.sampled_from([16, 32, 64]),
    st.sampled_from([64, 96, 128, 256]),
    st.booleans(),
)
def test_strips_are_stored_without_gap_or_overlap(
    role: Role, block_n: int, warp_n: int, block_k: int, depth: int, decode: bool
):
    assume((depth if role is Role.KEY else block_n) % block_k == 0)
    assume((depth if role is Role.KEY else block_n) // block_k >= 2)
    assume(not decode or depth != 96)  # 12 vectors to a row: 256 threads do not fill whole rows
    sizes = SIZES | {"block_n": block_n, "warp_n": warp_n, "block_k": block_k, "depth": depth}
    config = KVBufferConfig(role=role, decode=decode, **sizes)
    rows, columns = config.block_tile
    assert is_bijective(config.shared_layout)
    assert config.num_warps_n * config.wsize == (block_n if role is Role.KEY else depth)
    assert config.num_strips * math.prod(config.block_tile) == block_n * depth
    i, j = np.mgrid[:rows, :columns]
    simd = config.simd_width
    expected = i * columns + j if decode else i * simd + j % simd + j // simd * rows * simd
    np.testing.assert_array_equal(config.shared_layout.matrix(), expected)


def test_prefill_reads_vectors_without_conflicts_and_decode_needs_the_swizzle():
    access = WarpAccess(tuple((row, 8) for row in range(8)), vector=8, itemsize=2)
    assert bank_conflicts(KEY.shared_layout, access) == 0
    decode = dataclasses.replace(KEY, decode=True)  # rows of 64 bytes: two to a wavefront
    assert bank_conflicts(decode.shared_layout, access) == 3
    swizzled = dataclasses.replace(decode, swizzle=Swizzle(2, 3, 3))
    assert bank_conflicts(swizzled.shared_layout, access) == 0


def test_bounds_end_where_the_valid_rows_end():
    assert KEY.bounds(valid_rows=100, row_stride=1024) == 100 * 1024
    assert KEY.bounds(0, 128) == 0
    with pytest.raises(ValueError, match="valid_rows=-1"):
        KEY.bounds(-1, 128)
    with pytest.raises(ValueError, match="overlap"):
        KEY.bounds(4, 64)


@pytest.mark.parametrize(
    ("role", "change", "reason"),
    [
        ("query", {}, "only keys and values"),
        ("key", {"block_n": 0}, "block_n must be positive"),
        ("key", {"warp_n": 48}, r"self\.block_n=128, self\.warp_n=48"),
        ("key", {"block_k": 48}, "do not divide the 128"),
        ("key", {"block_k": 128}, "two strips"),
        ("value", {"block_n": 32}, "two strips"),
        ("value", {"depth": 126}, "divide the columns"),
        ("key", {"block_k": 4}, "vectors of 8"),
        ("key", {"num_threads": 30}, "four threads"),
        ("value", {"num_threads": 40, "decode": True}, "whole rows of 16"),
        ("key", {"num_stages": 64}, "shared memory"),
        ("key", {"block_n": 16, "warp_n": 16, "swizzle": Swizzle(5, 5, 5)}, "period"),
    ],
)
def test_a_config_that_cannot_be_is_refused(role: str, change: dict[str, Any], reason: str):
    with pytest.raises(ValueError, match=reason):
        KVBufferConfig(role=Role(role), **(SIZES | change))


def test_tiles_for_wgmma_hold_one_or_more_strips():
    config = dataclasses.replace(KEY, block_k=64, num_stages=3)
    assert config.tile() == SharedTile((128, 64), jnp.bfloat16)
    whole = config.tile(strips=2)
    assert (whole.shape, whole.swizzle) == ((128, 128), 128)
    assert VALUE.tile(4).shape == (128, 128)
    with pytest.raises(ValueError, match="strips=3"):
        config.tile(strips=3)


def test_a_shared_tile_knows_its_size():
    tile = SharedTile((128, 96), jnp.bfloat16)
    assert (tile.swizzle, tile.stack_bytes(2)) == (64, 2 * 128 * 96 * 2)
    assert is_bijective(tile.layout)


def test_the_budget_counts_aligned_parts():
    assert over_budget({"key": 100 * 1024, "value": 127 * 1024}) is None
    reason = over_budget({"key": 100 * 1024, "value": 126 * 1024 + 1, "query": 1})
    assert (
        reason == "233472 bytes of shared memory are wanted, a block has 232448: key 102400, value 130048, query 1024"
    )
