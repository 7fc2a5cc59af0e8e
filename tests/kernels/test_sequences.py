"""Descriptions of sequences give the same ids as loops over tokens, and pools keep what no row writes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright import modules
from tilewright.kernels.sequences import PADDING, begins, num_sequences, sequence_arrays, sequence_ids, without_padding
from tilewright.kernels.state_pools import exists, read_states, slot_arrays, write_states


@pytest.mark.parametrize("cum", [(0, 3, 3, 7), (2, 2, 5, 6), (0, 0, 0), (4, 9), (0,), (9, 9, 9), (*[1] * 600, 4, 8)])
def test_ids_of_packed_sequences(cum):
    wanted = np.full((1, 9), PADDING)
    for n, (first, last) in enumerate(itertools.pairwise(cum)):
        wanted[0, first:last] = n
    arrays = sequence_arrays(1, 9, np.array(cum), None, None)
    np.testing.assert_array_equal(sequence_ids(1, 9, **arrays), wanted)
    assert num_sequences(1, arrays["cum_seqlens"]) == len(cum) - 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cum_seqlens": [0, 5, 3, 8]}, r"cum_seqlens\[2\] = 3 is less than the boundary before"),
        ({"cum_seqlens": [-1, 8]}, r"cum_seqlens\[0\] = -1 is negative"),
        ({"cum_seqlens": np.array([0, 9], np.uint8)}, r"cum_seqlens\[1\] = 9 is more than the length 8"),
        ({"seq_lengths": [9]}, r"seq_lengths\[0\] = 9 is more than the length 8"),
    ],
)
def test_known_numbers_that_are_no_sequences(given, message):
    x, heads, state = np.ones((1, 8, 2), np.float32), np.ones((1, 8, 1, 2), np.float32), np.ones((2, 1), np.float32)
    for call in (
        lambda **given: modules.linear_attention(heads, heads, heads, **given),
        lambda **given: modules.delta_rule(heads, heads, heads, heads[..., 0], **given),
        lambda **given: modules.causal_conv1d(x, x[0, :2], **given),
        lambda **given: modules.selective_scan(x, x, -state, x[..., :1], x[..., :1], **given),
    ):
        with pytest.raises(ValueError, match=message):
            call(**given)


def test_ids_of_segments():
    ids = np.array([[5, 5, 2, 2, 5, -1, -1, 5], [-3, 0, 0, -1, 0, 0, 1, 0]])
    found = sequence_ids(2, 8, **sequence_arrays(2, 8, None, ids, None))
    for row, numbers in zip(ids, np.asarray(found), strict=True):
        for i in range(8):
            assert (numbers[i] == PADDING) == (row[i] < 0)
            for j in range(i):
                together = row[i] >= 0 and all(row[j : i + 1] == row[i])
                assert (numbers[i] == numbers[j] != PADDING) == together or row[i] < 0
    np.testing.assert_array_equal(
        begins(found), [[True, False, True, False, True, False, False, True], [0, 1, 0, 0, 1, 0, 1, 1]]
    )


def test_ids_of_rows_with_lengths():
    found = sequence_ids(3, 4, **sequence_arrays(3, 4, None, None, [4, 0, 2]))
    np.testing.assert_array_equal(found, [[0, 0, 0, 0], [-1, -1, -1, -1], [0, 0, -1, -1]])
    assert sequence_ids(3, 4, **sequence_arrays(3, 4, None, None, None)) is None
    kept = without_padding(jnp.full((3, 4, 2), jnp.nan).at[0].set(1.0), found)
    np.testing.assert_array_equal(np.isnan(kept)[:, :, 0], [[0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]])


@pytest.mark.parametrize(
    ("batch", "given", "error", "message"),
    [
        (2, {"cum_seqlens": [0, 4]}, ValueError, "batch must be 1"),
        (1, {"cum_seqlens": np.zeros((1, 2), int)}, ValueError, r"\[sequences \+ 1\]"),
        (1, {"cum_seqlens": np.zeros(2)}, TypeError, "cum_seqlens must hold integers"),
        (1, {"cum_seqlens": [0, 4], "seq_lengths": [3]}, ValueError, "cum_seqlens and seq_lengths"),
        (2, {"segment_ids": np.zeros((2, 5), int)}, ValueError, "segment_ids must have the shape"),
        (2, {"seq_lengths": [1]}, ValueError, "seq_lengths must have the shape"),
    ],
)
def test_wrong_descriptions(batch, given, error, message):
    with pytest.raises(error, match=message):
        sequence_arrays(batch, 4, **{"cum_seqlens": None, "segment_ids": None, "seq_lengths": None, **given})


def test_pools_keep_what_no_row_writes():
    pool = jnp.arange(10.0).reshape(5, 2)
    read, _ = slot_arrays(4, 5, np.array([3, -1, 0, 9], np.int64), None)
    assert read.dtype == jnp.int32
    np.testing.assert_array_equal(exists(read, 5), [True, False, True, False])
    np.testing.assert_array_equal(read_states(pool, read)[jnp.array([0, 2])], pool[jnp.array([3, 0])])
    written = jax.jit(write_states)(pool, read, jnp.full((4, 2), -1.0))
    np.testing.assert_array_equal(written, pool.at[jnp.array([3, 0])].set(-1.0))


def test_wrong_slots():
    with pytest.raises(ValueError, match="got 4"):
        slot_arrays(3, 4, None, None)
    with pytest.raises(ValueError, match="write_indices must have the shape"):
        slot_arrays(3, 4, [0, 1, 2], [1])
    with pytest.raises(TypeError, match="state_indices must hold integers"):
        slot_arrays(1, 4, np.zeros(1), None)
