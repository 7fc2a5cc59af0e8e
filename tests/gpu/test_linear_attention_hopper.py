"""Linear attention on a Hopper GPU: conformance, and real sizes beside the same call in XLA in float32."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.linear_attention.conformance import inputs_of
from tests.kernels.linear_attention.gpu_conformance import GpuConformance, relative_error
from tests.kernels.linear_attention.test_hopper import TestHopper as Interpreted
from tilewright.kernels.linear_attention.cases import LinearAttentionCase
from tilewright.kernels.linear_attention.hopper.backend import HopperLinearAttention
from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs
from tilewright.kernels.linear_attention.xla.backend import XlaLinearAttention
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.cases import variants
from tilewright.ops.types import Direction
from tilewright.ops.utils.device import current_device

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu" or current_device().capability != (9, 0), reason="needs a Hopper GPU"
)
pytest.importorskip("triton")

BACKEND = HopperLinearAttention()
CASES = variants(
    LinearAttentionCase("", heads=2, value_heads=8, key_dim=128, dtype="bfloat16", qk_l2norm=True, state=True),
    {
        "rows": {"batch": 3, "length": 4097},
        "packed": {"length": 9000, "sequences": "cum_seqlens"},
        "lengths": {"batch": 5, "length": 777, "sequences": "seq_lengths", "gate": "head"},
        "narrow": {"length": 2000, "key_dim": 64, "value_dim": 64},
        "keys without norms": {"length": 2000, "qk_l2norm": False, "gate": "none"},
        "sums": {"batch": 2, "length": 3000, "update": "add", "qk_l2norm": False},
        "many CTAs": {"batch": 16, "length": 640, "heads": 16, "value_heads": 32, "state": False},
    },
)


class TestHopper(GpuConformance):
    backend: ClassVar[Backend[Any, Any, Any, Any]] = BACKEND
    adapted = Interpreted.adapted
    tolerances = Interpreted.tolerances

    def params(self, inputs: LinearAttentionInputs) -> tuple[Any, Any]:
        device = current_device()
        return BACKEND.heuristic(inputs, device, "forward"), BACKEND.heuristic(inputs, device, "backward")


def float32_in_xla(inputs: LinearAttentionInputs, direction: Direction) -> Any:
    """Results, or gradients of the conformance's cotangents, of the same values in float32."""
    wide, device = (
        jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, inputs),
        current_device(),
    )
    exact = XlaLinearAttention()
    with jax.default_matmul_precision("highest"):
        params: Any = exact.heuristic(wide.structs, device, direction)
        if direction == "forward":
            return jax.jit(lambda inputs: exact.forward(inputs, params))(wide)
        cotangents = TestHopper().cotangents(inputs)
        return jax.jit(lambda *given: exact.backward(given[0], None, given[1], params))(wide, cotangents)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", CASES)
def test_every_candidate_at_real_sizes(name: str, direction: Direction):
    """Near XLA in float32, and the same bits again."""
    inputs, device = inputs_of(CASES[name]), current_device()
    want, cotangents = float32_in_xla(inputs, direction), TestHopper().cotangents(inputs)
    for each in BACKEND.candidates(inputs.structs, device, direction):
        params: Any = each
        run: Any = jax.jit(lambda inputs, _, params=params: BACKEND.forward(inputs, params))
        if direction == "backward":
            run = jax.jit(lambda inputs, given, params=params: BACKEND.backward(inputs, None, given, params))
        got, again = run(inputs, cotangents), run(inputs, cotangents)
        found, repeated, right = (jax.tree_util.tree_leaves_with_path(x) for x in (got, again, want))
        for (path, first), (_, second), (_, exact) in zip(found, repeated, right, strict=True):
            np.testing.assert_array_equal(np.asarray(first, np.float32), np.asarray(second, np.float32))
            assert relative_error(first, exact) < (1e-2 if direction == "forward" else 1.2e-2), (path, each)
