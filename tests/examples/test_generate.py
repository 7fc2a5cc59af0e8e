"""Continuous batching: its answers are those of the model without a cache, whatever joins and leaves."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import byte_transformer as bt
import generate
import jax
import numpy as np
import pytest
import serving
import train_demo
from serving import Request, Server, ServerConfig

from tests.support.command_line import one_device
from tests.support.tiny_transformer import MODEL

CONFIG = ServerConfig(slots=3, page_size=4, num_pages=24, longest=40, chunk=16)


@pytest.fixture(scope="module")
def parameters() -> Any:
    drawn = bt.initial_parameters(MODEL, jax.random.key(0))
    # As they are drawn the next byte is nearly always the last one: all depends on the cache with larger weights.
    return jax.tree.map(lambda leaf: 3 * leaf if leaf.ndim > 1 else leaf, drawn)


def requests(seed: int = 0, count: int = 7) -> list[Request]:
    draw = np.random.default_rng(seed)
    sizes = [(int(draw.integers(1, 28)), int(draw.integers(1, 12))) for _ in range(count)]
    return [Request(i, draw.integers(0, 256, n).tolist(), m) for i, (n, m) in enumerate(sizes)]


def test_answers_are_those_without_a_cache(parameters: Any):
    server = Server(parameters, MODEL, CONFIG)
    submitted = requests()
    server.submit(submitted)
    seen, most = [], 0
    while (info := server.advance()) is not None:
        seen.append(info)
        most = max(most, len(server.running))
        held = [page for request in server.running for page in request.pages]
        assert len(set(held)) == len(held)
        assert sorted([*held, *server.free]) == list(range(CONFIG.num_pages))
    assert most > 1
    # Some join while others run, and answers are written in the very steps in which prompts are read.
    assert any(info.joined for info in seen[1:])
    assert any(info.prompt_bytes and info.answer_bytes for info in seen)
    assert len(server.free) == CONFIG.num_pages
    different = set()
    for request in submitted:
        want = serving.dense_answer(
            parameters, request.prompt, request.count, MODEL, train_demo.tilewright_attention, CONFIG.longest
        )
        assert request.answer == want, request.name
        different |= set(want)
    assert len(different) > 5


def test_a_request_that_cannot_fit_is_refused(parameters: Any):
    server = Server(parameters, MODEL, CONFIG)
    for prompt, count in (([1] * 30, 11), ([], 3), ([1], 0)):
        with pytest.raises(ValueError, match="a request needs"):
            server.submit([Request(0, prompt, count)])
    with pytest.raises(ValueError, match="num_pages=3"):
        ServerConfig(page_size=4, num_pages=3, longest=40)
    with pytest.raises(ValueError, match="chunk=2"):
        ServerConfig(slots=3, chunk=2)


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
