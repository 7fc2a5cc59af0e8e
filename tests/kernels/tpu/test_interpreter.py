"""The interpreter finds what is wrong in kernels for TPUs: it proves nothing about them otherwise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.tpu.ring import VARIANTS

ROOT = Path(__file__).parents[3]
MODES = ("eager", "on_wait")


def interpreted(variant: str, dma: str) -> tuple[int, str]:
    """How the interpretation of the ring ends, in a process of its own, and what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.tpu.ring", variant, dma],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("dma", MODES)
def test_a_ring_with_credits_is_right_and_has_no_race(dma: str) -> None:
    code, output = interpreted("right", dma)
    assert code == 0, output
    assert "right and without a race" in output
    assert "RACE DETECTED" not in output


@pytest.mark.parametrize("variant", VARIANTS[1:])
def test_what_is_missing_is_found(variant: str) -> None:
    """As a race in one mode; in the other one at least the results may not pass."""
    found = {dma: interpreted(variant, dma) for dma in MODES}
    assert all(code != 0 for code, _ in found.values()), found
    assert any("RACE DETECTED" in output for _, output in found.values()), found
