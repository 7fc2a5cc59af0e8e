"""FlashAttention-4's kernels compile for the GPUs that they are offered on, and spill no more than is known.

Wants its packages (``make aot`` installs them), but not PyTorch.
"""

import importlib.metadata
import itertools
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.aot.compiler import missing_packages
from tests.aot.fa4_compiling import CASES
from tilewright.kernels.flash_attention.fa4.cute import MIN_VERSIONS


def missing() -> str:
    """What is not installed; empty if nothing is missing."""
    for name in (*MIN_VERSIONS, "triton"):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return f"{name} is not installed (make aot installs it)"
    return missing_packages()


DEVICES = ("NVIDIA H100 80GB HBM3", "NVIDIA B200", "NVIDIA B300 SXM6 AC", "NVIDIA Thor", "NVIDIA GeForce RTX 5090")

DECLINED = {
    "NVIDIA GeForce RTX 5090": {
        ("d128_soft_cap", "backward"),
        *itertools.product(("d192_v128", "d192_v128_full", "d256", "d256_lengths"), ("forward", "backward")),
    }
}

MAX_STACK = 304
"""Bytes of a thread: those of a soft cap, in version 4.0.0b36, on an RTX 5090; on a B200 its backward pass has 280."""


@pytest.mark.skipif(bool(missing()), reason=missing() or "nothing")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", DEVICES)
def test_every_kernel_compiles(name: str):
    command = [sys.executable, "-m", "tests.aot.fa4_compiling", name]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-3000:]
    found: dict[str, Any] = {}
    for line in process.stdout.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    assert found.keys() == CASES.keys()
    # What is declined has reasons in place of kernels.
    each_way = {(case, way): each for case, ways in found.items() for way, each in ways.items()}
    compiled = {key: each for key, each in each_way.items() if not isinstance(each[0], str)}
    assert each_way.keys() - compiled.keys() == DECLINED.get(name, set())
    for (_, direction), kernels in compiled.items():
        assert len(kernels) >= (1 if direction == "forward" else 3)
        assert max(each["stack"] for each in kernels) <= MAX_STACK
        assert all(each["registers"] > 0 for each in kernels)
