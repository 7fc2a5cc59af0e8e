"""What attention over a cache ships in Triton, compiled for an H100: nothing spills."""

from typing import Any

import jax
import pytest

pytest.importorskip("triton")

from tests.kernels.conftest import H100
from tests.kernels.paged_attention.conformance import inputs_of
from tests.kernels.paged_attention.test_conformance_triton import SHIPPED
from tilewright.kernels.paged_attention.triton.backend import TritonPagedAttention
from tilewright.kernels.triton import recorded_launches
from tilewright.kernels.triton.compiler import report

BACKEND = TritonPagedAttention()


@pytest.mark.parametrize("name", SHIPPED)
def test_nothing_spills(name: str):
    op, case = SHIPPED[name]
    inputs: Any = jax.eval_shape(lambda: inputs_of(op, case))
    params = BACKEND.heuristic(inputs, H100, "forward")
    with recorded_launches() as found:
        jax.eval_shape(lambda inputs: BACKEND.forward(inputs, params), inputs)
    assert found
    for each in found:
        said = report(each, (9, 0))
        assert not said.faults
        # Keys and values come by 16-byte copies that overlap with products.
        assert each.kernel.fn.__name__ != "attend" or "cp.async.cg" in said.texts["ptx"]
