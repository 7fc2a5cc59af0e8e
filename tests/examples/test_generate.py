"""The program that serves what the demo saved, without a server."""

import os
import subprocess
import sys
from pathlib import Path

import byte_transformer as bt
import generate
import jax
import pytest
import train_demo

from tests.support.command_line import one_device
from tests.support.tiny_transformer import MODEL


def test_the_program_serves_what_the_demo_saved(tmp_path: Path):
    file = tmp_path / "parameters.npz"
    with pytest.raises(FileNotFoundError, match="make demo"):
        generate.load_parameters(file, bt.ModelConfig())
    train_demo.save(bt.initial_parameters(bt.ModelConfig(), jax.random.key(0)), file)
    with pytest.raises(ValueError, match="another model"):
        generate.load_parameters(file, MODEL)
    sizes = ["--requests", "4", "--slots", "2", "--longest-prompt", "20", "--longest-answer", "6", "--check", "1"]
    done = subprocess.run(
        [sys.executable, generate.__file__, "--parameters", str(file), *sizes],
        env={**os.environ, "COLUMNS": "200", "XLA_FLAGS": one_device()}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "4 requests in " in done.stdout
    assert "bytes/s written" in done.stdout
    assert "are those of the model without a cache" in done.stdout
