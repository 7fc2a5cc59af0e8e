"""The demo as a program: its two runs, and what they leave."""

import os
import subprocess
import sys
from pathlib import Path

import byte_transformer as bt
import jax
import numpy as np
import pytest
import train_demo
from train_plot import Comparison

from tests.support.command_line import one_device

DEMO = Path(__file__).parent.parent.parent / "examples" / "train_demo.py"


def run_demo(folder: Path) -> str:
    arguments = ["--steps", "3", "--batch", "1", "--length", "64", "--compare-every", "2", "--out", str(folder / "out")]
    done = subprocess.run(
        [sys.executable, str(DEMO), *arguments],
        env={**os.environ, "TILEWRIGHT_CACHE_DIR": str(folder / "cache"), "COLUMNS": "200", "XLA_FLAGS": one_device()},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_second_run_finds_the_configs_of_the_first(tmp_path):
    run_demo(tmp_path)
    second = run_demo(tmp_path)
    assert "configs for 4 calls found on disk" in second
    assert "nothing measured" in second


def test_a_run_tunes_trains_and_saves(tmp_path):
    said = run_demo(tmp_path)
    assert "4 of 4 calls measured" in said
    assert "medians of 2 steps" in said
    assert "validation loss after 3 steps" in said
    assert (tmp_path / "out" / "training.png").read_bytes().startswith(b"\x89PNG")
    with np.load(tmp_path / "out" / "parameters.npz") as saved:
        wanted = jax.eval_shape(lambda: bt.initial_parameters(bt.ModelConfig(), jax.random.key(0)))
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
    state = bt.initial_state(bt.ModelConfig(layers=1, width=8, hidden=8, ngram_buckets=4), jax.random.key(0))
    zeros = jax.tree.map(np.zeros_like, state.mean)
    ones = jax.tree.map(np.ones_like, state.mean)
    before, theirs = state._replace(mean=zeros), state._replace(mean=ones)
    ours = state._replace(mean=jax.tree.map(lambda leaf: leaf * 1.01, ones))
    assert float(train_demo.gradient_difference(before, ours, theirs, 0.9)) == pytest.approx(0.01, rel=1e-4)
