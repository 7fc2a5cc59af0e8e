"""What CUDA kernels are told of masks says the same as the masks, for every mask of the conformance suite."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.flash_attention.conformance import CASES, ConformanceCase, describe
from tilewright.kernels.flash_attention.mask_terms import RANGE_TILE, MaskParts, visible_ranges
from tilewright.kernels.flash_attention.op import FlashAttention
from tilewright.kernels.masks import CausalMask, LengthMask, Mask, SegmentMask, WindowMask


def visible(mask: Mask, q_length: int, kv_length: int) -> np.ndarray:
    """As ``HeadScores::visible`` in ``cuda/attention.cuh`` computes it."""
    parts = MaskParts.of(mask)
    difference = (np.arange(kv_length)[None, :] - np.arange(q_length)[:, None])[None]
    seen: Any = np.ones((1, q_length, kv_length), bool)
    if parts.has_rows:
        q_rows, kv_rows = (np.asarray(rows, np.int64) for rows in parts.rows(q_length, kv_length))
        seen = q_rows[:, 0, :, None] == kv_rows[:, 0, None, :]
        difference = kv_rows[:, 1, None, :] - q_rows[:, 1, :, None]
    seen = (seen & (difference >= parts.band.lowest) & (difference <= parts.band.highest))[:, None]
    if parts.matrix is not None:
        seen = seen & np.asarray(parts.matrix.materialise(q_length, kv_length))
    return seen


def check(mask: Mask, q_length: int, kv_length: int) -> None:
    want = np.asarray(mask.materialise(q_length, kv_length))
    got = visible(mask, q_length, kv_length)
    want, got = np.broadcast_arrays(want, got)
    assert np.array_equal(got, want)
    for transposed in (False, True):
        ranges = np.asarray(visible_ranges(mask, q_length, kv_length, transposed=transposed))
        tiles = want.swapaxes(2, 3) if transposed else want
        for tile in range(ranges.shape[2]):
            rows = tiles[:, :, tile * RANGE_TILE : (tile + 1) * RANGE_TILE].any(axis=2)
            columns = np.arange(rows.shape[-1])
            first, end = (ranges[:, :, tile, side, None] for side in (0, 1))
            assert not np.any(rows & ((columns < first) | (columns >= end)))


@pytest.mark.parametrize("conformance_case", CASES, ids=describe)
def test_masks_of_the_conformance_suite(conformance_case: ConformanceCase):
    inputs = conformance_case.prepared(seed=0)
    query, key, mask = inputs.query, inputs.key, inputs.mask
    if mask is not None and key.shape[1] and query.shape[1]:
        check(mask, query.shape[1], key.shape[1])


LENGTHS = jnp.array([150, 90, 0], jnp.int32)
IDS = jnp.asarray(np.random.default_rng(0).integers(-2, 3, (3, 200)), jnp.int32)
POSITIONS = jnp.arange(200, dtype=jnp.int32)[None] // 3


COMBINED: list[Mask] = [
    CausalMask() & LengthMask(LENGTHS, None),
    CausalMask() & LengthMask(LENGTHS, LENGTHS[::-1]),
    SegmentMask(IDS, IDS) & LengthMask(LENGTHS, LENGTHS),
    SegmentMask(IDS, IDS) & SegmentMask(IDS[:, ::-1], IDS),
    CausalMask(5) & WindowMask(30, None, 0, POSITIONS, POSITIONS),
    WindowMask(30, 2, 0, POSITIONS, POSITIONS) & CausalMask(0, POSITIONS),
    (CausalMask() & LengthMask(LENGTHS, LENGTHS)) | WindowMask(3, 3),
    CausalMask(-300),
    LengthMask(LENGTHS, LENGTHS) & WindowMask(10, 1 << 30, 1 << 29),
]


@pytest.mark.parametrize("mask", COMBINED, ids=repr)
def test_masks_put_together(mask: Mask):
    check(mask, 200, 200)


def test_plain_bands_need_no_arrays():
    inputs = FlashAttention().prepare(*[jnp.zeros((1, 8, 1, 8))] * 3, causal=True, sliding_window=3)
    parts = MaskParts.of(inputs.mask)
    assert (parts.band.lowest, parts.band.highest) == (-3, 0)
    assert not parts.has_rows
    assert parts.matrix is None
