"""The dropout generator against the published vectors, JAX's own Threefry, and itself in tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry2x32_p

from tilewright.kernels.dropout import head_keys, keep_mask, keep_mask_tile, keep_threshold, threefry2x32

# Random123's kat_vectors, "threefry 2 32 20": counter, key, result.
KNOWN_ANSWERS = [
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]
SEED = jnp.array([0x12345678, 0x9ABCDEF0], jnp.uint32)


def words(pair):
    return tuple(jnp.asarray(np.uint32(word)) for word in pair)


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_known_answers(counter, key, result):
    assert tuple(int(word) for word in threefry2x32(words(key), words(counter))) == result


def test_agrees_with_jax():
    random = np.random.default_rng(0)
    arrays = [jnp.asarray(random.integers(0, 2**32, 257, dtype=np.uint32)) for _ in range(4)]
    want = threefry2x32_p.bind(*arrays)
    got = threefry2x32(tuple(arrays[:2]), tuple(arrays[2:]))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


def test_definition_element_by_element():
    prob, whole = 0.3, np.asarray(keep_mask(SEED, 2, 3, 4, 5, 0.3))
    for batch, head, row, column in np.ndindex(whole.shape):
        key = threefry2x32_p.bind(*SEED, jnp.uint32(batch), jnp.uint32(head))
        bits = threefry2x32_p.bind(*key, jnp.uint32(row), jnp.uint32(column >> 1))[column & 1]
        assert whole[batch, head, row, column] == (int(bits) >= round(prob * 2**32))


@pytest.mark.parametrize("shape", [(4, 6), (3, 5), (1, 1), (13, 17)])
def test_tiles_do_not_matter(shape):
    whole = np.asarray(keep_mask(SEED, 2, 3, 13, 17, 0.5))
    keys = head_keys(SEED, jnp.arange(2)[:, None], jnp.arange(3)[None, :])
    traced = jax.jit(lambda row, column: keep_mask_tile(keys, row, column, shape, 0.5))
    even = jax.jit(lambda row, column: keep_mask_tile(keys, row, column, shape, 0.5, even_start=True))
    for row in (0, 5, 13 - shape[0]):
        for column in (0, 2, 3, 17 - shape[1]):
            if row + shape[0] > 13 or column + shape[1] > 17:
                continue
            want = whole[:, :, row : row + shape[0], column : column + shape[1]]
            np.testing.assert_array_equal(keep_mask_tile(keys, row, column, shape, 0.5), want)
            np.testing.assert_array_equal(traced(row, column), want)
            if column % 2 == 0:
                np.testing.assert_array_equal(even(row, column), want)


@pytest.mark.parametrize("prob", [0.0, 0.1, 0.5, 0.9])
def test_keep_rate(prob):
    kept = np.asarray(keep_mask(SEED, 2, 2, 256, 256, prob))
    deviation = np.sqrt(prob * (1 - prob) / kept.size)
    assert abs(kept.mean() - (1 - prob)) <= 5 * deviation
    for axis in range(3):  # neighbours of every kind are independent
        one, other = np.moveaxis(kept, axis, 0)[0], np.moveaxis(kept, axis, 0)[1]
        assert abs((one & other).mean() - (1 - prob) ** 2) <= 5 / np.sqrt(one.size)
    assert abs((kept[..., ::2] & kept[..., 1::2]).mean() - (1 - prob) ** 2) <= 5 / np.sqrt(kept.size / 2)


@pytest.mark.slow
def test_under_vmap():
    seeds = jnp.stack([SEED, SEED + 1])
    mapped = jax.vmap(lambda seed: keep_mask(seed, 1, 2, 4, 4, 0.5))(seeds)
    for seed, kept in zip(seeds, mapped, strict=True):
        np.testing.assert_array_equal(kept, keep_mask(seed, 1, 2, 4, 4, 0.5))


def test_threshold():
    assert keep_threshold(0.0) == 0
    assert keep_threshold(0.5) == 2**31
    assert keep_threshold(np.nextafter(1.0, 0.0)) == 2**32 - 1
    for prob in (-0.1, 1.0):
        with pytest.raises(ValueError, match="prob="):
            keep_threshold(prob)
