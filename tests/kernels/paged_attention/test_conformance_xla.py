"""Conformance of the XLA backend of attention over a cache."""

from typing import Any, ClassVar

import jax
import pytest

from tests.kernels.paged_attention.conformance import PAGED, QUICK, PagedConformance, check, inputs_of, problem_of
from tilewright.kernels.paged_attention.inputs import PagedProblem
from tilewright.kernels.paged_attention.xla import XlaPagedAttention
from tilewright.kernels.ragged_page_attention.cases import RaggedPageCase
from tilewright.kernels.registry import Implementation
from tilewright.ops.core.types import Device
from tilewright.ops.utils.datacarrier import FwdParams
from tilewright.ops.utils.device import current_device

GPU = Device("gpu", "NVIDIA H100 80GB HBM3", (9, 0), 132, "gpu:NVIDIA H100 80GB HBM3:9.0", present=False)


class TestXla(PagedConformance):
    backend: ClassVar[Implementation] = XlaPagedAttention()

    def params(self, problem: PagedProblem) -> Any:
        return FwdParams(q_blocksize=4, kv_blocksize=24, blocksize_heads=2 * problem.heads)


@pytest.mark.parametrize(
    "params",
    [
        FwdParams(q_blocksize=1, kv_blocksize=8, blocksize_heads=1),
        FwdParams(q_blocksize=128, kv_blocksize=1024, blocksize_heads=1024),
        FwdParams(q_blocksize=5, kv_blocksize=7, blocksize_heads=12),
        FwdParams(),
    ],
)
@pytest.mark.parametrize("q_lengths", [(1,), (4, 0, 11)])
def test_any_params_give_the_same(params: FwdParams, q_lengths: tuple[int, ...]):
    inputs = inputs_of("ragged_page_attention", RaggedPageCase("", **PAGED, q_lengths=q_lengths, sliding_window=40))
    check(jax.jit(lambda inputs: XlaPagedAttention().forward(inputs, params), compiler_options=QUICK)(inputs), inputs)


@pytest.mark.parametrize("device", [current_device(), GPU], ids=["cpu", "gpu"])
def test_the_heuristic_is_bounded_and_no_candidate(device: Device):
    backend = XlaPagedAttention()
    for sequences, kv_length, q_lengths in ((1, 131072, (1,)), (256, 1024, (1,)), (2, 64, (700, 1)), (0, 0, (1,))):
        case = RaggedPageCase("", **PAGED | {"sequences": sequences, "kv_length": kv_length}, q_lengths=q_lengths)
        problem = problem_of("ragged_page_attention", case)
        best = backend.heuristic(problem, device, "forward")
        tiles = best.blocksize_heads // problem.heads
        assert best.kv_blocksize <= max(kv_length + 7, 1)
        assert tiles * best.kv_blocksize * problem.heads * best.q_blocksize * 4 <= 1 << 30
        others = list(backend.candidates(problem, device, "forward"))
        assert best not in others
        assert len(set(others)) == len(others)
