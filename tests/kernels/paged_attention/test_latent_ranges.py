"""The ranges of keys that latent attention on Hopper gives its CTAs: each block in exactly one, equally many in all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.kernels.paged_attention.hopper.latent_work import (
    BLOCK_K,
    ITEM_OVERHEAD,
    MIN_RANGE,
    SHORT_BATCH,
    LatentCall,
    begin_of_range,
    last_of_sequence,
    latent_ranges,
)

PAGE = 2 * BLOCK_K
FULL = 1 << 14


def call_of(sequences: int, ranges: int) -> LatentCall:
    return LatentCall(
        sequences=sequences, q_length=1, heads=128, num_pages=7, page_size=PAGE, columns=FULL // PAGE,
        softmax_scale=1.0, right=0, ranges=ranges, cluster=1, prefetched=0,
    )  # fmt: skip


def drawn(sequences: int, mean: int, seed: int = 0) -> list[int]:
    found = np.random.default_rng(seed).normal(mean, mean / 2, sequences)
    return np.clip(found.astype(int), 1, None).tolist()


CASES = {
    "one": ([10000], 66),
    "one short": ([3], 66),
    "none": ([0, 0, 0], 5),
    "a range for each": ([FULL] * 66, 66),
    "equal": ([8192] * 64, 66),
    "unequal": (drawn(128, 2142), 66),
    "short": (drawn(128, 200), 66),
    "one long among short ones": ([1, 64, FULL, 65, 0, 63, 128] * 2, 33),
    "more sequences than ranges": (drawn(1000, 300), 44),
    "one range": (drawn(10, 1000), 1),
    "hostile": ([-5, -(2**31), 2**31 - 1, 1 << 30, 0], 9),
    "a long batch": (drawn(SHORT_BATCH + 1, 700), 132),
}


def cuts_of(lengths: list[int], call: LatentCall) -> list[list[int]]:
    """Sequence and block with which each range begins, and the last range of that sequence."""
    ranges = jax.jit(lambda x: latent_ranges(x, call))(jnp.asarray(lengths, jnp.int32))

    def one(number: jax.Array) -> tuple[jax.Array, ...]:
        return *begin_of_range(call, ranges, number), last_of_sequence(call, ranges, number)

    found = jax.jit(jax.vmap(one))(jnp.arange(call.ranges + 1, dtype=jnp.int32))
    return [np.asarray(x).tolist() for x in found]


@pytest.mark.parametrize("name", CASES)
def test_every_block_is_in_one_range(name: str):
    lengths, count = CASES[name]
    call = call_of(len(lengths), count)
    sequence, block, last = cuts_of(lengths, call)
    blocks = [max(-(-min(max(length, 0), FULL) // BLOCK_K), 1) for length in lengths]
    assert len(sequence) == len(block) == len(last) == count + 1
    assert (sequence[0], block[0]) == (0, 0)
    assert (sequence[-1], block[-1]) == (len(lengths), 0)
    # All blocks in their order, and the range of each.
    places = [(s, b) for s, most in enumerate(blocks) for b in range(most)]
    begins = list(zip(sequence, block, strict=True))
    assert begins == sorted(begins)
    assert all(s == len(lengths) or b < blocks[s] for s, b in begins)
    owners = np.asarray([sum(begin <= place for begin in begins) - 1 for place in places])
    total = sum(blocks) + ITEM_OVERHEAD * len(blocks)
    most = max(-(-total // count), MIN_RANGE)
    for number in range(count):
        mine = [place for place, owner in zip(places, owners, strict=True) if owner == number]
        # The overhead of a sequence comes before its blocks, so it may be that of the range before.
        assert len(mine) + ITEM_OVERHEAD * sum(b == 0 for _, b in mine) <= most + ITEM_OVERHEAD
    of_sequence: dict[int, list[int]] = {}
    for (s, _), owner in zip(places, owners.tolist(), strict=True):
        of_sequence.setdefault(s, []).append(owner)
    for number, (s, b) in enumerate(begins):
        if b > 0:
            assert last[number] == of_sequence[s][-1]
            assert of_sequence[s][0] < number


def test_ranges_are_equal():
    """Not merely bounded: with many sequences all but the last have the same cost to within one overhead."""
    lengths = drawn(500, 3000)
    sequence, block, _ = map(np.asarray, cuts_of(lengths, call_of(500, 66)))
    blocks = -(-np.minimum(lengths, FULL) // BLOCK_K)
    before = np.concatenate([[0], np.cumsum(blocks)])
    sizes = np.diff(before[sequence] + block)[:-1] + ITEM_OVERHEAD * np.diff(sequence)[:-1]
    assert np.ptp(sizes) <= 2 * ITEM_OVERHEAD


def test_both_ways_to_sum_are_the_same(monkeypatch: pytest.MonkeyPatch):
    lengths = jnp.asarray(drawn(300, 2000), jnp.int32)
    call = call_of(300, 66)
    want = latent_ranges(lengths, call)
    monkeypatch.setattr("tilewright.kernels.paged_attention.hopper.latent_work.SHORT_BATCH", 0)
    for got, each in zip(latent_ranges(lengths, call), want, strict=True):
        np.testing.assert_array_equal(got, each)
