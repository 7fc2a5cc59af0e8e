"""The tuned tables that ship with the package."""

import logging

import jax.numpy as jnp
import pytest

from tests.ops.core.samples import Config, Product
from tilewright.ops import AutotuningResult, Candidate, Invocation, TunedCall
from tilewright.ops.config.tables import load_tables

KERNEL = Product("tests.tables")
INV = Invocation(KERNEL, (jnp.ones((2, 3)), jnp.ones((3, 2))))


def text(cfg, device="cpu:test", key=INV.key):
    call = TunedCall(KERNEL.name, "forward", key, "shapes", (Candidate(cfg, (1.0,)),), 0)
    return AutotuningResult((call,), device=device).to_json()


def test_tables_of_the_device_are_merged_in_the_order_of_their_names(tmp_path):
    (tmp_path / "b.json").write_text(text(Config(2)))
    (tmp_path / "a.json").write_text(text(Config(1)))
    (tmp_path / "c.json").write_text(text(Config(3), device="gpu:other"))
    (tmp_path / "d.json").write_text(text(Config(4), key="another"))
    (tmp_path / "e.txt").write_text("no table")
    assert load_tables("cpu:test", tmp_path) == {INV.key: (Config(2),), "another": (Config(4),)}
    assert load_tables("cpu:none", tmp_path) == {}


def test_a_call_has_its_winner_first_and_then_what_was_right_by_its_time(tmp_path):
    said = [
        (Config(1), 3.0, ""),
        (Config(2), 2.0, "wrong"),
        (Config(4), 2.5, ""),
        (Config(8), 2.6, ""),
        (Config(16), None, ""),
    ]
    candidates = tuple(Candidate(c, () if ms is None else (ms,), error=error) for c, ms, error in said)
    call = TunedCall(KERNEL.name, "forward", INV.key, "shapes", candidates, 3)  # within the noise of the third
    (tmp_path / "a.json").write_text(AutotuningResult((call,), device="cpu:test").to_json())
    assert load_tables("cpu:test", tmp_path) == {INV.key: (Config(8), Config(4), Config(1))}


@pytest.mark.parametrize("damage", ["", "{}", "[]", "null", '{"schema": 99}', "{", "\x00", "more"])
def test_a_damaged_table_is_left_out_and_logged(tmp_path, caplog, damage):
    (tmp_path / "a.json").write_text(text(Config(1))[:-9] if damage == "more" else damage)
    (tmp_path / "b.json").write_text(text(Config(2)))
    with caplog.at_level(logging.WARNING):
        assert load_tables("cpu:test", tmp_path) == {INV.key: (Config(2),)}
    assert "a.json cannot be read" in caplog.text


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "a.json").write_bytes(b"\xff\xfe\x00")
    assert load_tables("cpu:test", tmp_path) == {}


def test_a_missing_folder_holds_nothing(tmp_path):
    assert load_tables("cpu:test", tmp_path / "none") == {}


def test_the_shipped_tables_can_be_read(caplog):
    load_tables("cpu:test")
    assert caplog.text == ""
