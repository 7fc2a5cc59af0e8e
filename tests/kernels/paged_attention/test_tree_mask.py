"""Trees of draft tokens: against a dense mask in float64, against the paths of the tree, and wrong arguments."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from tests.kernels.conftest import H100
from tests.kernels.paged_attention.conformance import causal_bits, packed_structs
from tilewright.kernels import kernel
from tilewright.kernels.paged_attention.triton.backend import TritonPagedAttention
from tilewright.kernels.triton.interpreter import interpret_triton
from tilewright.modules import page_attention, ragged_page_attention
from tilewright.ops.utils.datacarrier import FwdParams

PAGES, SIZE, HEADS, KV_HEADS, DIM = 24, 8, 6, 2, 16
COUNTS = (7, 0, 35, 1, 4)
CUM = np.append(0, np.cumsum(COUNTS))
# Sequences share pages 3 and 9, and the last one begins with its new tokens; the third has its pages +1 token.
LENGTHS = np.asarray([16, 0, 33 + 8, 1, 4])
TABLE = np.asarray(
    [[3, 9, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [3, 9, 11, 14, 2, 20], [5, -1, 0, 0, 0, 0], [6, 77, 0, 0, 0, 0]]
)


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


QUERY = draw(int(CUM[-1]), HEADS, DIM)


def pages(seed: int) -> np.ndarray:
    """Pages in which everything that is no token of a sequence is NaN."""
    found = draw(PAGES, SIZE, KV_HEADS, DIM, seed=seed)
    used = np.zeros((PAGES, SIZE), bool)
    for length, table in zip(LENGTHS, TABLE, strict=True):
        position = np.arange(length)
        used[table[position // SIZE], position % SIZE] = True
    found[~used] = np.nan
    return found


KEY_PAGES, VALUE_PAGES = pages(1), pages(2)
CALL = tuple(map(jnp.asarray, (QUERY, KEY_PAGES, VALUE_PAGES, TABLE, LENGTHS, CUM)))


def words_of(seen: np.ndarray) -> jax.Array:
    """The documented way from a mask ``[tokens, bits]`` to words."""
    return jnp.asarray(np.packbits(seen, axis=1, bitorder="little").view("<u4").astype(np.uint32))


def random_mask(seed: int, words: int = 2, share: float = 0.4) -> np.ndarray:
    return np.random.default_rng(seed).random((int(CUM[-1]), 32 * words)) < share


def dense(seen: np.ndarray, left: int | None = None, sinks: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The definition in float64, over a dense mask of each sequence."""
    out, lse = np.zeros(QUERY.shape), np.full(QUERY.shape[:2], -np.inf)
    for row, count in enumerate(COUNTS):
        length = int(LENGTHS[row])
        at = np.arange(length)
        keys, values = (x[TABLE[row][at // SIZE], at % SIZE].astype(np.float64) for x in (KEY_PAGES, VALUE_PAGES))
        context = length - count
        mask = np.ones((count, length), bool)
        mask[:, max(context, 0) :] = seen[CUM[row] : CUM[row + 1], max(-context, 0) : count]
        if left is not None:
            mask &= at >= context + np.arange(count)[:, None] - left
        for index in range(count):
            for head in range(HEADS):
                group, token = head // (HEADS // KV_HEADS), CUM[row] + index
                logits = keys[mask[index], group] @ QUERY[token, head].astype(np.float64) / np.sqrt(DIM)
                extra = np.zeros(0) if sinks is None else sinks[head]
                total = np.exp(logits).sum() + np.exp(extra).sum()
                if total:
                    out[token, head] = np.exp(logits) @ values[mask[index], group] / total
                    lse[token, head] = np.log(total)
    return out, lse


def attend(tree_mask: jax.Array, **options: Any) -> Any:
    return ragged_page_attention(*CALL, tree_mask=tree_mask, return_lse=True, **options)


def interpreted(tree_mask: jax.Array, **options: Any) -> Any:
    """The same by the interpreter of Triton: several tiles of a sequence, and two splits of its keys."""
    inputs = kernel("ragged_page_attention").prepare(*CALL, tree_mask=tree_mask, **options)
    params = FwdParams(q_blocksize=8, kv_blocksize=16, num_key_splits=2, num_warps=4, num_stages=2)
    with interpret_triton():
        run = jax.jit(lambda inputs: TritonPagedAttention().forward(inputs, params))
        return jax.block_until_ready(run(inputs))


@pytest.mark.parametrize("run", [attend, interpreted])
@pytest.mark.parametrize(
    ("seed", "options"), [(0, {}), (1, {"left": 5}), (2, {"sinks": draw(HEADS, 1, seed=9)}), (3, {"left": 0})]
)
def test_against_a_dense_mask(seed: int, options: dict[str, Any], run: Callable[..., Any]):
    seen = random_mask(seed)
    given = {"sliding_window": options.get("left"), "softmax_aux": options.get("sinks")}
    got = run(words_of(seen), **{name: value for name, value in given.items() if value is not None})
    for ours, theirs in zip(got, dense(seen, **options), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=3e-6, rtol=1e-5)


def test_bits_decide_about_the_token_itself_and_later_ones():
    """All bits are attention without causality; none leaves what was in the cache before, which may be nothing."""
    out, lse = attend(words_of(np.ones((int(CUM[-1]), 64), bool)))
    want = ragged_page_attention(*CALL, causal=False, return_lse=True)
    np.testing.assert_array_equal(out, want[0])
    np.testing.assert_array_equal(lse, want[1])
    out, lse = attend(words_of(np.zeros((int(CUM[-1]), 64), bool)))
    first = CUM[3]
    assert not np.any(np.asarray(out[first:]))
    assert np.isneginf(np.asarray(lse[first:])).all()
    context = page_attention(QUERY[:7], KEY_PAGES, VALUE_PAGES, np.repeat(TABLE[:1], 7, 0), np.full(7, 9))
    np.testing.assert_allclose(out[:7], context, atol=1e-6)


def test_tokens_without_a_bit_are_masked():
    """35 new tokens, and 32 bits: the last three are nobody's."""
    seen = np.ones((int(CUM[-1]), 64), bool)
    seen[:, 32:] = False
    for ours, theirs in zip(attend(words_of(seen)[:, :1]), attend(words_of(seen)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_allclose(attend(words_of(seen)[:, :1])[0], dense(seen)[0], atol=3e-6)


def test_every_path_is_a_sequence_of_its_own():
    """A node of a tree gives what it gives at the end of its path, decoded without a mask."""
    generator = np.random.default_rng(5)
    count, context = 12, 19
    parents = [-1, *(int(generator.integers(-1, index)) for index in range(1, count))]
    paths: list[list[int]] = []
    for index, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), index])
    query, keys, values = (draw(context + count, heads, DIM, seed=seed) for seed, heads in ((1, 4), (2, 2), (3, 2)))
    seen = np.zeros((count, 32), bool)
    for index, path in enumerate(paths):
        seen[index, path] = True
    size, table = 8, np.asarray([[2, 0, 3, 1]])

    def cached(tokens: np.ndarray) -> np.ndarray:
        cache = np.full((4 * size, 2, DIM), np.nan, np.float32)
        at = np.arange(len(tokens))
        cache[table[0, at // size] * size + at % size] = tokens
        return cache.reshape(4, size, 2, DIM)

    out = ragged_page_attention(
        query[context:], cached(keys), cached(values), table, np.asarray([context + count]), np.asarray([0, count]),
        tree_mask=words_of(seen),
    )  # fmt: skip
    for index, path in enumerate(paths):
        own = [*range(context), *(context + node for node in path)]
        alone = page_attention(
            query[None, context + index], cached(keys[own]), cached(values[own]), table, np.asarray([len(own)])
        )
        np.testing.assert_allclose(out[index], alone[0], atol=2e-6, rtol=1e-5)


def test_the_mask_takes_the_place_of_the_right_side():
    bits = words_of(random_mask(4))
    want = attend(bits, sliding_window=(20, None))
    for options in ({"causal": False, "sliding_window": (20, 1)}, {"sliding_window": 20}):
        for ours, theirs in zip(attend(bits, **options), want, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_maps_and_narrow_dtypes():
    seen = random_mask(6)
    both = jnp.stack([words_of(seen), jnp.asarray(causal_bits(COUNTS, 2))])
    mapped = jax.vmap(lambda bits: attend(bits)[0])(both)
    for ours, bits in zip(mapped, both, strict=True):
        np.testing.assert_allclose(ours, attend(bits)[0], atol=1e-6)


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (np.zeros((47, 2), np.int32), TypeError, "words of uint32"),
        (np.zeros((47, 64), bool), TypeError, "words of uint32"),
        (np.zeros((46, 2), np.uint32), ValueError, r"tokens=47.*\(46, 2\)"),
        (np.zeros((47, 0), np.uint32), ValueError, "a word at least"),
        (np.zeros(47, np.uint32), ValueError, r"\[tokens, words\]"),
    ],
)
def test_wrong_masks(mask: np.ndarray, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        attend(mask)  # type: ignore[arg-type]


def test_who_serves_it_on_hopper():
    inputs = packed_structs(q_lengths=(64,), tree=True)
    reasons = {
        entry.name: entry.backend.not_supported_reasons(inputs, H100, "forward")
        for entry in kernel("ragged_page_attention").backends
        if entry.backend is not None
    }
    assert "does not serve tree_mask" in reasons.pop("cuda")
    assert reasons == {"hopper": [], "triton": [], "xla": []}
