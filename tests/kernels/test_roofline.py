"""The least time of a call: below everything that was ever measured, and above what a broken clock says."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from tests.kernels.conftest import A100, H100, abstract_arguments
from tests.kernels.flash_attention.conformance import CASES, describe
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.kernels.flash_attention.op import FlashAttention
from tilewright.kernels.op.roofline import Cost, Peaks, min_ms, peaks_of
from tilewright.ops import Invocation
from tilewright.ops.types import Device, MappedAxis

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "nvidia-h100-80gb-hbm3"


def invocation(case: AttentionCase, direction: Any = "forward", device: Device = H100) -> Invocation[Any, Any]:
    arrays, kwargs = abstract_arguments(case)
    inputs = FlashAttention().prepare(*arrays, **kwargs)
    return Invocation(FlashAttention(), (inputs,), direction=direction, device=device)


@pytest.mark.parametrize("conformance_case", CASES[::3], ids=describe)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_least_is_no_more_than_the_cost(conformance_case: Any, direction: Any):
    kernel = FlashAttention()
    inv = Invocation(kernel, (conformance_case.prepared(seed=0),), direction=direction)
    least, cost = kernel.min_cost(inv), kernel.cost(inv)
    assert 0 <= least.flops <= cost.flops
    assert 0 <= least.bytes <= cost.bytes


def recorded() -> list[Any]:
    files = ("attention.json", "attention_cuda.json")
    return [cell for file in files for cell in json.loads((RESULTS / file).read_text())["cells"]]


def test_nothing_recorded_on_an_h100_was_faster():
    kernel, seen, shares = FlashAttention(), 0, []
    for cell in recorded():
        sizes = {name: tuple(v) if isinstance(v, list) else v for name, v in cell["sizes"].items()}
        if sizes.get("packed"):
            continue  # the boundaries are data: what is visible whatever they are is nothing
        case = dataclasses.replace(AttentionCase("", 1, 1), **sizes)
        visible = 0.5 if case.causal else 1.0
        pairs = case.batch * case.heads * case.q_length * (case.kv_length or case.q_length) * visible
        for said in cell["implementations"].values():
            if said.get("status") != "timed":
                continue
            flops = 2 * pairs * (case.head_dim + (case.value_dim or case.head_dim)) if not case.sliding_window else 0.0
            bound = min_ms(Cost(flops, 0.0), H100)
            assert bound <= said["median_ms"], (cell["case"], said["median_ms"], bound)
            shares.append(bound / said["median_ms"])
            seen += 1
    assert seen > 50
    assert max(shares) > 0.5  # and the bound is worth something
    assert kernel.name


def test_the_bound_of_a_causal_call():
    case = AttentionCase("", 1, 512, heads=2, head_dim=64, causal=True, dtype="bfloat16")
    one = FlashAttention().time_bound_ms(invocation(case))
    # Of tiles of 64: all below the diagonal.
    assert one == pytest.approx(1e3 * 2 * 2 * (512**2 - 8 * 64**2) / 2 * 128 / 989.4e12)
    mapped = dataclasses.replace(invocation(case), mapped=(MappedAxis(5, (True,) * 3),))
    assert FlashAttention().time_bound_ms(mapped) == pytest.approx(5 * one)
    assert FlashAttention().time_bound_ms(invocation(case, device=A100)) > one


def test_data_may_mask_everything():
    base: dict[str, Any] = {"heads": 2, "head_dim": 64, "dtype": "bfloat16"}
    for option in ({"segments": True}, {"lengths": True}, {"mask": "hqk"}):
        assert FlashAttention().time_bound_ms(invocation(AttentionCase("", 1, 256, **base, **option))) == 0.0


def test_memory_beyond_the_cache_counts():
    peaks = peaks_of(H100)
    assert peaks is not None
    assert min_ms(Cost(0.0, float(peaks.cache)), H100) == 0.0
    assert min_ms(Cost(0.0, peaks.cache + peaks.bandwidth), H100) == pytest.approx(1e3)


HOPPER = (989.4e12, 3.9e12, 50)
PEAKS = {
    **dict.fromkeys(("NVIDIA GH200 480GB", "NVIDIA GH200 144G HBM3e"), (989.4e12, 4.9e12, 60)),
    "NVIDIA H200": (989.4e12, 4.8e12, 50),
    **dict.fromkeys(("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3 MIG 3g.40gb"), HOPPER),
    "NVIDIA A100-SXM4-40GB": (312e12, 2.04e12, 40),
    **{
        f"TPU {name}": (flops, bandwidth, cache)
        for name, flops, bandwidth, cache in (
            ("v4", 275e12, 1.228e12, 160), ("v5 lite", 197e12, 0.819e12, 128), ("v5", 459e12, 2.765e12, 128),
            ("v6 lite", 918e12, 1.64e12, 128),
        )
    },
    "TPU7x": (1153.5e12, 3.69e12, 64),
    "NVIDIA B200": (2.25e15, 7.7e12, 126.5),
    **dict.fromkeys(("NVIDIA GB200", "NVIDIA GB300"), (2.5e15, 8e12, 129.25)),
    "NVIDIA B300 SXM6 AC": (2.5e15, 8e12, 126.5),
    "NVIDIA GeForce RTX 5090": (419e12, 1.792e12, 96),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": (503.8e12, 1.792e12, 128),
    "TPU v2": (23e12, 0.358e12, 16),
    "TPU v3": (70e12, 0.45e12, 16),
}  # fmt: skip


@pytest.mark.parametrize("name", PEAKS)
def test_the_peaks_of_devices(name: str):
    """FLOP/s and bytes/s of one device, and MiB of what may hold arrays between kernels."""
    flops, bandwidth, cache = PEAKS[name]
    device = Device("tpu" if "TPU" in name else "gpu", name)
    assert peaks_of(device) == Peaks(flops, bandwidth, int(cache * (1 << 20)))
    assert min_ms(Cost(flops, 0.0), device) == pytest.approx(1e3)


def test_an_unknown_device_has_no_bound():
    assert peaks_of(Device("cpu", "cpu")) is None
    assert min_ms(Cost(1e30, 1e30), Device("gpu", "NVIDIA Z9", (12, 0))) == 0.0
    assert jnp.isfinite(min_ms(Cost(1.0, 1.0), A100))
