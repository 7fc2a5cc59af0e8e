"""The mask algebra against brute force on whole masks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.kernels.masks import (
    AndMask,
    CausalMask,
    ExplicitMask,
    LengthMask,
    OrMask,
    SegmentMask,
    TileClass,
    TileGrid,
    WindowMask,
    reduce_classes,
)

BATCH, HEADS = 2, 3
lengths = st.sampled_from((1, 11))  # few shapes, so that compiled programs are shared
blocks = st.sampled_from((1, 4, 11))
offsets = st.integers(-15, 15)
sides = st.none() | st.integers(0, 6)


def whole(mask, q_length, kv_length):
    return np.broadcast_to(mask.materialise(q_length, kv_length), (BATCH, HEADS, q_length, kv_length))


def brute_classes(array, grid):
    classes = np.empty((*array.shape[:2], grid.q_tiles, grid.kv_tiles), np.int32)
    for index in np.ndindex(classes.shape):
        batch, head, row, column = index
        rows = slice(row * grid.block_q, (row + 1) * grid.block_q)
        columns = slice(column * grid.block_k, (column + 1) * grid.block_k)
        tile = array[batch, head, rows, columns]
        classes[index] = TileClass.FULL if tile.all() else TileClass.PARTIAL if tile.any() else TileClass.EMPTY
    return classes


def check_classes(mask, grid, exact):
    array = whole(mask, grid.q_length, grid.kv_length)
    classes = mask.classify(grid)
    assert isinstance(classes, np.ndarray) == mask.is_static
    classes = np.broadcast_to(classes, (BATCH, HEADS, grid.q_tiles, grid.kv_tiles))
    truth = brute_classes(array, grid)
    if exact:
        np.testing.assert_array_equal(classes, truth)
    decided = classes != TileClass.PARTIAL
    np.testing.assert_array_equal(classes[decided], truth[decided])
    static = mask.classify(grid, static_only=True)
    assert isinstance(static, np.ndarray)
    static = np.broadcast_to(static, truth.shape)
    np.testing.assert_array_equal(static[static != TileClass.PARTIAL], truth[static != TileClass.PARTIAL])
    reduced = np.asarray(reduce_classes(classes))
    for row, column in np.ndindex(reduced.shape):
        if reduced[row, column] != TileClass.PARTIAL:
            assert (truth[:, :, row, column] == reduced[row, column]).all()


def check_tiles(mask, grid):
    """Every tile of the padded mask, at traced starts, is the slice of the whole."""
    q_padded, kv_padded = grid.q_tiles * grid.block_q, grid.kv_tiles * grid.block_k
    array = whole(mask, grid.q_length, grid.kv_length)
    padded = mask.pad(q_padded, kv_padded)
    tile = jax.jit(lambda mask, i, j: mask.tile(i * grid.block_q, grid.block_q, j * grid.block_k, grid.block_k))
    for i in range(grid.q_tiles):
        for j in range(grid.kv_tiles):
            got = np.broadcast_to(tile(padded, i, j), (BATCH, HEADS, grid.block_q, grid.block_k))
            want = array[:, :, i * grid.block_q : (i + 1) * grid.block_q, j * grid.block_k : (j + 1) * grid.block_k]
            np.testing.assert_array_equal(got[:, :, : want.shape[2], : want.shape[3]], want)


@st.composite
def grids(draw):
    return TileGrid(draw(lengths), draw(lengths), draw(blocks), draw(blocks))


@st.composite
def positions(draw, length):
    if draw(st.booleans()):
        return None
    batch = draw(st.sampled_from([1, BATCH]))
    return jnp.asarray(draw(st.lists(st.integers(-8, 8), min_size=batch * length, max_size=batch * length))).reshape(
        batch, length
    )


@st.composite
def dynamic_leaves(draw, grid):
    kind = draw(st.sampled_from(["causal", "window", "segment", "length", "explicit"]))
    q_length, kv_length = grid.q_length, grid.kv_length
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if kind in ("causal", "window"):
        arrays = {"q_positions": draw(positions(q_length)), "kv_positions": draw(positions(kv_length))}
        if kind == "causal":
            return CausalMask(draw(offsets), **arrays)
        return WindowMask(draw(sides), draw(sides), draw(offsets), **arrays)
    batch = draw(st.sampled_from([1, BATCH]))
    if kind == "segment":
        ids = [np.sort(random.integers(0, 4, (batch, length)), axis=1) for length in (q_length, kv_length)]
        return SegmentMask(*(jnp.asarray(part) for part in ids))
    if kind == "length":
        rows, columns = (jnp.asarray(random.integers(0, length + 3, batch)) for length in (q_length, kv_length))
        return LengthMask(draw(st.sampled_from([None, rows])), draw(st.sampled_from([None, columns])))
    shape = [size if random.random() < 0.7 else 1 for size in (BATCH, HEADS, q_length, kv_length)]
    return ExplicitMask(jnp.asarray(random.random(shape) < random.choice([0.0, 0.2, 0.8, 1.0])))


def test_definitions_by_hand():
    """Each leaf against the sentence that defines it, element by element."""
    q_length, kv_length = 5, 7
    i, j = np.arange(q_length)[:, None], np.arange(kv_length)[None, :]
    for offset in (-9, -2, 0, 2, 9):
        np.testing.assert_array_equal(whole(CausalMask(offset), q_length, kv_length)[0, 0], j <= i + offset)
        window = whole(WindowMask(1, 2, offset), q_length, kv_length)[1, 2]
        np.testing.assert_array_equal(window, (j >= i + offset - 1) & (j <= i + offset + 2))
    np.testing.assert_array_equal(whole(WindowMask(None, 1), q_length, kv_length)[0, 0], j <= i + 1)
    rows, columns = jnp.array([2, 5]), jnp.array([0, 4])
    both = whole(LengthMask(rows, columns), q_length, kv_length)
    for batch in range(2):
        np.testing.assert_array_equal(both[batch, 0], (i < int(rows[batch])) & (j < int(columns[batch])))
    ids = jnp.array([[0, 0, 1, 1, 2]]), jnp.array([[1, 1, 0, 2, 2, 3, 0]])
    np.testing.assert_array_equal(
        whole(SegmentMask(*ids), q_length, kv_length)[1, 1], np.asarray(ids[0])[0][:, None] == np.asarray(ids[1])
    )
    packed = CausalMask(1, q_positions=jnp.array([[4, 5, 6, 0, 1]]), kv_positions=None)
    np.testing.assert_array_equal(whole(packed, q_length, kv_length)[0, 0], j <= np.array([4, 5, 6, 0, 1])[:, None] + 1)


@settings(max_examples=150, deadline=None)
@given(grids(), offsets, sides, sides)
def test_static_bands_are_exact(grid, offset, left, right):
    causal, window = CausalMask(offset), WindowMask(left, right, offset // 2)
    for mask in (causal, window, causal & window, causal & window & CausalMask(offset - 3)):
        check_classes(mask, grid, exact=True)
    check_classes(causal | window, grid, exact=False)


@settings(max_examples=40, deadline=None)
@given(grids(), st.integers(0, 2**32 - 1), st.booleans(), st.booleans())
def test_lengths_are_exact(grid, seed, rows, columns):
    random = np.random.default_rng(seed)
    mask = LengthMask(
        jnp.asarray(random.integers(0, grid.q_length + 3, BATCH)) if rows else None,
        jnp.asarray(random.integers(0, grid.kv_length + 3, BATCH)) if columns else None,
    )
    check_classes(mask, grid, exact=True)


@settings(max_examples=60, deadline=None)
@given(st.data(), grids())
def test_classification_is_sound(data, grid):
    leaves = [data.draw(dynamic_leaves(grid)) for _ in range(data.draw(st.integers(1, 3)))]
    mask = leaves[0]
    for leaf in leaves[1:]:
        mask = mask & leaf if data.draw(st.booleans()) else mask | leaf
    check_classes(mask, grid, exact=False)


@settings(max_examples=12, deadline=None)
@given(st.data(), grids())
def test_tiles_are_slices(data, grid):
    first, second = data.draw(dynamic_leaves(grid)), data.draw(dynamic_leaves(grid))
    check_tiles((first & CausalMask(2)) | second, grid)


@pytest.mark.parametrize("offset", [2**31 + 5, -(2**31) - 5, 2**40, -(2**40)])
def test_large_offsets(offset):
    grid = TileGrid(5, 6, 2, 3)
    for mask in (CausalMask(offset), WindowMask(2**40, 0, offset), WindowMask(0, 2**40, offset)):
        check_classes(mask, grid, exact=True)
        dynamic = dataclasses.replace(mask, q_positions=jnp.arange(5)[None])
        np.testing.assert_array_equal(whole(dynamic, 5, 6), whole(mask, 5, 6))


def test_unsigned_positions():
    mask = CausalMask(
        0, q_positions=jnp.arange(4, dtype=jnp.uint32)[None], kv_positions=jnp.arange(4, dtype=jnp.uint8)[None]
    )
    np.testing.assert_array_equal(whole(mask, 4, 4), whole(CausalMask(), 4, 4))
    check_classes(mask, TileGrid(4, 4, 2, 2), exact=True)


def test_segments_of_whole_blocks_are_full():
    ids = jnp.array([[0, 0, 1, 1]])
    classes = SegmentMask(ids, ids).classify(TileGrid(4, 4, 2, 2))
    np.testing.assert_array_equal(classes[0, 0], [[TileClass.FULL, TileClass.EMPTY], [TileClass.EMPTY, TileClass.FULL]])


def test_a_tile_of_several_segments_is_partial():
    """On either side, whichever segment it begins with."""
    q_ids, kv_ids = jnp.array([[0, 0, 0, 1]]), jnp.array([[0, 1, 0, 0]])
    classes = SegmentMask(q_ids, kv_ids).classify(TileGrid(4, 4, 2, 2))
    partial, full = TileClass.PARTIAL, TileClass.FULL
    np.testing.assert_array_equal(classes[0, 0], [[partial, full], [partial, partial]])


def test_no_keys():
    grid = TileGrid(4, 0, 2, 2)
    assert CausalMask().classify(grid).shape == (1, 1, 2, 0)
    assert (CausalMask() & LengthMask(jnp.array([1, 2]))).classify(grid).shape == (2, 1, 2, 0)


def test_combination_flattens():
    a, b, c = CausalMask(), WindowMask(1, 1), CausalMask(3)
    assert a & b & c == AndMask((a, b, c)) == a & (b & c)
    assert (a | b) | c == OrMask((a, b, c))
    assert (a | b) & c == AndMask((OrMask((a, b)), c))
    assert hash(a & b) == hash(AndMask((a, b)))
    with pytest.raises(TypeError):
        a & True


def test_is_a_pytree():
    mask = (CausalMask(2) & SegmentMask(jnp.zeros((1, 4)), jnp.ones((1, 5)))) | LengthMask(None, jnp.array([3]))
    leaves, structure = jax.tree.flatten(mask)
    assert len(leaves) == 3
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), mask)
    assert jax.tree.structure(abstract) == structure
    assert hash(abstract) == hash(jax.tree.map(lambda leaf: leaf, abstract))
    assert jax.tree.structure(jax.tree.unflatten(structure, [object()] * 3)) is not None
    assert not mask.is_static
    assert (CausalMask() | WindowMask(1, None)).is_static


def test_under_vmap_and_jit():
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 3, (4, 1, 6)))
    mask = SegmentMask(ids, ids) & CausalMask()
    grid = TileGrid(6, 6, 2, 3)
    classes = jax.jit(jax.vmap(lambda mask: mask.classify(grid)))(mask)
    for n in range(4):
        one = SegmentMask(ids[n], ids[n]) & CausalMask()
        np.testing.assert_array_equal(classes[n], one.classify(grid))


def test_bad_shapes_and_dtypes_are_named():
    with pytest.raises(ValueError, match=r"self\.left=-1"):
        WindowMask(-1, 0)
    with pytest.raises(ValueError, match=r"self\.block_q=0"):
        TileGrid(4, 4, 0, 1)
    with pytest.raises(ValueError, match="q_segment_ids"):
        (CausalMask() & SegmentMask(jnp.zeros((2, 3), int), jnp.zeros((2, 4), int))).check(2, 1, 4, 4)
    with pytest.raises(TypeError, match="kv_lengths"):
        LengthMask(None, jnp.zeros(2)).check(2, 1, 4, 4)
    with pytest.raises(ValueError, match="broadcastable"):
        ExplicitMask(jnp.ones((1, 2, 3, 3), bool)).check(1, 2, 3, 4)
    with pytest.raises(TypeError, match="boolean"):
        ExplicitMask(jnp.ones((1, 2, 3, 3))).check(1, 2, 3, 3)
    (CausalMask(q_positions=jnp.zeros((1, 3), int)) | WindowMask(0, 0)).check(2, 1, 3, 3)
