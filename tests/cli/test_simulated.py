"""``tilewright tune --simulated``, with a simulator that only counts blocks."""

import pytest

from tests.support.command_line import ends, invoke
from tilewright.cli import simulating
from tilewright.ops import PersistentCache
from tilewright.ops.tuning import simulated
from tilewright.ops.tuning.libtpu import TpuReport

CALL = ["tune", "grouped_matmul", "--shape", "256,128,128,4", "--dtype", "bf16", "--simulated"]
V6E = ["--device", "TPU v6e"]


@pytest.fixture
def simulator(cache_directory, monkeypatch):
    """Reports for every config of any backend, the next one always slower, of backward passes none."""
    monkeypatch.setattr(simulating, "missing_compiler", lambda known: "")
    monkeypatch.setattr(simulating, "_of_kernels", lambda inv: list(inv.kernel.config_space(inv))[:2])
    count = iter(range(10_000, 10**9))

    def report(tpu, make, inv, config, *, simulate):
        if inv.direction == "backward":
            return TpuReport(error="RESOURCE_EXHAUSTED: no VMEM\nand much more")
        return TpuReport(cycles={"tilewright_a.1": next(count)})

    monkeypatch.setattr(simulated, "report", report)


def test_the_best_config_decides_later_calls(simulator):
    printed = invoke(*CALL, *V6E)
    assert "grouped_matmul forward bf16[256,128]" in printed
    assert "ms, 0 spills" in printed
    assert "RESOURCE_EXHAUSTED: no VMEM\n" in printed
    assert "1 call of 2 decided by simulation, until tuned on a TPU v6 lite" in printed
    (entry,) = PersistentCache().entries()
    assert entry.metadata["direction"] == "forward"
    explained = invoke("explain", *CALL[1:-1], *V6E)
    assert "(simulated; not measured)" in explained
    assert "tpu:TPU v6 lite, simulated" in " ".join(invoke("cache", "list", terminal_width=200).split())
    assert "(simulated" not in invoke("explain", *CALL[1:-1], "--device", "TPU v5e")


def test_if_nothing_can_be_ranked_the_command_fails(simulator, monkeypatch):
    monkeypatch.setattr(simulated, "report", lambda *args, **kwargs: TpuReport())
    printed = invoke(*CALL, *V6E, code=1)
    assert "it has no kernel of ours" in printed
    assert "0 calls" in printed


def test_a_call_without_a_kernel_says_so(monkeypatch, capsys):
    monkeypatch.setattr(simulating, "missing_compiler", lambda known: "")
    code, _, error = ends(capsys, "tune", "rms_norm", "--shape", "64,128", "--simulated", *V6E)
    assert code == 1
    assert "rms_norm calls no kernel for TPUs that serves it on TPU v6 lite" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (CALL, "--simulated and --device belong together"),
        ([*CALL[:-1], *V6E], "--simulated and --device belong together"),
        ([*CALL, "--device", "NVIDIA H200"], "kernels for NVIDIA H200 are not simulated"),
        ([*CALL, "--device", "TPU v4"], "kernels for TPU v4 are not simulated: for those of v5e, v5p, v6e, tpu7x"),
        ([*CALL, "--device", "TPU v6"], "did you mean"),
    ],
)
def test_what_cannot_be_simulated_is_an_error(arguments, message, capsys):
    code, _, error = ends(capsys, *arguments)
    assert code == 2
    assert message in error


def test_without_libtpu_nothing_is_simulated(monkeypatch, capsys):
    monkeypatch.setattr(simulating, "missing_compiler", lambda known: "libtpu is not installed (pip install libtpu)")
    code, _, error = ends(capsys, *CALL, *V6E)
    assert code == 1
    assert "nothing can be simulated here: libtpu is not installed" in error
