"""What attention over a cache ships in Pallas, compiled for an H100: nothing spills, no product waits for another."""

import functools
from typing import Any

import jax
import pytest

from tests.aot.compiler import compile_for_h100, missing_packages
from tests.kernels.conftest import H100
from tests.kernels.paged_attention.conformance import inputs_of
from tests.kernels.paged_attention.latent_conformance import latent_inputs
from tilewright.kernels.mla_decode.cases import GPU_CASES
from tilewright.kernels.paged_attention.inputs import PagedProblem
from tilewright.kernels.paged_attention.pallas_gpu import PallasGpuPagedAttention

if missing_packages():
    pytest.skip(missing_packages(), allow_module_level=True)

BACKEND = PallasGpuPagedAttention()

CALLS = {name: functools.partial(inputs_of, "mla_decode", case) for name, case in GPU_CASES.items()} | {
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
    params = BACKEND.candidates(PagedProblem.of(inputs), H100, "forward")
    # How many splits there are, and how far ahead is prefetched, are constants; whether at all decides.
    for one in {(bool(each.prefetched), each.num_key_splits > 1): each for each in params}.values():
        reports = compile_for_h100(lambda inputs, one=one: BACKEND.forward(inputs, one), inputs)
        assert reports
        assert [fault for report in reports for fault in report.faults] == []
