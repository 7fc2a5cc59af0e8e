"""The reports on kernels that fit and that do not, and what of the simulator's cycles is to be believed."""

import pytest

from tests.aot_tpu.compiler import TPUS, report
from tilewright.ops.tuning.libtpu import cycle_seconds, estimated_seconds, flops_per_cycle
from tilewright.ops.utils.known_devices import find_device

KERNELS = "tests.aot_tpu.kernels"


@pytest.mark.parametrize("tpu", TPUS)
def test_a_kernel_that_fits(tpu: str) -> None:
    for simulate in (False, True):
        found = report(tpu, f"{KERNELS}:matmul", 1024, 256, simulate=simulate)
        assert not found.error
        assert found.peak_bytes == 3 * 1024 * 1024 * 2
        ((name, kernel),) = found.kernels.items()
        assert name.startswith("tilewright_matmul")
        assert 0 < kernel.bundles == found.bundles
        assert kernel.spills == found.spills == 0
        assert bool(found.cycles) == simulate
    flops = 2 * 1024**3
    assert 0.02 < flops / (found.kernel_cycles * flops_per_cycle(tpu)) < 1
    assert estimated_seconds(tpu, found.kernel_cycles, flops, 0) == found.kernel_cycles * cycle_seconds(tpu)


def test_registers_that_do_not_suffice_are_counted() -> None:
    found = report("TPU v6e", f"{KERNELS}:matmul", 1024, 1024)
    assert found.spills > 100 < found.fills


@pytest.mark.parametrize("tpu", TPUS)
def test_too_much_vmem_is_an_error_that_says_how_much(tpu: str) -> None:
    mebibytes = find_device(tpu).chip.vmem_mb
    assert not report(tpu, f"{KERNELS}:scratch", mebibytes - 4).error
    found = report(tpu, f"{KERNELS}:scratch", mebibytes + 1)
    assert f"(size={(mebibytes + 1) << 20}) would exceed memory (size={mebibytes << 20})" in found.error
    assert not found.kernels


def test_a_long_grid_is_not_simulated() -> None:
    found = report("TPU v6e", f"{KERNELS}:matmul", 2048, 128, simulate=True)
    assert found.error == "ValueError: a grid of 4096 steps is too long to be simulated, 512 at most"


def test_what_is_refused_in_the_process_is_a_result() -> None:
    assert report("TPU v5e", f"{KERNELS}:refused").error == "ValueError: this is refused when it is traced"


def test_a_process_that_ends_is_replaced() -> None:
    assert "exited with code 9" in report("TPU v5e", f"{KERNELS}:lost").error
    lost = report("TPU v5e", f"{KERNELS}:lost", simulate=True)
    assert "exited with code 9" in lost.error
    assert lost.unsimulated == "it exited with code 9"
    assert report("TPU v5e", f"{KERNELS}:matmul", 256, 256, simulate=True).cycles


def test_loops_that_only_data_end_are_not_believed() -> None:
    """The simulator follows constants; of a count in an array it knows nothing."""
    flops = 2 * 256**3 * 200
    known = report("TPU v5e", f"{KERNELS}:power", 200, simulate=True).kernel_cycles
    unknown = report("TPU v5e", f"{KERNELS}:power", None, simulate=True).kernel_cycles
    assert unknown < known / 3
    assert estimated_seconds("TPU v5e", unknown, flops, 0) is None
    assert estimated_seconds("TPU v5e", known, flops, 0) == known * cycle_seconds("TPU v5e")


def test_memory_bounds_an_estimate_from_below() -> None:
    v5e = find_device("TPU v5e")
    assert estimated_seconds("TPU v5e", 1000, 0, v5e.bandwidth_gbs * 1e9) == 1.0
    assert estimated_seconds("TPU v5e", 0, 0, 1.0) is None


@pytest.mark.parametrize("tpu", TPUS)
def test_clocks_are_those_of_the_chips(tpu: str) -> None:
    ghz = {"TPU v5e": 1.5, "TPU v5p": 1.75, "TPU v6e": 1.75, "TPU7x": 2.2}
    assert 1e-9 / cycle_seconds(tpu) == pytest.approx(ghz[tpu], rel=0.01)


def test_a_tpu_without_figures_is_an_error() -> None:
    with pytest.raises(ValueError, match="TPU v4 are not simulated"):
        flops_per_cycle("TPU v4")
