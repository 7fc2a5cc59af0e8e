"""Conformance of ``jax.lax.ragged_dot`` as a backend, what it declines, and what JAX's function does by itself."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tests.kernels.conftest import H100
from tests.kernels.matmul.grouped_conformance import CASES, GatedConformance, GroupedConformance, inputs_of
from tilewright.kernels.matmul.inputs import MatmulInputs
from tilewright.kernels.matmul.xla import ragged_dot
from tilewright.kernels.matmul.xla.params import XlaGluBackwardParams
from tilewright.kernels.matmul.xla.ragged_dot import GatedRaggedDot, RaggedDot
from tilewright.kernels.op.choice import Choice, PerDirection
from tilewright.modules import gated_grouped_matmul, grouped_matmul
from tilewright.ops import BwdParams, FwdParams
from tilewright.ops.types import Device
from tilewright.ops.utils.device import current_device

CONFIG = PerDirection(Choice("ragged_dot", FwdParams()), Choice("ragged_dot", BwdParams()))


class TestRaggedDot(GroupedConformance):
    backend = RaggedDot()

    def params(self, inputs: MatmulInputs) -> tuple[Any, Any]:
        return FwdParams(), BwdParams()


class TestGated(GatedConformance):
    backend = GatedRaggedDot()
    recomputing = XlaGluBackwardParams(recompute=True)
    recomputed_within = 1e-6

    def params(self, inputs: MatmulInputs) -> tuple[Any, Any]:
        return FwdParams(), XlaGluBackwardParams()


@pytest.mark.parametrize(
    ("case", "options"), [("offset", ["group_offset"]), ("blocks", ["lhs_scale", "rhs_scale"]), ("transposed", [])]
)
def test_what_it_declines(case: str, options: list[str]):
    inputs = inputs_of(CASES[case])
    for direction in ("forward", "backward"):
        said = RaggedDot().not_supported_reasons(inputs, current_device(), direction)
        assert said == [f"does not serve {name}" for name in options]


def test_it_leaves_the_gradients_on_gpus_to_others():
    inputs = inputs_of(CASES["float32"])
    assert not RaggedDot().not_supported_reasons(inputs, H100, "forward")
    assert "cuDNN" in RaggedDot().not_supported_reasons(inputs, H100, "backward")[0]


def test_jax_itself_counts_rows_twice_if_a_size_is_negative():
    """Why the backend gives it other sizes than the caller's."""
    rows, matrices, sizes = jnp.ones((6, 4)), jnp.ones((3, 4, 3)), jnp.array([3, -2, 3])
    assert jax.lax.ragged_dot(rows, matrices, sizes)[1, 0] == 8.0
    ours = jax.jit(lambda *operands: grouped_matmul(*operands, cfg=CONFIG))
    np.testing.assert_array_equal(ours(rows, matrices, sizes), np.full((6, 3), 4.0))


@pytest.mark.parametrize("device", ["cpu", "tpu"])
@pytest.mark.parametrize("axes", [(None, None, 0), (0, None, None), (None, 0, None), (1, 2, 0)])
def test_vmap_over_any_operand(axes: Any, device: str, monkeypatch: pytest.MonkeyPatch):
    """JAX maps its function over the first axes of all operands alone, and not on TPUs."""
    monkeypatch.setattr(ragged_dot, "current_device", lambda: Device(device, device))
    random = np.random.default_rng(0)
    shapes = ((7, 4), (3, 4, 5), (3,))
    rows, matrices = (
        jnp.asarray(random.standard_normal(shape if axis is None else (*shape[:axis], 2, *shape[axis:])), jnp.float32)
        for shape, axis in zip(shapes[:2], axes[:2], strict=True)
    )
    sizes = jnp.array([1, 3, 2]) if axes[2] is None else jnp.array([[1, 3, 2], [4, 0, 3]])
    got, want = (
        jax.vmap(lambda *xs, cfg=cfg: grouped_matmul(*xs, cfg=cfg), axes)(rows, matrices, sizes)
        for cfg in (CONFIG, None)
    )
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


TPU_CALL = [
    jax.ShapeDtypeStruct(shape, dtype)
    for shape, dtype in (((512, 256), jnp.bfloat16), ((8, 256, 256), jnp.bfloat16), ((8,), jnp.int32))
]


def _gradients(*operands: Any) -> Any:
    total = lambda lhs, rhs, sizes: grouped_matmul(lhs, rhs, sizes).astype(jnp.float32).sum()
    return jax.grad(total, argnums=(0, 1))(*operands)


def _gated_gradients(lhs: Any, rhs: Any, sizes: Any) -> Any:
    total = lambda lhs, gate, up: gated_grouped_matmul(lhs, gate, up, sizes).astype(jnp.float32).sum()
    return jax.grad(total, argnums=(0, 1, 2))(lhs, rhs, 2 * rhs)


@pytest.mark.parametrize("name", ["TPU v5e", "TPU v6e", "TPU7x"])
def test_first_on_tpus_in_both_directions(name: str):
    """Also on the explicit axes of the mesh in force, and without a loop over blocks."""
    with tilewright.target_device(name):
        for function, products in ((grouped_matmul, 1), (_gradients, 2), (_gated_gradients, 6)):
            chosen = {str(each.config).partition("(")[0] for each in tilewright.explain(function, *TPU_CALL)}
            assert chosen == {"ragged_dot"}
            text = jax.jit(function).lower(*TPU_CALL).as_text()
            assert text.count('chlo.ragged_dot"') >= products
            assert "stablehlo.while" not in text
        mapped = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in TPU_CALL]
        text = jax.jit(jax.vmap(_gradients)).lower(*mapped).as_text()
        assert 'chlo.ragged_dot"' in text


def test_not_first_elsewhere():
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"):
        with tilewright.target_device(name):
            (call,) = tilewright.explain(grouped_matmul, *TPU_CALL)
        assert not str(call.config).startswith("ragged_dot")
    (call,) = tilewright.explain(grouped_matmul, *TPU_CALL)
    assert str(call.config).startswith("xla")
