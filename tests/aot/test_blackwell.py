"""Every default call of every op compiles for Blackwell GPUs: its Triton kernels fit a block and spill little."""

import subprocess
import sys

import pytest

pytest.importorskip("triton")

import tilewright
from tests.aot.compiler import missing_packages
from tests.every_op.matrix import OpCall, every_op, without_builds
from tilewright.kernels import kernel
from tilewright.kernels.triton import recorded_launches
from tilewright.kernels.triton.compiler import report
from tilewright.ops.utils.known_devices import find_device

DEVICES = ("NVIDIA B200", "NVIDIA B300 SXM6 AC", "NVIDIA GeForce RTX 5090")

SPILLS = {
    "layer_norm": 432,  # 16384 columns, whose sums of two gradients a thread keeps; 404 on an H100
    **dict.fromkeys(
        ("ragged_page_attention", "unified_attention", "chunked_prefill_paged_decode"), 188
    ),  # of keys in int8, which are converted in registers; 320 on an H100
    **dict.fromkeys(("decode_attention", "page_attention", "ragged_decode_attention"), 4),
}
"""Bytes of a thread that kernels of an op may spill; none of others."""


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("op", every_op())
def test_kernels_of_default_calls(op: str, name: str):
    device, allowed = find_device(name).device, SPILLS.get(op, 0)
    assert device.capability is not None
    launches = {}
    for case_name, case in kernel(op).cases.of_device("gpu").items():
        function, structs = OpCall(op, *case.abstract_arguments()).training()
        with without_builds(), tilewright.target_device(name), recorded_launches() as found:
            tilewright.explain(function, *structs)
        launches |= dict.fromkeys(reversed(found), case_name)
    for launch, case_name in launches.items():
        made = report(launch, device.capability)
        faults = made.faults
        if max(made.spill_stores, made.spill_loads) <= allowed:
            faults = [fault for fault in faults if " spills: " not in fault]
        assert faults == [], case_name


@pytest.mark.skipif(bool(missing_packages()), reason=missing_packages() or "nothing")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", DEVICES)
def test_programs_of_default_calls(name: str):
    command = [sys.executable, "-m", "tests.aot.default_programs", name]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-3000:]
    assert process.stdout.split() == list(every_op())
