"""The runner of other libraries' tests: what is replaced, what is counted, and what is a failure."""

from pathlib import Path

import pytest

from tools import drop_ins
from tools.drop_ins import Result, differences, main, row

TESTS = """
import equinox as eqx
import jax
import jax.numpy as jnp

X = jnp.ones((3, 4))


def test_multihead_attention_runs():
    layer = eqx.nn.MultiheadAttention(2, 4, key=jax.random.key(0))
    assert layer(X, X, X).shape == (3, 4)


def test_multihead_attention_is_{module}():
    assert eqx.nn.MultiheadAttention.__module__.startswith("{module}")


def test_something_else():
    raise AssertionError
"""


def folder(path: Path, module: str) -> Path:
    """A folder with tests as Equinox has them, of which one wants its class from this module."""
    tests = path / "tests"
    tests.mkdir()
    for name, text in (("nn", TESTS.format(module=module)), ("shared", ""), ("tree", "")):
        (tests / f"test_{name}.py").write_text(text)
    return path


def test_a_test_that_fails_only_with_ours_is_told_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["equinox", str(folder(tmp_path, "equinox"))]) == 1
    out = capsys.readouterr().out
    assert "| 2 / 0 / 0 | 1 / 1 / 0 |" in out
    assert "test_multihead_attention_is_equinox\n  NOT EXPECTED: " in out
    assert "1 of 2 tests reached ours" in out


def test_a_test_that_passes_only_with_ours_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["equinox", str(folder(tmp_path, "tilewright"))]) == 0
    assert "| 1 / 1 / 0 | 2 / 0 / 0 |" in capsys.readouterr().out


def test_a_folder_without_the_tests_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["flax", str(tmp_path)])
    assert "has no tests/linen/linen_attention_test.py" in capsys.readouterr().err


def test_what_fails_without_ours_is_none_of_ours_and_what_pages_say_is_expected():
    known, said = next(iter(drop_ins.EXPECTED.items()))
    theirs = Result({"a": "passed", f"f::{known}": "passed", "c": "failed", "d": "passed"}, {"c": "wrong"}, [])
    ours = Result(
        {"a": "failed", f"f::{known}": "failed", "c": "failed", "d": "skipped"},
        {"a": "nan", f"f::{known}": "0", "c": "wrong"},
        [],
    )
    assert list(differences(theirs, ours)) == [("a", "nan", ""), (f"f::{known}", "0", said)]
    assert row("flax", theirs, ours).endswith("| 3 / 1 / 0 | 0 / 3 / 1 |")


def test_every_suite_names_files_and_a_library():
    for suite in drop_ins.SUITES.values():
        assert suite.files
        assert suite.library in ("equinox", "flax", "jax")
