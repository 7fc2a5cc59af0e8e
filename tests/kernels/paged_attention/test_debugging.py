"""What ``TILEWRIGHT_DEBUG=1`` says of bad data, and that it says nothing otherwise."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tilewright.modules import context_parallel_page_attention, page_attention, ragged_page_attention

QUERY, PAGES = jnp.ones((2, 4, 8)), jnp.ones((3, 4, 2, 8))
GOOD = jnp.asarray([[0, 1], [2, 0]])


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    caplog.set_level(logging.ERROR, "tilewright.serving")

    def messages() -> list[str]:
        jax.effects_barrier()
        return [record.getMessage() for record in caplog.records]

    return messages


def run(table: Any = GOOD, lengths: Any = (5, 3)) -> Any:
    # A fresh function: what was traced before the variable was set stays as it is.
    return jax.jit(lambda *x: page_attention(QUERY, PAGES, PAGES, *x))(jnp.asarray(table), jnp.asarray(lengths))


def test_good_data_is_not_mentioned(said: Any):
    run()
    run([[0, -1], [2, 99]], (4, 4))  # beyond the lengths
    assert said() == []


def test_bad_data_is_named(said: Any):
    run([[0, 7], [-1, 0]], (8, 9))
    run(lengths=(-2, 3))
    assert said() == [
        "page_attention: kv_lengths[1] = 9 is beyond the 8 tokens there is room for",
        "page_attention: page_table[0, 1] = 7, page_table[1, 0] = -1 is none of the 3 pages",
        "page_attention: kv_lengths[0] = -2 is negative and counts as 0",
    ]


def test_packed_and_written(said: Any):
    new = jnp.ones((6, 2, 8))
    call = lambda lengths, cum: ragged_page_attention(
        jnp.ones((6, 4, 8)), PAGES, PAGES, GOOD, lengths, cum, new_key=new, new_value=new
    )
    jax.jit(call)(jnp.asarray([2, 7]), jnp.asarray([0, 3, 9]))
    text = "\n".join(said())
    assert "cum_q_lens[2] = 9 is not within the 6 tokens" in text
    assert "kv_lengths[0] = 2 is less than the sequence's new tokens" in text
    assert "written twice: row 0 of page 0 by the sequences 0 and 1" in text


def test_without_the_variable_nothing_is_looked_at(caplog: pytest.LogCaptureFixture, monkeypatch: Any):
    monkeypatch.delenv("TILEWRIGHT_DEBUG", raising=False)
    run([[7, 7], [7, 7]], (99, -99))
    jax.effects_barrier()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    text = jax.jit(lambda q: page_attention(q, PAGES, PAGES, GOOD, jnp.asarray([1, 2]))).lower(QUERY).as_text()
    assert "callback" not in text


@pytest.mark.parametrize("slopes", [None, jnp.ones(4)])
def test_pages_of_other_devices_are_no_faults(slopes: Any, said: Any):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def run(table: Any) -> None:
        def attend(pages: Any) -> Any:
            return context_parallel_page_attention(
                QUERY, pages, pages, table, jnp.array([12, 7]), axis_name="x", alibi_slopes=slopes
            )

        pages = jnp.ones((6, 4, 2, 8))
        jax.block_until_ready(jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=P("x"), out_specs=P()))(pages))

    run(jnp.array([[0, 1, 2], [1, 0, 0]]))
    assert said() == []
    run(jnp.array([[0, -1, 2], [1, 3, 0]]))
    (message,) = said()
    assert message.endswith("= 3 is none of the 3 pages")
    assert "= -1, " in message
