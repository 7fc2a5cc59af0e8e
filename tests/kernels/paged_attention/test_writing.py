"""Writing into pages: against the oracle, against plain indexing, in place, and with bad places."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.kernels.paged_attention.writing import COMPARED, is_last
from tilewright.modules import UpdatePages, page_attention, ragged_page_attention, update_pages

PAGES, SIZE, HEADS, DIM = 6, 4, 2, 8


def draw(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


KEY_PAGES, VALUE_PAGES = draw(PAGES, SIZE, HEADS, DIM, seed=1), draw(PAGES, SIZE, HEADS, DIM + 2, seed=2)
TABLE = jnp.asarray([[4, 1, 0], [2, 5, 3]])
LENGTHS, CUM = jnp.asarray([9, 5]), jnp.asarray([0, 6, 8])
KEY, VALUE = draw(8, HEADS, DIM, seed=3), draw(8, HEADS, DIM + 2, seed=4)


def test_tokens_stand_where_plain_indexing_finds_them():
    key_pages, value_pages = update_pages(KEY_PAGES, VALUE_PAGES, KEY, VALUE, TABLE, LENGTHS, CUM)
    want_key, want_value = np.array(KEY_PAGES), np.array(VALUE_PAGES)
    for sequence, (length, first, last) in enumerate(((9, 0, 6), (5, 6, 8))):
        for position, token in zip(range(length - (last - first), length), range(first, last), strict=True):
            page = TABLE[sequence, position // SIZE]
            want_key[page, position % SIZE], want_value[page, position % SIZE] = KEY[token], VALUE[token]
    np.testing.assert_array_equal(key_pages, want_key)
    np.testing.assert_array_equal(value_pages, want_value)


@pytest.mark.parametrize(
    ("kv_dtype", "scale"),
    list(
        itertools.product(
            ["int8", "float8_e4m3fn", "float8_e5m2", "float32", "bfloat16"],
            [(PAGES, SIZE, HEADS), (1, 1, 1), (PAGES, 1, HEADS), (PAGES, SIZE, 1), None],
        )
    ),
)
def test_against_the_oracle(kv_dtype: str, scale: tuple[int, ...] | None):
    if kv_dtype == "int8" and scale is None:
        pytest.skip("int8 has scales")
    pages = KEY_PAGES.astype(kv_dtype), VALUE_PAGES.astype(kv_dtype)
    scales = {} if scale is None else {name: jnp.full(scale, 0.03) for name in ("key_scale", "value_scale")}
    op = UpdatePages()
    want = jax.jit(op.reference)(op.prepare(*pages, 100 * KEY, VALUE, TABLE, LENGTHS, CUM, **scales))
    got = update_pages(*pages, 100 * KEY, VALUE, TABLE, LENGTHS, CUM, **scales)
    assert len(got) == len(want) == (2 if scale is None else 4)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))


@pytest.mark.parametrize(("kv_dtype", "error"), [("int8", 1 / 254), ("float8_e4m3fn", 1 / 16), ("float8_e5m2", 1 / 8)])
def test_scales_of_tokens_bound_the_error_of_each(kv_dtype: str, error: float):
    pages = jnp.zeros((PAGES, SIZE, HEADS, DIM), kv_dtype)
    key = KEY * jnp.logspace(-6, 6, 8)[:, None, None].at[3].set(0.0)
    stored, scale = update_pages(pages, None, key, None, TABLE, LENGTHS, CUM, key_scale=jnp.ones((PAGES, SIZE, HEADS)))
    back = np.asarray(stored, np.float32) * np.asarray(scale)[..., None]
    for token in range(6):
        position = 3 + token
        got = back[TABLE[0, position // SIZE], position % SIZE]
        assert np.all(np.abs(got - key[token]) <= error * 1.01 * np.abs(key[token]).max(axis=-1, keepdims=True) + 1e-30)
    assert scale[TABLE[0, 1], 2].tolist() == [1.0, 1.0]


def test_what_has_no_place_is_dropped_and_the_last_of_two_stays():
    table = jnp.asarray([[4, -1, 77], [2, 2, 2]])
    got, _ = update_pages(KEY_PAGES, VALUE_PAGES, KEY, VALUE, table, jnp.asarray([9, 6]), jnp.asarray([0, 6, 7]))
    want = np.array(KEY_PAGES)
    want[4, 3], want[2, 1] = KEY[0], KEY[6]
    np.testing.assert_array_equal(got, want)

    # Of fewer positions than there are new tokens the last tokens have one.
    got, _ = update_pages(KEY_PAGES, VALUE_PAGES, KEY, VALUE, TABLE, jnp.asarray([0, 1]), jnp.asarray([0, 6, 8]))
    want = np.array(KEY_PAGES)
    want[2, 0] = KEY[7]
    np.testing.assert_array_equal(got, want)

    twice = jnp.asarray([[4, 1], [4, 1]])
    got, values = update_pages(KEY_PAGES, VALUE_PAGES, KEY, VALUE, twice, jnp.asarray([4, 4]), jnp.asarray([0, 4, 8]))
    np.testing.assert_array_equal(got[4], KEY[4:])
    np.testing.assert_array_equal(values[4], VALUE[4:])


@pytest.mark.parametrize("count", [1, 7, COMPARED, COMPARED + 1])
def test_the_last_token_of_a_place(count: int):
    draw = np.random.default_rng(0)
    page, row = draw.integers(0, 9, count), draw.integers(0, 4, count)
    got = is_last(jnp.asarray(page), jnp.asarray(row))
    last = {place: i for i, place in enumerate(zip(page.tolist(), row.tolist(), strict=True))}
    assert np.flatnonzero(got).tolist() == sorted(last.values())


@pytest.mark.parametrize(
    ("lengths", "cum"),
    [([-3, 2**31 - 1], [0, 4, 8]), ([13, 1000], [0, 8, 8]), ([2, 3], [5, 3, 99]), ([-(2**31), 12], [-9, 2**31 - 1, 0])],
)
def test_hostile_lengths_and_boundaries_are_those_of_the_oracle(lengths: list[int], cum: list[int]):
    op = UpdatePages()
    call = (KEY_PAGES, VALUE_PAGES, KEY, VALUE, TABLE, jnp.asarray(lengths), jnp.asarray(cum))
    for ours, theirs in zip(update_pages(*call), op.reference(op.prepare(*call)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_donated_pages_are_written_in_place():
    step = jax.jit(lambda pages, key: update_pages(pages, None, key, None, TABLE, LENGTHS), donate_argnums=0)
    lowered = step.lower(KEY_PAGES, KEY[:2]).compile()
    assert "input_output_alias={ {}: (0, {}" in lowered.as_text()
    pages = KEY_PAGES + 0
    address = pages.unsafe_buffer_pointer()
    assert step(pages, KEY[:2]).unsafe_buffer_pointer() == address


def test_a_scan_that_writes_and_attends():
    """Token after token through the cache is causal attention over all at once."""
    tokens, heads = 11, 4
    query, key, value = (
        draw(tokens, heads, DIM, seed=5),
        draw(tokens, HEADS, DIM, seed=6),
        draw(tokens, HEADS, DIM, seed=7),
    )
    table = TABLE[:1]

    def step(cache: Any, new: Any) -> Any:
        index, q, k, v = new
        cache = update_pages(*cache, k[None], v[None], table, index[None] + 1)
        return cache, page_attention(q[None], *cache, table, index[None] + 1)[0]

    empty = tuple(jnp.full((PAGES, SIZE, HEADS, DIM), jnp.nan) for _ in range(2))
    run = jax.jit(lambda cache: jax.lax.scan(step, cache, (jnp.arange(tokens), query, key, value)), donate_argnums=0)
    _, out = run(empty)
    want = jax.nn.dot_product_attention(query[None], key[None], value[None], is_causal=True)[0]
    np.testing.assert_allclose(out, want, atol=2e-6, rtol=1e-5)

    # The same in two chunks, each written and attended to in one call.
    cache = tuple(jnp.full((PAGES, SIZE, HEADS, DIM), jnp.nan) for _ in range(2))
    found = []
    for first, last in ((0, 7), (7, 11)):
        new = {"new_key": key[first:last], "new_value": value[first:last]}
        part, *cache = ragged_page_attention(
            query[first:last], *cache, table, jnp.asarray([last]), jnp.asarray([0, last - first]), **new
        )
        found.append(part)
    np.testing.assert_allclose(jnp.concatenate(found), want, atol=2e-6, rtol=1e-5)
