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

    def params(self, inputs: LinearAttentionInputs) -> tuple[Any, Any]:
        return BACKEND.heuristic(inputs, current_device(), "forward"), None


@pytest.mark.parametrize("name", CASES)
def test_every_candidate_at_real_sizes(name: str):
    """Near XLA in float32, and the same bits again."""
    inputs, device = inputs_of(CASES[name]), current_device()
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, inputs)
    exact = XlaLinearAttention()
    with jax.default_matmul_precision("highest"):
        params = exact.heuristic(wide.structs, device, "forward")
        want: Any = jax.jit(lambda inputs: exact.forward(inputs, params))(wide)
    for each in BACKEND.candidates(inputs.structs, device, "forward"):
        run: Any = jax.jit(lambda inputs, each=each: BACKEND.forward(inputs, each))
        got, again = run(inputs), run(inputs)
        for first, second, right in zip(*map(jax.tree.leaves, (got, again, want)), strict=True):
            np.testing.assert_array_equal(np.asarray(first, np.float32), np.asarray(second, np.float32))
            assert relative_error(first, right) < 1e-2, each
