"""How the work of a Hopper kernel is cut into items and handed to its programs."""

import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.kernels.flash_attention.hopper.backward_context import interleaved_at_once
from tilewright.kernels.flash_attention.hopper.call import GroupParts
from tilewright.kernels.flash_attention.hopper.forward import masked_steps
from tilewright.kernels.flash_attention.hopper.schedule import Extent, plan_schedule, row_steps
from tilewright.kernels.hopper.schedule import (
    ITEM_OVERHEAD,
    fewest_at_once,
    group_sizes,
    item_by_arithmetic,
    program_lists,
    program_order,
)
from tilewright.kernels.masks import CausalMask, LengthMask, WindowMask


def schedule_of(mask, rows, columns, block_rows=128, block_columns=128):
    extent = Extent(rows, columns, block_rows, block_columns)
    return plan_schedule(mask, extent, transposed=False, masked_rows=False, masked_columns=True)[0]


@pytest.mark.parametrize(("matrices", "at_once"), [(1, 5), (16, 3), (64, 12), (7, 3), (31, 4), (12, 12)])
def test_groups_are_even(matrices, at_once):
    sizes = group_sizes(matrices, at_once)
    assert sum(sizes) == matrices
    assert max(sizes) <= at_once
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("mask", [None, CausalMask(0), CausalMask(1300), WindowMask(200, 100, 0)])
@pytest.mark.parametrize(("matrices", "at_once"), [(16, 3), (7, 3)])
def test_order(mask, matrices, at_once):
    counts = row_steps(schedule_of(mask, 2048, 1900))
    order = program_order(counts, matrices, at_once)
    assert np.array_equal(np.sort(order), np.arange(matrices * len(counts)))
    first = group_sizes(matrices, at_once)[0] * len(counts)
    assert (np.diff(counts[order[:first] % len(counts)]) <= 0).all()
    item = item_by_arithmetic(counts, matrices, at_once)
    if item is not None:
        assert np.array_equal(item(jnp.arange(len(order), dtype=jnp.int32)), order)


def test_causal_and_full_orders_follow_by_arithmetic():
    for mask in (None, CausalMask(0)):
        assert item_by_arithmetic(row_steps(schedule_of(mask, 4096, 4096)), 64, 12) is not None
    assert item_by_arithmetic(row_steps(schedule_of(WindowMask(300, 300, 0), 4096, 4096)), 64, 12) is None


@pytest.mark.parametrize(("rows", "matrices", "at_once"), [(4096, 64, 12), (16384, 16, 3), (1024, 256, 48)])
def test_lists_are_balanced(rows, matrices, at_once):
    programs, counts = 132, row_steps(schedule_of(CausalMask(0), rows, rows))
    order = program_order(counts, matrices, at_once)
    starts, items = program_lists(order, counts, programs)
    assert starts[0] == 0
    assert starts[-1] == len(items) == len(order)
    assert np.array_equal(np.sort(items), np.sort(order))
    costs = counts[items % len(counts)] + ITEM_OVERHEAD
    longest = np.add.reduceat(costs, starts[:-1]).max()
    assert longest <= 1.02 * costs.sum() / programs


@pytest.mark.parametrize(
    ("rows", "matrices", "cached", "group", "expected"),
    [
        (2, 924, 192, 1, 66),  # two rows of tiles of 66 matrices are an item for each of 132 programs
        (4, 384, 192, 1, 33),
        (32, 64, 12, 1, 5),
        (128, 16, 3, 1, 2),
        (128, 16, 1, 1, 1),  # no more than fit the cache
        (2, 96, 192, 8, 72),  # whole groups
        (400, 64, 24, 8, 8),
    ],
)
def test_even_rows_are_taken_for_as_few_matrices_as_fill_the_device(rows, matrices, cached, group, expected):
    assert fewest_at_once(np.full(rows, 7), matrices, cached, group, 132) == expected


def longest_program(counts, matrices, at_once, programs=132):
    """Steps of the program that is done last, by its list."""
    starts, items = program_lists(program_order(counts, matrices, at_once), counts, programs)
    return np.add.reduceat(counts[items % len(counts)] + ITEM_OVERHEAD, starts[:-1]).max()


@pytest.mark.parametrize(
    ("length", "matrices", "cached"), [(4096, 64, 12), (1024, 256, 48), (512, 96, 192), (8192, 64, 24)]
)
@pytest.mark.parametrize("group", [1, 4])
def test_uneven_rows_of_few_matrices_leave_no_program_idle(length, matrices, cached, group):
    counts = row_steps(schedule_of(CausalMask(0), length, length))
    at_once = fewest_at_once(counts, matrices, cached, group, 132)
    assert at_once == cached or at_once % group == 0
    assert at_once <= cached
    assert longest_program(counts, matrices, at_once) <= longest_program(counts, matrices, cached)


def test_more_programs_than_items_leave_none_without():
    starts, items = program_lists(np.arange(4, dtype=np.int32), np.ones(4, int), 4)
    assert np.array_equal(np.diff(starts), np.ones(4))
    assert sorted(items) == [0, 1, 2, 3]


@pytest.mark.parametrize("mask", [CausalMask(0), CausalMask(300), WindowMask(500, 0, 0), WindowMask(400, 300, 0)])
def test_descending_steps(mask):
    """The same tiles, masked ones first as before, and the others from the last to the first."""
    extent = Extent(1900, 2048, 128, 64)
    schedule, _ = plan_schedule(mask, extent, transposed=True, masked_rows=True, masked_columns=False)
    for row in range(extent.row_tiles - 1):
        ascending, descending = (schedule.steps((), 0, 0, jnp.int32(row), down) for down in (False, jnp.asarray(True)))
        masked, total = int(ascending.masked), int(ascending.total)
        up, down = ([int(steps.tile(jnp.int32(step))) for step in range(total)] for steps in (ascending, descending))
        assert down[:masked] == up[:masked]
        assert down[masked:] == sorted(up[masked:], reverse=True)


def test_query_heads_are_interleaved_where_rows_differ_in_steps():
    def at_once(mask, parts, matrices=8, groups=4, query_bytes=32 << 20):
        extent = Extent(4096, 4096, 128, 64)
        schedule, _ = plan_schedule(mask, extent, transposed=True, masked_rows=True, masked_columns=False)
        return interleaved_at_once(schedule, row_steps(schedule), parts, matrices, groups, query_bytes, 132)

    assert at_once(CausalMask(0), GroupParts(8)) == 4
    assert at_once(CausalMask(0), GroupParts(8), matrices=6) == 3  # two groups of the size of `group_sizes`
    assert at_once(CausalMask(0), GroupParts(8, 4)) == 4
    assert at_once(CausalMask(0), GroupParts(8, 8)) == 0  # one query head
    assert at_once(CausalMask(0), GroupParts(7, 3)) == 0  # parts of different sizes
    assert at_once(CausalMask(0), GroupParts(8), query_bytes=4 << 20) == 0  # of five key heads at a time
    assert at_once(None, GroupParts(8)) == 0
    assert at_once(LengthMask(None, jnp.asarray([500])), GroupParts(8)) == 0


@pytest.mark.parametrize(
    ("mask", "rows", "columns", "block_rows", "expected"),
    [
        (None, 512, 512, 128, (False, False)),
        (None, 512, 500, 128, (True, False)),
        (CausalMask(0), 512, 512, 128, (True, False)),
        (CausalMask(0), 512, 500, 128, (True, False)),
        (CausalMask(0), 576, 576, 192, (True, None)),
        (CausalMask(60), 512, 512, 128, (True, None)),
        (LengthMask(None, jnp.asarray([500])), 512, 512, 128, (None, None)),
    ],
)
def test_visits_that_need_the_mask(mask, rows, columns, block_rows, expected):
    assert masked_steps(schedule_of(mask, rows, columns, block_rows)) == expected
