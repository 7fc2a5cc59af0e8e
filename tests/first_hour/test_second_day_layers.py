"""A decoder that scans over its layers, each with a cache: of one pool, the scan's carry, nothing is copied."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.modules import (
    chunked_prefill_paged_decode,
    decode_attention,
    mla_decode,
    page_attention,
    ragged_page_attention,
    unified_attention,
    update_pages,
)

LAYERS, PAGES, SIZE, KV_HEADS, DIM, HEADS = 3, 64, 8, 2, 16, 4
TABLE = jnp.array([[3, 9, -1], [40, 8, 2]])
LENGTHS = jnp.array([9, 22])
STEP = jax.random.split(jax.random.key(0), 3)
QUERY = jax.random.normal(STEP[0], (2, HEADS, DIM))
KEY, VALUE = (jax.random.normal(k, (2, KV_HEADS, DIM)) for k in STEP[1:])
STACKED = tuple(jax.random.normal(jax.random.key(i), (LAYERS, PAGES, SIZE, KV_HEADS, DIM)) for i in (1, 2))
POOL = tuple(x.reshape(-1, *x.shape[2:]) for x in STACKED)


def by_layer(query: Any, stacked: Any) -> Any:
    def layer(x: Any, pages: Any) -> Any:
        pages = tuple(update_pages(*pages, KEY, VALUE, TABLE, LENGTHS))
        return x + page_attention(x, *pages, TABLE, LENGTHS), pages

    return jax.lax.scan(layer, query, stacked)


def in_a_pool(query: Any, pool: Any) -> Any:
    def layer(carry: Any, index: Any) -> Any:
        x, pages = carry
        first = index * PAGES
        pages = tuple(update_pages(*pages, KEY, VALUE, TABLE, LENGTHS, page_offset=first))
        return (x + page_attention(x, *pages, TABLE, LENGTHS, page_offset=first), pages), None

    return jax.lax.scan(layer, (query, pool), jnp.arange(LAYERS))[0]


def test_a_pool_as_the_carry_gives_the_same_and_copies_nothing() -> None:
    (want, stacked), (got, pool) = by_layer(QUERY, STACKED), in_a_pool(QUERY, POOL)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    for mine, theirs in zip(pool, stacked, strict=True):
        np.testing.assert_array_equal(mine.reshape(theirs.shape), theirs)
    cache = sum(x.nbytes for x in POOL)
    memory = [
        jax.jit(f, donate_argnums=1).lower(QUERY, pages).compile().memory_analysis().temp_size_in_bytes
        for f, pages in ((by_layer, STACKED), (in_a_pool, POOL))
    ]
    assert memory[0] >= cache / 2  # what the page warns of; if this fails, XLA has learnt it
    assert memory[1] < cache / 10


@pytest.mark.parametrize("offset", [0, 5, jnp.int32(7)], ids=str)
def test_every_function_moves_its_table(offset: Any) -> None:
    """A page that does not exist stays one."""
    moved = jnp.where(TABLE < 0, TABLE, TABLE + offset)
    pages, cum = POOL, jnp.array([0, 1, 2])
    latents = pages[0][:, :, :1]
    calls = {
        "page": lambda table, **more: page_attention(QUERY, *pages, table, LENGTHS, **more),
        "decode": lambda table, **more: decode_attention(QUERY, *pages, LENGTHS, page_table=table, **more),
        "ragged": lambda table, **more: ragged_page_attention(QUERY, *pages, table, LENGTHS, cum, **more),
        "unified": lambda table, **more: unified_attention(QUERY, *pages, cum, LENGTHS, table, **more),
        "chunked": lambda table, **more: chunked_prefill_paged_decode(
            QUERY, KEY, VALUE, *pages, table, LENGTHS, cum, **more
        ),
        "latent": lambda table, **more: mla_decode(QUERY, latents, table, LENGTHS, kv_lora_rank=8, **more),
        "update": lambda table, **more: update_pages(*pages, KEY, VALUE, table, LENGTHS, **more),
    }
    for name, call in calls.items():
        got, want = call(TABLE, page_offset=offset), call(moved)
        jax.tree.map(lambda a, b, name=name: np.testing.assert_array_equal(a, b, name), got, want)


@pytest.mark.parametrize(
    ("offset", "error", "said"),
    [(1.5, TypeError, "page_offset must hold integers"), (jnp.arange(2), ValueError, "page_offset must be an integer")],
)
def test_wrong_offsets(offset: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        page_attention(QUERY, *POOL, TABLE, LENGTHS, page_offset=offset)
    with pytest.raises(ValueError, match="page_offset moves the pages of a table, and this call has none"):
        decode_attention(QUERY, POOL[0][:2], POOL[1][:2], LENGTHS % 8, page_offset=1)
