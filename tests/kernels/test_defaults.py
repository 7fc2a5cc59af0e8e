"""What an op answers that says nothing: partitioning by leading dimensions, cotangents, bytes."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.op.inputs import OpInputs
from tilewright.kernels.op.portfolio import PortfolioKernel
from tilewright.kernels.op.roofline import Cost
from tilewright.kernels.op.sharding import leading_partitioning, typed_axes
from tilewright.ops import BwdParams, FwdParams, Invocation


class Inputs(OpInputs):
    x: Any
    offset: Any
    weight: Any


type Results = tuple[jax.Array, jax.Array]


class Xla(Backend[Inputs, Results, FwdParams, BwdParams]):
    name = "xla"
    platform = Platform.XLA

    def reasons(self, inputs, device, direction):
        return []

    def candidates(self, inputs, device, direction):
        return [FwdParams() if direction == "forward" else BwdParams()]

    def forward(self, inputs, params):
        mean = inputs.x.mean(-1)
        return (inputs.x - mean[..., None]) * inputs.weight + inputs.offset, mean

    def backward(self, inputs, results, cotangents, params):
        d_out, d_mean = cotangents
        assert d_mean is None
        (_, mean), d_x = results, d_out * inputs.weight
        leading = tuple(range(d_out.ndim - 1))
        d_weight = jnp.sum(d_out * (inputs.x - mean[..., None]), leading)
        return {"x": d_x - d_x.mean(-1, keepdims=True), "offset": d_out, "weight": d_weight}


class Centred(PortfolioKernel[Inputs, Results]):
    core_dims: ClassVar[dict[str, int]] = {"x": 1, "offset": 1}

    def __init__(self) -> None:
        super().__init__("tests.centred", version="1", backends=[f"{__name__}:Xla"])

    def prepare(self, x, offset, weight) -> Inputs:
        return Inputs(x, offset, weight)

    def results(self, inputs):
        x = inputs.structs.x
        return x, jax.ShapeDtypeStruct(x.shape[:-1], x.dtype)

    def outputs(self, inputs, results):
        return results[0]

    def reference(self, inputs):
        return (inputs.x - inputs.x.mean(-1, keepdims=True)) * inputs.weight + inputs.offset


def arrays(rows: tuple[int, ...] = (4, 4), columns: int = 8) -> Inputs:
    random = np.random.default_rng(0)
    shapes = ((*rows, columns), (*rows, columns), (columns,))
    return Inputs(*(jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes))


def mesh() -> Any:
    devices = jax.devices()[:4]
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=devices)


def placed(inputs: Inputs, **specs: P) -> Inputs:
    sharded = {name: jax.device_put(getattr(inputs, name), NamedSharding(mesh(), spec)) for name, spec in specs.items()}
    return dataclasses.replace(inputs, **sharded)


@pytest.mark.parametrize(
    ("x", "offset", "weight"),
    [
        (P("data"), P("data"), P()),
        (P("data", "model"), P(), P()),
        (P(), P(None, ("data", "model")), P()),
        (P("data"), P(), P("data")),
        (P("data"), P(), P("model")),
    ],
    ids=str,
)
def test_leading_dimensions_are_split_and_shared_gradients_summed(x, offset, weight):
    """A parameter that is split is gathered, and its gradient is split like it."""
    kernel, whole = Centred(), arrays()

    def loss(*given):
        out = kernel(*given)
        return jnp.sin(out).sum(), out

    training = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
    (_, out), wanted = training(whole.x, whole.offset, whole.weight)
    with jax.set_mesh(mesh()):
        parts = placed(whole, x=x, offset=offset, weight=weight)
        (_, got), gradients = jax.jit(training)(parts.x, parts.offset, parts.weight)
    np.testing.assert_allclose(got, out, rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), gradients, wanted)
    assert [typed_axes(each) for each in gradients] == [typed_axes(x) for x in (parts.x, parts.offset, parts.weight)]


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ({"x": P(None, None, "data")}, r"x must be split by its first 2 dimensions alone \(x: P"),
        ({"x": P("data"), "offset": P("model")}, "must be split alike or be whole .*; reshard offset first"),
    ],
)
def test_what_would_need_communication_is_an_error(specs, message):
    with jax.set_mesh(mesh()), pytest.raises(ValueError, match=message):
        leading_partitioning(placed(arrays(), **{"offset": P(), "weight": P(), **specs}), Centred.core_dims)


def test_without_an_explicit_mesh_or_core_dims_nothing_is_partitioned():
    assert leading_partitioning(arrays(), Centred.core_dims) is None
    with jax.set_mesh(mesh()):
        assert leading_partitioning(placed(arrays(), x=P("data")), {}) is None


def test_costs_are_the_bytes_of_operands_and_outputs():
    given = arrays()
    inv = Invocation(Centred(), (given,))
    operands, out = 4 * (2 * 4 * 4 * 8 + 8), 4 * 4 * 4 * 8
    assert inv.kernel.cost(inv) == Cost(0.0, operands + out)
    assert inv.kernel.cost(inv.backward()) == Cost(0.0, 2 * operands + out)
    assert inv.kernel.min_cost(inv) == Cost(0.0, out)
    assert inv.kernel.min_cost(inv.backward()) == Cost(0.0, 0.0)


def test_the_structs_of_a_call_are_made_once_for_an_invocation(monkeypatch):
    made = []
    inv = Invocation(Centred(), (arrays(),))
    structs = Inputs.structs.func
    monkeypatch.setattr(Inputs, "structs", property(lambda self: made.append(1) or structs(self)))
    inv.kernel.heuristic_cfg(inv)
    inv.kernel.reasons(inv)
    list(inv.kernel.config_space(inv))
    assert len(made) == 1
