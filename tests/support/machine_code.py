"""The machine code of what nvcc compiled."""

import re
import subprocess
from pathlib import Path

import pytest


def instructions(library: Path) -> list[str]:
    """The names of all instructions of a library's kernels; skips the test without Triton, whose disassembler it is."""
    triton = pytest.importorskip("triton")
    disassembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    code = subprocess.run([disassembler, "-sass", library], capture_output=True, text=True, check=True).stdout
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d\s+)?([A-Z][A-Za-z0-9.]*)", code, re.MULTILINE)
