"""What type checkers see of the public functions: a call with a wrong argument is an error before anything runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

CALLS = """
# mypy: disallow-untyped-calls, disallow-any-unimported, warn-return-any, no-implicit-reexport
import jax

from tilewright import modules
from tilewright.modules import decode_attention, flash_attention, mla_decode, unified_attention, update_pages


def right(x: jax.Array, i: jax.Array) -> None:
    flash_attention(x, x, x)
    flash_attention(x, x, value=x, causal=True, sliding_window=(3, None), softmax_scale=0.1, platform="xla", cfg=None)
    modules.flash_attention(x, x, x, mask=x, causal_alignment="bottom_right", platform=["triton", "xla"])
    decode_attention(x, x, x, i, key_scale=0.5, value_scale=x, return_lse=True, platform="auto", cfg=None)
    mla_decode(x, x, i, i, scale=x, kv_lora_rank=256, logits_soft_cap=30.0)
    unified_attention(x, x, x, i, i, i, window_size=(7, 0), softmax_scale=1.0, alibi_slopes=x)
    update_pages(x, None, x, None, i, i, key_scale=1.0, cfg=None)


def wrong(x: jax.Array, i: jax.Array) -> None:
    flash_attention(x, x, x, casual=True)  # wrong
    flash_attention(x, x, x, causal_alignment="top left")  # wrong
    flash_attention(x, x)  # wrong
    flash_attention(x, x, x, None, None, True)  # wrong
    modules.flash_attention(x, x, x, platfrom="xla")  # wrong
    decode_attention(x, x, x, i, softmax_scal=0.5)  # wrong
    decode_attention(x, x, x, i, return_lse="yes")  # wrong
    mla_decode(x, x, i, i, key_scale=x)  # wrong
    unified_attention(x, x, x, i, i, i, sliding_window=7)  # wrong
    update_pages(x, None, x, None, i, i, softmax_scale=1.0)  # wrong
"""
WANTED = [number for number, line in enumerate(CALLS.splitlines(), 1) if line.endswith("# wrong")]


def test_mypy_finds_wrong_arguments_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    file = tmp_path / "calls.py"
    file.write_text(CALLS)
    # The repository's own options and cache: after `make lint` the modules need not be checked again.
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(file)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    errors = re.findall(r"calls\.py:(\d+): error", found.stdout)
    assert sorted({int(line) for line in errors}) == WANTED, found.stdout + found.stderr
    message = 'Unexpected keyword argument "casual" for overloaded function "flash_attention"; did you mean "causal"?'
    assert message in found.stdout
