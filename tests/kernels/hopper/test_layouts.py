"""The layout algebra against enumeration."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.layouts import WarpAccess, bank_conflicts, inverse, is_bijective
from tilewright.kernels.hopper.layouts import (
    Layout,
    Swizzle,
    SwizzledLayout,
    blocked_product,
    coalesce,
    complement,
    composition,
    row_major,
)

EXTENTS = st.sampled_from([1, 2, 3, 4, 6, 8])


@st.composite
def layouts(draw, max_leaves: int = 4) -> Layout:
    """Any layout: compact or not, overlapping or not, flat or nested."""
    leaves = draw(st.lists(st.tuples(EXTENTS, st.integers(0, 12)), min_size=1, max_size=max_leaves))
    shape, stride = [extent for extent, _ in leaves], [step for _, step in leaves]
    if len(leaves) > 2 and draw(st.booleans()):
        return Layout((shape[0], tuple(shape[1:])), (stride[0], tuple(stride[1:])))
    return Layout(tuple(shape), tuple(stride))


@st.composite
def compact_layouts(draw, max_leaves: int = 4) -> Layout:
    """A bijective layout: extents in any order of contiguity."""
    shape = draw(st.lists(EXTENTS, min_size=1, max_size=max_leaves))
    order = draw(st.permutations(range(len(shape))))
    stride = [0] * len(shape)
    filled = 1
    for mode in order:
        stride[mode] = filled
        filled *= shape[mode]
    return Layout(tuple(shape), tuple(stride))


def enumerated(layout: Layout) -> list[int]:
    return [layout(position) for position in range(layout.size)]


@given(layouts())
def test_offsets_are_the_layout_of_every_integer(layout: Layout):
    assert layout.offsets().tolist() == enumerated(layout)
    assert layout.cosize == max(enumerated(layout)) + 1


def test_a_coordinate_may_be_a_tree_or_an_integer():
    layout = Layout((2, (3, 4)), (12, (1, 3)))
    assert layout(1, (2, 3)) == 12 + 2 + 9
    assert layout(1, 2 + 3 * 3) == layout(1, (2, 3)) == layout(1 + 2 * (2 + 3 * 3))
    for coordinate in (24, -1, (1, 2, 3), (2, 0), ((0, 0), 0)):
        with pytest.raises(ValueError):
            layout(coordinate)


@given(layouts())
def test_coalesce_keeps_the_function_with_fewer_leaves(layout: Layout):
    merged = coalesce(layout)
    assert enumerated(merged) == enumerated(layout)
    assert len(merged.flat) <= len(layout.flat)
    assert coalesce(merged) == merged


@given(layouts(), layouts(max_leaves=2))
def test_composition_is_one_after_the_other_or_refused(outer: Layout, inner: Layout):
    try:
        composed = composition(outer, inner)
    except ValueError:
        return
    assert enumerated(composed) == [outer(offset) for offset in enumerated(inner)]
    assert [mode.size for mode in composed.modes] == [mode.size for mode in inner.modes]


@given(compact_layouts())
def test_composition_with_the_whole_domain_is_never_refused(outer: Layout):
    assert enumerated(composition(outer, Layout(outer.size, 1))) == enumerated(outer)


def test_composition_says_why_it_refuses():
    with pytest.raises(ValueError, match="do not fit"):
        composition(Layout(8, 1), Layout(3, 4))
    with pytest.raises(ValueError, match="do not divide"):
        composition(Layout((4, 3), (1, 10)), Layout(6, 1))
    with pytest.raises(ValueError, match="carry"):
        composition(Layout((2, 2), (0, 1)), Layout((2, 2), (1, 1)))
    with pytest.raises(ValueError, match="do not divide"):
        composition(Layout((2, 3), (1, 5)), Layout((2, 1), (3, 1)))


@given(compact_layouts(), st.integers(1, 4), st.integers(1, 3))
def test_complement_fills_the_rest_once(layout: Layout, stretch: int, more: int):
    spread = Layout(layout.shape, tuple(step * stretch for _, step in layout.flat))
    rest = complement(spread, spread.cosize * more)
    together = Layout((spread.shape, rest.shape), (spread.stride, rest.stride))
    offsets = enumerated(together)
    assert len(set(offsets)) == len(offsets)
    assert set(range(spread.cosize * more)) <= set(offsets)


def test_an_overlapping_layout_has_no_complement():
    for layout in (Layout((2, 2), (1, 1)), Layout(4, 0), Layout((4, 2), (1, 6))):
        with pytest.raises(ValueError, match="no complement"):
            complement(layout, 64)


@given(EXTENTS, EXTENTS, EXTENTS, EXTENTS)
def test_blocked_product_repeats_the_block(rows: int, columns: int, down: int, across: int):
    block, tiler = row_major(rows, columns), row_major(down, across)
    matrix = blocked_product(block, tiler).matrix()
    assert matrix.shape == (rows * down, columns * across)
    for i in range(down):
        for j in range(across):
            tile = matrix[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            np.testing.assert_array_equal(tile, block.matrix() + tiler(i, j) * block.size)


def test_blocked_product_wants_as_many_modes():
    with pytest.raises(ValueError, match="modes"):
        blocked_product(row_major(2, 2), Layout(4, 1))


@given(compact_layouts())
def test_inverse_leads_back(layout: Layout):
    back = inverse(layout)
    assert is_bijective(layout)
    assert is_bijective(back)
    assert [back(offset) for offset in enumerated(layout)] == list(range(layout.size))


@given(layouts())
def test_bijective_means_every_offset_once(layout: Layout):
    assert is_bijective(layout) == (sorted(enumerated(layout)) == list(range(layout.size)))
    if not is_bijective(layout):
        with pytest.raises(ValueError, match="bijective"):
            inverse(layout)


@given(st.integers(0, 3), st.integers(0, 4), st.integers(0, 3))
def test_swizzle_is_a_permutation_and_its_own_inverse(bits: int, base: int, more: int):
    swizzle = Swizzle(bits, base, bits + more)
    offsets = np.arange(swizzle.period * 2)
    assert sorted(swizzle(offsets)) == offsets.tolist()
    np.testing.assert_array_equal(swizzle(swizzle(offsets)), offsets)
    np.testing.assert_array_equal(swizzle(offsets + swizzle.period), swizzle(offsets) + swizzle.period)
    assert all(swizzle(int(offset)) == offset ^ ((int(offset) & swizzle.mask) >> swizzle.shift) for offset in offsets)


def test_swizzle_refuses_a_mask_that_reads_what_it_writes():
    with pytest.raises(ValueError, match=r"self\.bits=3"):
        Swizzle(3, 4, 2)


def conflicts(layout, coordinates, itemsize: int, vector: int) -> int:
    """Wavefronts too many, counted from the definition: one per distinct word of the busiest bank of each group."""
    width = itemsize * vector
    group = min(32, 128 // width)
    extra = 0
    for first in range(0, len(coordinates), group):
        needed = {
            (layout(coordinate) * itemsize + byte) // 4
            for coordinate in coordinates[first : first + group]
            for byte in range(width)
        }
        extra += max(sum(word % 32 == bank for word in needed) for bank in range(32)) - 1
    return extra


@given(compact_layouts(), st.sampled_from([(1, 4), (2, 2), (2, 8), (4, 4), (4, 1)]), st.integers(0, 2**31))
def test_bank_conflicts_are_counted_as_defined(layout: Layout, access: tuple[int, int], seed: int):
    itemsize, vector = access
    starts = np.random.default_rng(seed).integers(0, math.ceil(layout.size / vector), 32) * vector
    coordinates = tuple(int(start) for start in starts % layout.size)
    access_of_warp = WarpAccess(coordinates, vector, itemsize)
    assert bank_conflicts(layout, access_of_warp) == conflicts(layout, coordinates, itemsize, vector)


def test_rows_of_128_bytes_conflict_eightfold_until_they_are_swizzled():
    plain = row_major(64, 64)
    column = WarpAccess(tuple((row, 8) for row in range(8)), vector=8, itemsize=2)
    row = WarpAccess(tuple((3, 8 * vector) for vector in range(8)), vector=8, itemsize=2)
    assert bank_conflicts(plain, column) == 7
    assert bank_conflicts(SwizzledLayout(plain, Swizzle(3, 3, 3)), column) == 0
    assert bank_conflicts(SwizzledLayout(plain, Swizzle(3, 3, 3)), row) == bank_conflicts(plain, row) == 0


def test_every_error_names_what_is_wrong():
    for shape, stride in (((2, 3), (1,)), (2, (1,)), ((0, 2), (1, 1)), ((2, 2), (1, -1))):
        with pytest.raises(ValueError, match=r"self\."):
            Layout(shape, stride)
    with pytest.raises(ValueError, match="32 threads"):
        WarpAccess((), 8, 2)
    with pytest.raises(ValueError, match="bytes"):
        WarpAccess((0,), 3, 2)
    with pytest.raises(ValueError, match="two modes"):
        Layout(4, 1).matrix()
