"""What is known of a kernel before it is compiled, and that it never speaks against what was measured."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kernels.conftest import A100, H100
from tests.kernels.test_roofline import RESULTS, invocation
from tilewright.kernels.flash_attention.cases import HOPPER_CASES, AttentionCase
from tilewright.kernels.flash_attention.cuda import ampere_variants, cutlass_variants, hopper_variants
from tilewright.kernels.flash_attention.cuda.backend import CudaForwardParams
from tilewright.kernels.flash_attention.cuda.selection import TABLES, queries_per_block
from tilewright.kernels.flash_attention.hopper.params import (
    HopperBackwardParams,
    HopperForwardParams,
    WideBackwardParams,
)
from tilewright.kernels.flash_attention.op import FlashAttention
from tilewright.kernels.hopper.limits import SHARED_BYTES
from tilewright.kernels.op.choice import Choice
from tilewright.kernels.op.footprint import Footprint, block_limits, busy_share, launch_reasons, max_vmem_bytes
from tilewright.ops import ConfigSelectorChain, Invocation
from tilewright.ops.tuning.candidate_search import PLAUSIBLE
from tilewright.ops.tuning.tuning import Autotuner
from tilewright.ops.types import Device, MappedAxis
from tilewright.ops.utils.known_devices import find_device

KERNEL = FlashAttention()
UNKNOWN = Device("gpu", "of tomorrow", (19, 3), 500)


def test_what_a_block_may_have():
    assert SHARED_BYTES == 227 << 10
    hopper = block_limits((9, 0))
    assert hopper is not None
    assert (hopper.shared_bytes, hopper.registers, hopper.threads) == (232448, 65536, 1024)
    small = block_limits((5, 3))
    assert small is not None
    assert small.registers == 32768
    assert block_limits(None) is block_limits((19, 3)) is None


@pytest.mark.parametrize(
    ("footprint", "reason"),
    [
        (Footprint(), ""),
        (Footprint(1, 1024, 227 << 10, 64), ""),
        (Footprint(shared_bytes=(227 << 10) + 1), "a block would take shared_bytes=232449, and may have 232448"),
        (Footprint(threads=1025), "a block would take threads=1025, and may have 1024"),
        (Footprint(threads=512, registers=129), "a block would take registers=66048, and may have 65536"),
        (Footprint(registers=255), ""),
    ],
)
def test_what_is_not_launched(footprint: Footprint, reason: str):
    said = launch_reasons([Footprint(), footprint], H100)
    assert [each.partition(" on ")[0] for each in said] == ([reason] if reason else [])
    assert launch_reasons([footprint], UNKNOWN) == launch_reasons([footprint], Device("cpu", "cpu")) == []


@pytest.mark.parametrize(("name", "mib"), [("TPU v4", 16), ("TPU v5 lite", 128), ("TPU v5", 64), ("TPU v6 lite", 128)])
def test_the_vmem_of_a_tpu(name: str, mib: int):
    tpu = find_device(name).device
    assert max_vmem_bytes(tpu) == mib << 20
    fits = Footprint(threads=1 << 20, vmem_bytes=mib << 20)  # threads are no resource of a TPU
    assert launch_reasons([fits], tpu) == []
    (reason,) = launch_reasons([fits, Footprint(vmem_bytes=(mib << 20) + 1)], tpu)
    assert reason == f"a block would take vmem_bytes={(mib << 20) + 1}, and may have {mib << 20} on {name}"


def test_vmem_is_limited_on_known_tpus_alone():
    huge = Footprint(vmem_bytes=1 << 40)
    for device in (H100, UNKNOWN, Device("cpu", "cpu"), Device("tpu", "TPU v99")):
        assert max_vmem_bytes(device) is None
        assert launch_reasons([huge], device) == []


def test_the_share_that_grids_keep_busy():
    assert busy_share([Footprint(66)], H100) == 0.5
    assert busy_share([Footprint(0)], H100) == 1 / 132
    assert busy_share([Footprint(1000)], H100) == 1.0
    assert busy_share([Footprint(13), Footprint(33)], H100) == 0.25  # one of them may do all of the work
    assert busy_share([Footprint(13), Footprint()], H100) == 1.0
    assert busy_share([Footprint(1)], find_device("TPU v4").device) == 0.5  # of two cores
    assert busy_share([], H100) == busy_share([Footprint(1)], dataclasses.replace(H100, cores=0)) == 1.0


def bounds(
    case: AttentionCase, params: Any, direction: Any = "forward", backend: str = "hopper", **changes: Any
) -> float:
    """The least time of a config over that of the call."""
    inv = dataclasses.replace(invocation(case, direction), **changes)
    return KERNEL.config_bound_ms(inv, Choice(backend, params)) / KERNEL.time_bound_ms(inv)


ONE_HEAD = AttentionCase("", 1, 1024, heads=1, head_dim=128, dtype="bfloat16")


def test_a_small_grid_leaves_multiprocessors_idle():
    assert bounds(ONE_HEAD, HopperForwardParams(persistent=False)) == pytest.approx(132 / 8)
    assert bounds(ONE_HEAD, HopperForwardParams(192, persistent=True)) == pytest.approx(132 / 6)
    mapped = (MappedAxis(5, (True,) * 3),)
    assert bounds(ONE_HEAD, HopperForwardParams(), mapped=mapped) == pytest.approx(132 / 40)
    many = dataclasses.replace(ONE_HEAD, batch=64)
    assert bounds(many, HopperForwardParams(persistent=True)) == 1.0


def test_of_several_kernels_the_largest_grid_counts():
    long = dataclasses.replace(ONE_HEAD, q_length=4096)
    long = dataclasses.replace(ONE_HEAD, q_length=4096, kv_length=1024)
    assert bounds(long, HopperBackwardParams(), "backward") == pytest.approx(132 / 8)
    assert bounds(long, HopperBackwardParams(deterministic=True), "backward") == pytest.approx(132 / 32)
    wide = dataclasses.replace(long, head_dim=256)
    assert bounds(wide, WideBackwardParams(False, 2, 2, 16, 1), "backward") == pytest.approx(132 / 16)
    assert bounds(wide, WideBackwardParams(True), "backward") == pytest.approx(132 / 32)


def test_cuda_says_the_grids_of_its_forward_variants():
    for table in TABLES["forward"]:
        assert all(queries_per_block(variant) for variant in table.variants)
    assert not any(queries_per_block(variant) for table in TABLES["backward"] for variant in table.variants)
    hopper = next(v for v in hopper_variants.WIDE_FORWARD.variants if v.dtype == "bf16")
    ampere = next(v for v in ampere_variants.FORWARD.variants if v.dtype == "bf16" and v.max_dim == 128)
    cutlass = next(v for v in cutlass_variants.FORWARD.variants if "F_bf16_aligned_32x128" in v.name)
    wide = dataclasses.replace(ONE_HEAD, head_dim=512)
    calls = ((wide, hopper, 64), (ONE_HEAD, ampere, ampere.tile.queries), (ONE_HEAD, cutlass, 32))
    for case, variant, queries in calls:
        share = bounds(case, CudaForwardParams(variant.name), backend="cuda")
        assert share == pytest.approx(132 / (1024 // queries))
    assert bounds(ONE_HEAD, CudaForwardParams(), backend="cuda") == 1.0


def test_what_is_not_known_bounds_nothing():
    inv = invocation(ONE_HEAD, device=A100)
    choice = KERNEL.heuristic_cfg(inv)
    assert KERNEL.config_bound_ms(inv, choice) == KERNEL.time_bound_ms(inv)


@pytest.mark.parametrize("case", HOPPER_CASES.values(), ids=lambda case: case.name)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_nothing_is_said_against_a_shipped_candidate(case: AttentionCase, direction: Any):
    inv = invocation(case, direction)
    for choice in KERNEL.config_space(inv):
        assert KERNEL.config_reasons(inv, choice) == []
        assert KERNEL.config_bound_ms(inv, choice) == KERNEL.time_bound_ms(inv)  # all of these fill the device


NAMES = {"gqa_8k": "causal_gqa_8k_d128", "causal_1k": "causal_1k_d128"}


def swept() -> Iterator[tuple[AttentionCase, HopperForwardParams, float]]:
    """Every config of the forward pass that was measured on an H100, and its TFLOP/s."""
    sweep = json.loads((RESULTS / "hopper_sweep.json").read_text())
    for row in (*sweep["forward"], *sweep["first_version"]["forward"]):
        sizes, case = row.get("v", row.get("p")), HOPPER_CASES.get(NAMES.get(row["case"], row["case"]))
        if isinstance(sizes, list) and case is not None and row.get("dev"):
            yield case, HopperForwardParams(*sizes), row["dev"]


def test_no_config_that_was_measured_would_have_been_dropped():
    seen: dict[str, list[tuple[float, float]]] = {}
    for case, params, rate in swept():
        inv = invocation(case)
        flops = KERNEL.cost(inv).flops
        bound = KERNEL.config_bound_ms(inv, Choice("hopper", params))
        seen.setdefault(case.name, []).append((bound, flops / rate / 1e9))
    assert sum(map(len, seen.values())) > 40
    for name, measured in seen.items():
        fastest = min(time for _, time in measured)
        assert all(bound <= time for bound, time in measured), name
        assert all(PLAUSIBLE * bound <= fastest for bound, _ in measured), name


class TestTuning:
    def test_a_config_that_cannot_run_is_not_compiled(self, monkeypatch: pytest.MonkeyPatch):
        """And explain says why."""
        from tests.kernels.test_cached_configs import GOOD, INV, KERNEL, UNFIT

        monkeypatch.setattr(type(KERNEL), "sample_inputs", lambda self, inv, key: (inv.args, dict(inv.kwargs)))
        chain = ConfigSelectorChain()
        (call,) = Autotuner(chooser=chain, verify=False).tune(INV, configs=[GOOD, UNFIT["does not fit"]])
        by_config = {candidate.config: candidate for candidate in call.candidates}
        assert by_config[UNFIT["does not fit"]].error == "it cannot run: params.q_blocksize=64 is above 32"
        assert not by_config[GOOD].dropped
        said = KERNEL.rejection_reasons(INV, Choice("triton"), [by_config[UNFIT["does not fit"]]])
        assert said["xla"] == ("supported, but not measured: it cannot run: params.q_blocksize=64 is above 32",)
        assert isinstance(INV, Invocation)
