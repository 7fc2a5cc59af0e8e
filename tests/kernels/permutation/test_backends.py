"""Conformance of the backends of ``permute`` and ``unpermute``, and what Triton's decline."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.conformance import Conformance, Found
from tests.kernels.conftest import A100, H100
from tests.kernels.permutation.oracle import combined, gathered, inner_products, routing_of, terms
from tilewright.kernels.permutation.cases import PermuteCase, UnpermuteCase
from tilewright.kernels.permutation.inputs import PermuteInputs, UnpermuteInputs
from tilewright.kernels.permutation.routing import Routing
from tilewright.kernels.permutation.triton.backend import TritonPermute, TritonUnpermute
from tilewright.kernels.permutation.xla import XlaPermute, XlaUnpermute
from tilewright.kernels.triton.interpreter import interpret_triton
from tilewright.ops.types import Device
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams

pytestmark = pytest.mark.usefixtures("unoptimised")

PERMUTE = (
    PermuteCase("plain", tokens=9, d=24, k=3, experts=5),
    PermuteCase("capacity", tokens=20, d=16, k=2, experts=4, capacity=3, dtype="bfloat16"),
    PermuteCase("one_choice", tokens=20, d=16, k=1, experts=4, dtype="float16"),
    PermuteCase("odd_d", tokens=5, d=301, k=2, experts=3, dtype="bfloat16"),
    PermuteCase("no_tokens", tokens=0, d=8, k=2, experts=3),
)
UNPERMUTE = (
    UnpermuteCase("plain", tokens=9, d=24, k=3),
    UnpermuteCase("one_choice", tokens=20, d=16, k=1, dtype="float16"),
    UnpermuteCase("odd_d", tokens=5, d=301, k=2, dtype="bfloat16"),
    UnpermuteCase("no_tokens", tokens=0, d=8, k=2),
)


def normal(like: Any) -> Any:
    return jnp.asarray(np.random.default_rng(7).standard_normal(like.shape), like.dtype)


class MovingConformance(Conformance[Any, Any]):
    """A backend of either op; its backward pass takes the routing."""

    def params(self, problem: Any) -> tuple[Any, Any]:
        return FwdParams(), BwdParams()

    @staticmethod
    def residuals(results: Any) -> Any:
        return results.routing


class PermuteConformance(MovingConformance):
    cases, repeated = PERMUTE, PERMUTE[1]

    def inputs(self, case: PermuteCase) -> PermuteInputs:
        """Also with ids beside those of the experts."""
        (x, _, num_experts), _ = case.arguments()
        ids = np.random.default_rng(3).integers(-1, num_experts + 1, (case.tokens, case.k))
        return PermuteInputs(x, jnp.asarray(ids, jnp.int32), num_experts, case.capacity)

    def cotangents(self, inputs: PermuteInputs) -> Any:
        return normal(jax.ShapeDtypeStruct((inputs.experts.size, inputs.x.shape[1]), inputs.x.dtype))

    @staticmethod
    def named(results: Any, gradients: dict[str, Any]) -> Found:
        return {"rows": results.rows, **results.routing._asdict(), "d_x": gradients["x"]}

    def dtypes(self, inputs: PermuteInputs) -> dict[str, Any]:
        return {"rows": inputs.x.dtype, "source": np.int32, "group_sizes": np.int32, "d_x": inputs.x.dtype}

    def oracle(self, inputs: PermuteInputs, cotangents: Any) -> tuple[Found, None]:
        routing = routing_of(inputs.experts, inputs.num_experts, inputs.capacity)
        rows = gathered(inputs.x, routing)
        return {"rows": rows, **routing._asdict(), "d_x": combined(cotangents, routing)}, None


class UnpermuteConformance(MovingConformance):
    cases, repeated = UNPERMUTE, UNPERMUTE[0]

    def inputs(self, case: UnpermuteCase) -> UnpermuteInputs:
        """With rows that hold no choice, at the end or not, among them ones with numbers that no choice has."""
        (rows, source, weights), _ = case.arguments()
        source = source.at[2:6].set(jnp.array([-1, -7, source.size, 2**31 - 1])) if case.tokens else source
        return UnpermuteInputs(rows, source, weights)

    def cotangents(self, inputs: UnpermuteInputs) -> Any:
        return normal(jax.ShapeDtypeStruct((len(inputs.weights), inputs.rows.shape[1]), inputs.rows.dtype))

    @staticmethod
    def named(results: Any, gradients: dict[str, Any]) -> Found:
        return {"out": results.out, "d_rows": gradients["rows"], "d_weights": gradients["weights"]}

    def dtypes(self, inputs: UnpermuteInputs) -> dict[str, Any]:
        return {"out": inputs.rows.dtype, "d_rows": inputs.rows.dtype, "d_weights": inputs.weights.dtype}

    def oracle(self, inputs: UnpermuteInputs, cotangents: Any) -> tuple[Found, None]:
        source = np.asarray(inputs.source)
        held = np.flatnonzero((source >= 0) & (source < source.size))
        positions = np.full(inputs.weights.shape, -1)
        positions.ravel()[source[held]] = held
        is_held: Any = np.where(np.isin(np.arange(source.size), held), source, -1)
        routing = Routing(is_held, positions, np.zeros(0))  # type: ignore[arg-type]
        assert terms(inputs.rows, routing).shape == (*positions.shape, inputs.rows.shape[1])
        return {
            "out": combined(inputs.rows, routing, inputs.weights),
            "d_rows": gathered(cotangents, routing, inputs.weights),
            "d_weights": inner_products(cotangents, inputs.rows, routing),
        }, None


class TestXlaPermute(PermuteConformance):
    backend = XlaPermute()


class TestTritonPermute(PermuteConformance):
    backend, device, machine = TritonPermute(), H100, staticmethod(interpret_triton)


class TestXlaUnpermute(UnpermuteConformance):
    backend = XlaUnpermute()


class TestTritonUnpermute(UnpermuteConformance):
    backend, device, machine = TritonUnpermute(), H100, staticmethod(interpret_triton)


def test_what_triton_declines():
    def of_permute(device: Device = A100, **fields: Any) -> str:
        (x, ids, count), _ = PermuteCase("", tokens=8, d=16, k=2, experts=4).abstract_arguments()
        inputs = PermuteInputs(x, ids, count).replace(**fields)
        return "; ".join(TritonPermute().not_supported_reasons(inputs, device, "forward"))

    struct = jax.ShapeDtypeStruct
    assert not of_permute()
    assert not of_permute(capacity=3)
    assert "needs a CUDA GPU" in of_permute(Device("cpu", "cpu"))
    assert "x must be float16, bfloat16 or float32, not float64" in of_permute(x=struct((8, 16), np.float64))
    assert "its kernels need elements" in of_permute(x=struct((8, 0), np.float32))
    assert "a token may have 64 choices, got k=65" in of_permute(experts=struct((8, 65), np.int32))
    many = {"x": struct((1 << 28, 1), np.float32), "experts": struct((1 << 28, 8), np.int32)}
    assert "there may be 1073741824 choices" in of_permute(**many)
    (rows, source, weights), _ = UnpermuteCase("", tokens=8, d=16, k=2).abstract_arguments()
    inputs = UnpermuteInputs(rows, source, struct(weights.shape, np.float64))
    assert "weights must be" in "; ".join(TritonUnpermute().not_supported_reasons(inputs, A100, "forward"))
