"""The dropout generator against published vectors, Python's integers, statistics, and itself in tiles."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry2x32_p

from tilewright.kernels.numerics.dropout import (
    drawn_probability,
    head_keys,
    keep_elements,
    keep_mask,
    keep_mask_tile,
    keep_threshold,
    philox2x32,
    threefry2x32,
)

# Random123's kat_vectors, "philox2x32 10": counter, key, result.
PHILOX_ANSWERS = [
    ((0x00000000, 0x00000000), 0x00000000, (0xFF1DAE59, 0x6CD10DF2)),
    ((0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, (0x2C3F628B, 0xAB4FD7AD)),
    ((0x243F6A88, 0x85A308D3), 0x13198A2E, (0xDD7CE038, 0xF62A4C12)),
]
# "threefry2x32 20".
THREEFRY_ANSWERS = [
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]
SEED = jnp.array([0x12345678, 0x9ABCDEF0], jnp.uint32)


def words(pair):
    return tuple(jnp.asarray(np.uint32(word)) for word in pair)


@pytest.mark.parametrize(("counter", "key", "result"), PHILOX_ANSWERS)
def test_known_answers_of_philox(counter, key, result):
    assert tuple(int(word) for word in philox2x32(jnp.asarray(np.uint32(key)), words(counter))) == result


@pytest.mark.parametrize(("counter", "key", "result"), THREEFRY_ANSWERS)
def test_known_answers_of_threefry(counter, key, result):
    assert tuple(int(word) for word in threefry2x32(words(key), words(counter))) == result


def test_keys_are_those_of_jax():
    random = np.random.default_rng(0)
    arrays = [jnp.asarray(random.integers(0, 2**32, 257, dtype=np.uint32)) for _ in range(4)]
    want = threefry2x32_p.bind(*arrays)
    got = threefry2x32(tuple(arrays[:2]), tuple(arrays[2:]))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


def philox_of_integers(key: int, left: int, right: int) -> tuple[int, int]:
    """Philox-2x32-10 as its authors write it down, on Python's integers."""
    for _ in range(10):
        product = left * 0xD256D193
        left, right = (product >> 32) ^ key ^ right, product & 0xFFFFFFFF
        key = (key + 0x9E3779B9) & 0xFFFFFFFF
    return left, right


def test_definition_element_by_element():
    prob = 19661 / 65536
    whole = np.asarray(keep_mask(SEED, 2, 2, 19, 35, prob))
    indices = (jnp.arange(2, dtype=jnp.uint32).repeat(2), jnp.tile(jnp.arange(2, dtype=jnp.uint32), 2))
    keys = np.stack(threefry2x32_p.bind(*jnp.broadcast_to(SEED[:, None], (2, 4)), *indices), -1).reshape(2, 2, 2)
    for batch, head, row, column in np.ndindex(whole.shape):
        first, second = keys[batch, head].tolist()
        # The numbers of the positions whose bit 3 is 0, with which a position shares its call but for that bit.
        r, c = (sum(not x & 8 for x in range(position & ~8)) for position in (row, column))
        word = philox_of_integers(first, r, c ^ second)[row // 8 % 2]
        assert whole[batch, head, row, column] == ((word >> 16 * (column // 8 % 2)) % 2**16 >= 19661)


SHAPES = [(16, 32), (4, 6), (3, 5), (1, 1), (37, 49)]


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_tiles_do_not_matter(rows, columns):
    shape, (all_rows, all_columns) = (rows, columns), (37, 49)
    whole = np.asarray(keep_mask(SEED, 2, 3, all_rows, all_columns, 0.5))
    keys = head_keys(SEED, jnp.arange(2)[:, None], jnp.arange(3)[None, :])
    traced = jax.jit(lambda row, column: keep_mask_tile(keys, row, column, shape, 0.5))
    aligned = jax.jit(lambda row, column: keep_mask_tile(keys, row, column, shape, 0.5, multiples=(16, 32)))
    for row in (0, 5, 16, 24, all_rows - rows):
        for column in (0, 2, 3, 17, 32, all_columns - columns):
            if row + rows > all_rows or column + columns > all_columns:
                continue
            want = whole[:, :, row : row + rows, column : column + columns]
            np.testing.assert_array_equal(keep_mask_tile(keys, row, column, shape, 0.5), want)
            np.testing.assert_array_equal(traced(row, column), want)
            if row % 16 == column % 32 == 0:
                np.testing.assert_array_equal(aligned(row, column), want)


def agreement(one: np.ndarray, other: np.ndarray, prob: float) -> float:
    """The covariance of two masks in units of its standard deviation, if they are independent."""
    covariance = ((one - (1 - prob)) * (other - (1 - prob))).mean()
    return covariance * math.sqrt(one.size) / (prob * (1 - prob))


@functools.partial(jax.jit, static_argnums=1)
def drawn_mask(seed: jax.Array, prob: float) -> jax.Array:
    """The mask of 2 × 4 heads of 512 × 512 elements."""
    return keep_mask_tile(head_keys(seed, jnp.arange(2)[:, None], jnp.arange(4)), 0, 0, (512, 512), prob)


@pytest.mark.parametrize("prob", [6554 / 65536, 0.5, 58982 / 65536])
def test_rate_and_independence(prob):
    kept = np.asarray(drawn_mask(SEED, prob)).astype(np.float64)
    assert abs(kept.mean() - (1 - prob)) * math.sqrt(kept.size) <= 5 * math.sqrt(prob * (1 - prob))
    # Of what is scaled the expectation is 1, so that of the output is as without dropout.
    assert abs((kept / (1 - prob)).mean() - 1) * math.sqrt(kept.size) <= 5 * math.sqrt(prob / (1 - prob))
    for axis, distances in {0: (1,), 1: (1, 2, 3), 2: (1, 7, 8, 9, 16, 128), 3: (1, 2, 7, 8, 9, 16, 64, 128)}.items():
        for distance in distances:
            moved = np.moveaxis(kept, axis, 0)
            assert abs(agreement(moved[distance:], moved[:-distance], prob)) <= 5
    blocks = kept.reshape(2, 4, 32, 2, 8, 32, 2, 8)  # the four elements of a call, in pairs
    four = [blocks[:, :, :, row, :, :, column] for row in range(2) for column in range(2)]
    for i, one in enumerate(four):
        for other in four[i + 1 :]:
            assert abs(agreement(one, other, prob)) <= 5
    other_seeds = (SEED + 1, SEED[::-1], SEED.at[0].add(1))
    for other in (np.asarray(drawn_mask(seed, prob)) for seed in other_seeds):
        assert abs(agreement(kept, other, prob)) <= 5
    assert abs(agreement(kept, np.swapaxes(kept, 2, 3), prob)) <= 8  # the diagonal agrees with itself


@pytest.mark.parametrize("bits", [range(8), range(8, 16)], ids=["lower", "upper"])
def test_random_numbers_are_uniform(bits):
    # The number itself is not given, but whether it is at least a threshold: 255 thresholds give 8 of its bits.
    keys = head_keys(SEED, 0, 0)
    counters = jnp.arange(1 << 9, dtype=jnp.uint32)[:, None], jnp.arange(1 << 9, dtype=jnp.uint32)
    results = np.asarray(jnp.stack(philox2x32(keys[0], (counters[0], counters[1] ^ keys[1])))).ravel()
    lanes = np.concatenate([results & 0xFFFF, results >> 16])
    counts = np.bincount(lanes >> bits[0] & 0xFF, minlength=256)
    chi_square = ((counts - lanes.size / 256) ** 2).sum() / (lanes.size / 256)
    assert abs(chi_square - 255) <= 5 * math.sqrt(2 * 255)  # mean and deviation of 255 degrees of freedom
    element = keep_elements(keys, jnp.arange(512)[:, None], jnp.arange(512), int(np.median(lanes)) / 65536)
    assert abs(np.asarray(element).mean() - 0.5) <= 0.01


def test_heads_that_share_a_key_of_philox_still_differ():
    prob, rows, columns = 0.5, jnp.arange(256)[:, None], jnp.arange(256)
    first, second = head_keys(SEED, 0, 0)
    one = np.asarray(keep_elements((first, second), rows, columns, prob))
    for other_second in (second + jnp.uint32(1 << 20), second ^ jnp.uint32(1 << 31)):
        other = np.asarray(keep_elements((first, other_second), rows, columns, prob))
        assert abs(agreement(one, other, prob)) <= 5


def test_under_vmap():
    seeds = jnp.stack([SEED, SEED + 1])
    mapped = jax.vmap(lambda seed: keep_mask(seed, 1, 2, 4, 4, 0.5))(seeds)
    for seed, kept in zip(seeds, mapped, strict=True):
        np.testing.assert_array_equal(kept, keep_mask(seed, 1, 2, 4, 4, 0.5))


def test_probabilities_are_multiples_of_the_smallest():
    assert drawn_probability(0.0) == 0.0
    assert drawn_probability(0.5) == 0.5
    assert drawn_probability(0.1) == 6554 / 65536
    assert drawn_probability(2.0**-18) == 0.0  # nothing is dropped
    assert drawn_probability(2.0**-16 * 0.75) == 2.0**-16
    assert drawn_probability(np.nextafter(1.0, 0.0)) == 65535 / 65536  # something is kept
    for prob in (-0.1, 1.0, math.nan):
        with pytest.raises(ValueError, match="prob="):
            drawn_probability(prob)


def test_threshold():
    assert keep_threshold(0.0) == 0
    assert keep_threshold(0.5) == 1 << 15
    assert keep_threshold(65535 / 65536) == 65535
    with pytest.raises(ValueError, match="no multiple of"):
        keep_threshold(0.1)
