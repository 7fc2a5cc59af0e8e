"""What attention over a cache ships in Pallas, compiled for an H100: nothing spills, no product waits for another."""

import functools
from typing import Any

import jax
import pytest

from tests.aot.compiler import KernelReport, compile_for_h100, missing_packages
from tests.kernels.conftest import H100
from tests.kernels.paged_attention.conformance import inputs_of
from tests.kernels.paged_attention.latent_conformance import latent_inputs
from tilewright.kernels.paged_attention.hopper.latent_backend import PallasGpuPagedAttention
from tilewright.kernels.paged_attention.hopper.packed_backend import PallasGpuPackedAttention
from tilewright.kernels.paged_attention.ops.mla_decode import MlaDecode
from tilewright.kernels.paged_attention.ops.ragged_page_attention import RaggedPageCase

if missing_packages():
    pytest.skip(missing_packages(), allow_module_level=True)

BACKEND = PallasGpuPagedAttention()

CALLS = {
    name: functools.partial(inputs_of, "mla_decode", case) for name, case in MlaDecode.cases.by_device["gpu"].items()
} | {
    name: functools.partial(latent_inputs, **{"sequences": 64, "kv_length": 8192} | fields)
    for name, fields in {
        "two tokens": {"heads": 128, "q_lengths": (2,)},
        "many tokens": {"heads": 5, "q_lengths": (40,)},
        "not causal": {"heads": 64, "q_lengths": (3,), "causal": False},
        "large pages": {"heads": 32, "page_size": 256},
        "sinks": {"heads": 128, "sinks": 1, "dtype": "float16"},
        "negative scale": {"softmax_scale": -1.0},
    }.items()
}


@pytest.mark.parametrize("name", CALLS)
def test_compiles_without_spills(name: str) -> None:
    inputs: Any = jax.eval_shape(CALLS[name])
    params = BACKEND.candidates(inputs, H100, "forward")
    # How many splits there are, and how far ahead is prefetched, are constants; whether at all decides.
    for one in {(bool(each.prefetched), each.num_key_splits > 1): each for each in params}.values():
        reports = compile_for_h100(lambda inputs, one=one: BACKEND.forward(inputs, one), inputs)
        assert reports
        assert [fault for report in reports for fault in report.faults] == []


PACKED: dict[str, dict[str, Any]] = {
    "pages of 16": {},
    "pages of 64": {"page_size": 64},
    "pages of two tiles": {"page_size": 256},
    "head dim 64": {"head_dim": 64, "page_size": 64},
    "head dim 64, pages of 16": {"head_dim": 64},
    "float16, groups of five": {"heads": 40, "dtype": "float16", "page_size": 128},
    "not causal": {"causal": False},
    "not causal, large pages": {"causal": False, "page_size": 128},
    "a head per key head": {"heads": 8, "page_size": 64},
    "a window": {"sliding_window": 200},
    "a window, large pages": {"sliding_window": 200, "page_size": 256},
    "negative scale": {"softmax_scale": -1.0},
}


FEW_HEADS: dict[str, dict[str, Any]] = {
    "a head per key head, pages of 16": {"heads": 8},
    "groups of two": {"heads": 16},
    "groups of three": {"heads": 24},
}
"""At most four scalars are spilled, outside of the loop over keys."""


def packed_inputs(fields: dict[str, Any]) -> Any:
    """The inputs of a packed call, as shapes."""
    sizes = {"sequences": 64, "kv_length": 8192, "heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
    case = RaggedPageCase("", **sizes | {"q_lengths": (1, 1, 512)} | fields)
    return jax.eval_shape(functools.partial(inputs_of, "ragged_page_attention", case))


def packed_reports(fields: dict[str, Any]) -> list[KernelReport]:
    inputs = packed_inputs(fields)
    backend = PallasGpuPackedAttention()
    reports = [
        compile_for_h100(lambda inputs, one=one: backend.forward(inputs, one), inputs)
        for one in backend.candidates(inputs, H100, "forward")
    ]
    assert all(reports)
    return [report for some in reports for report in some]


@pytest.mark.parametrize("name", PACKED)
def test_packed_compiles_without_spills(name: str) -> None:
    assert [fault for report in packed_reports(PACKED[name]) for fault in report.faults] == []


@pytest.mark.parametrize("name", FEW_HEADS)
def test_packed_with_few_heads_spills_next_to_nothing(name: str) -> None:
    for report in packed_reports(FEW_HEADS[name]):
        assert not report.serialised
        assert report.spill_stores <= 16
