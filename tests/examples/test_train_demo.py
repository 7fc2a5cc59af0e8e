"""The demo: two runs of it, and what they leave."""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path

import byte_transformer as bt
import jax
import numpy as np
import pytest
import train_demo
from train_plot import Comparison

from tests.support.tiny_transformer import MODEL
from tilewright.ops import executor


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[str]]]:
    """The folder that two runs of the demo wrote to, and what each said; they share only what is on disk."""
    folder, said = tmp_path_factory.mktemp("demo"), []
    sizes = ["--steps", "3", "--batch", "1", "--length", "64", "--compare-every", "2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["train_demo.py", *sizes, "--out", str(folder / "out")])
        patch.setattr(train_demo, "ModelConfig", lambda: MODEL)
        patch.setenv("TILEWRIGHT_CACHE_DIR", str(folder / "cache"))
        patch.setenv("COLUMNS", "200")
        for _ in range(2):
            forget_what_was_chosen()
            with contextlib.redirect_stdout(io.StringIO()) as output:
                train_demo.main()
            said.append(output.getvalue())
    yield folder / "out", said
    forget_what_was_chosen()


def forget_what_was_chosen() -> None:
    for cached in (executor.default_chain, executor.default_executor):
        cached.cache_clear()


def test_a_second_run_finds_the_configs_of_the_first(runs: tuple[Path, list[str]]):
    _, (_, second) = runs
    assert "configs for 4 calls found on disk" in second
    assert "nothing measured" in second


def test_a_run_tunes_trains_and_saves(runs: tuple[Path, list[str]]):
    folder, (said, _) = runs
    assert "4 of 4 calls measured" in said
    assert "medians of 2 steps" in said
    assert "validation loss after 3 steps" in said
    assert (folder / "training.png").read_bytes().startswith(b"\x89PNG")
    with np.load(folder / "parameters.npz") as saved:
        wanted = jax.eval_shape(lambda: bt.initial_parameters(MODEL, jax.random.key(0)))
        paths = {
            jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape
            for path, leaf in jax.tree_util.tree_flatten_with_path(wanted)[0]
        }
        assert {name: saved[name].shape for name in saved} == paths


def test_a_disagreement_of_the_two_attentions_ends_the_demo():
    fine = Comparison(step=0, their_loss=2.0, their_seconds=1.0, our_seconds=1.0, gradient_difference=1e-6)
    train_demo.check(fine, 2.00001)
    for comparison, loss in ((fine, 2.1), (fine, float("nan")), (fine._replace(gradient_difference=0.5), 2.0)):
        with pytest.raises(ArithmeticError, match="disagree"):
            train_demo.check(comparison, loss)


def test_the_gradient_difference_is_relative_to_the_gradient():
    def state(mean: float) -> bt.TrainState:
        return bt.TrainState(*[{"weight": np.full(3, mean, np.float32)}] * len(bt.TrainState._fields))

    before, ours, theirs = map(state, (0.0, 1.01, 1.0))
    assert float(train_demo.gradient_difference(before, ours, theirs, 0.9)) == pytest.approx(0.01, rel=1e-4)
