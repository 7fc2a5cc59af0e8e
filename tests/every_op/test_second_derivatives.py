"""Every op can be differentiated twice, in any order of both modes, under transformations, and for a GPU."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import tilewright
from tests.every_op.matrix import call_of, every_op
from tests.support.draws import draw
from tilewright.modules import (
    all_gather_matmul,
    context_parallel_attention,
    flash_attention,
    grouped_matmul,
    linear_cross_entropy,
    matmul_reduce_scatter,
)
from tilewright.ops import Kernel
from tilewright.ops.lowering.labels import find_labels_in_lowered, is_call_label, parse_label

every = pytest.mark.parametrize("op", [op for op in every_op() if call_of(op).differentiable])
X, W, SIZES = draw(32, 8), draw(4, 8, 8), [5, 0, 20, 4]
MESH = jax.make_mesh((2,), ("s",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])


def loss_of(op: str, dtype: str = "float32") -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A loss of the floating-point arrays of a small call, and these."""
    function, arrays = call_of(op, dtype).on_arrays()
    floating = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]

    def loss(*given: Any) -> Any:
        complete = list(arrays)
        for i, x in zip(floating, given, strict=True):
            complete[i] = x
        return sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in jax.tree.leaves(function(*complete)))

    return loss, tuple(jnp.asarray(arrays[i]) for i in floating)


def dot(a: Any, b: Any) -> Any:
    return sum(jnp.vdot(x.astype(jnp.float32), y.astype(jnp.float32)) for x, y in zip(a, b, strict=True))


def products(loss: Any, arrays: Any) -> dict[str, Any]:
    """A Hessian times a vector, by each order of the modes."""
    of, along = tuple(range(len(arrays))), tuple(jnp.cos(3 * x) for x in arrays)
    gradient = jax.grad(loss, of)
    return {
        "forward over reverse": jax.jvp(gradient, arrays, along)[1],
        "reverse over reverse": jax.grad(lambda *xs: dot(gradient(*xs), along), of)(*arrays),
        "reverse over forward": jax.grad(lambda *xs: jax.jvp(loss, xs, along)[1], of)(*arrays),
    }


def agree(loss: Any, arrays: Any, tolerance: float = 1e-3) -> None:
    found = jax.jit(lambda *xs: products(loss, xs))(*arrays)
    wanted = found.pop("forward over reverse")
    for name, product in found.items():
        for got, want in zip(product, wanted, strict=True):
            scale = float(jnp.abs(want).max()) + 1e-3
            np.testing.assert_allclose(got / scale, want / scale, atol=tolerance, err_msg=name)


@every
def test_reverse_over_reverse_is_forward_over_reverse(op: str) -> None:
    """Forward mode differentiates the backward pass of the XLA backend, reverse mode that of the reference."""
    agree(*loss_of(op))


@pytest.mark.usefixtures("without_builds")
@pytest.mark.parametrize("op", [op for op in every_op() if call_of(op).differentiable and "grouped" not in op])
def test_a_program_for_a_gpu_can_be_differentiated_twice(op: str) -> None:
    """JAX differentiates no kernel. The reference of grouped matmuls has a loop that a target's typed mesh refuses."""
    loss, arrays = loss_of(op, "bfloat16")
    of = tuple(range(len(arrays)))
    penalty = lambda *xs: dot(*[jax.grad(loss, of)(*xs)] * 2)
    with tilewright.target_device("NVIDIA H100 80GB HBM3"):
        lowered = jax.jit(jax.grad(penalty, of)).trace(*arrays).lower(lowering_platforms=("cuda",))
    labels = [parse_label(each) for each in find_labels_in_lowered(lowered) if is_call_label(each)]
    assert {each.direction for each in labels} >= {"forward"}


SPLIT: dict[str, Any] = {
    "shared matrices": lambda x, w: jax.shard_map(
        lambda x, w: grouped_matmul(x, w, SIZES[:1] * 3 + [1]), mesh=MESH, in_specs=(P("s"), P()), out_specs=P("s")
    )(x, w),
    "gathered rows": lambda x, w: jax.shard_map(
        lambda x, w: all_gather_matmul(x, w[0], axis_name="s"), mesh=MESH, in_specs=(P("s"), P()), out_specs=P("s")
    )(x, w),
    "scattered sums": lambda x, w: jax.shard_map(
        lambda x, w: matmul_reduce_scatter(x, w[0], axis_name="s"),
        mesh=MESH, in_specs=(P(None, "s"), P(None, "s")), out_specs=P("s"),
    )(x, w),
    "unchecked types": lambda x, w: jax.shard_map(
        lambda x, w: grouped_matmul(x, w, SIZES[:1] * 3 + [1]),
        mesh=MESH, in_specs=(P("s"), P()), out_specs=P("s"), check_vma=False,
    )(x, w),
}  # fmt: skip


@pytest.mark.parametrize("name", SPLIT)
def test_inside_shard_map(name: str) -> None:
    agree(lambda x, w: jnp.sum(jnp.sin(SPLIT[name](x, w))), (X, W))


def attention(x: Any, w: Any) -> Any:
    query, key = (each.reshape(1, 16, 2, 8) for each in (x, w))
    return jnp.sum(jnp.sin(flash_attention(query, key, key, causal=True)))


def split_attention(strategy: str) -> Any:
    attend = jax.shard_map(
        lambda q, k: context_parallel_attention(q, k, k, axis_name="s", strategy=strategy, causal=True),
        mesh=MESH, in_specs=P(None, "s"), out_specs=P(None, "s"),
    )  # fmt: skip
    return lambda x, w: jnp.sum(jnp.sin(attend(*(each.reshape(1, 16, 2, 8) for each in (x, w)))))


LABELS = jnp.arange(32) % 8
REVERSE: dict[str, tuple[Any, Any]] = {
    "a split vocabulary": (
        jax.shard_map(
            lambda x, w: linear_cross_entropy(x, w[0], LABELS, axis_name="s"),
            mesh=MESH, in_specs=(P(), P(None, None, "s")), out_specs=P(),
        ),
        lambda x, w: linear_cross_entropy(x, w[0], LABELS),
    ),
    "gathered keys": (split_attention("all_gather"), attention),
    "exchanged heads": (split_attention("ulysses"), attention),
}  # fmt: skip
"""Calls over several devices, which have no forward mode, and the same on one device."""


def penalty(loss: Any) -> Any:
    """The gradient of the norm of a gradient."""
    return jax.jit(jax.grad(lambda x, w: dot(*[jax.grad(loss, (0, 1))(x, w)] * 2), (0, 1)))(X, W)


def test_a_ring_says_what_has_second_derivatives() -> None:
    with pytest.raises(TypeError, match="a ring has no second derivatives; pass strategy='all_gather'"):
        penalty(split_attention("ring"))


@pytest.mark.parametrize("name", REVERSE)
def test_reverse_mode_alone_over_several_devices(name: str) -> None:
    got, want = map(penalty, REVERSE[name])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), got, want)


def test_under_vmap_and_of_the_third_order() -> None:
    def loss(x: Any, w: Any) -> Any:
        return jnp.sum(jnp.sin(grouped_matmul(x, w, SIZES)))

    def plain(x: Any, w: Any) -> Any:
        rows = np.repeat(np.arange(4), SIZES)
        return jnp.sum(jnp.sin(jnp.einsum("mk,mkn->mn", x[: len(rows)], w[rows])))

    def third(loss: Any) -> Any:
        first = lambda x, w: jnp.sum(jax.grad(loss)(x, w) ** 2)
        second = lambda x, w: jnp.sum(jax.grad(first, 1)(x, w) ** 2)
        return jax.grad(second, (0, 1))

    batch = jnp.stack([X, 2 * X])
    got, want = (jax.jit(jax.vmap(third(each), (0, None)))(batch, W / 4) for each in (loss, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-2), got, want)


def test_rows_that_see_nothing_have_no_second_derivative() -> None:
    def norm(q: Any) -> Any:
        attended = lambda q: jnp.sum(jnp.sin(flash_attention(q, q, q, key_value_seq_lengths=jnp.array([0, 3]))))
        return jnp.sum(jax.grad(attended)(q) ** 2)

    found = jax.grad(norm)(draw(2, 6, 2, 8))
    assert not found[0].any()
    assert found[1, :3].any()
    assert jnp.isfinite(found).all()


@dataclasses.dataclass(frozen=True)
class Config:
    pass


class Cube(Kernel):
    """A kernel of a user, whose passes JAX cannot differentiate."""

    def __init__(self) -> None:
        super().__init__("tests.opaque_cube")

    def run(self, x: Any, *, cfg: Any) -> Any:
        return self._opaque(lambda x: x**3, x)

    def heuristic_cfg(self, inv: Any) -> Config:
        return Config()

    def custom_vjp(self, primals: Any, cfg: Any, kwargs: Any, cotangents: Any) -> Any:
        return (self._opaque(lambda x, c: 3 * c * x**2, primals[0], cotangents[0]),)

    def reference(self, x: Any) -> Any:
        return x**3

    @staticmethod
    def _opaque(function: Any, *arrays: Any) -> Any:
        return jax.pure_callback(function, jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype), *arrays)


def test_a_users_kernel_is_differentiated_twice_by_its_reference() -> None:
    x = jnp.arange(1.0, 4.0)
    second = jax.grad(lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(Cube()(x)))(x) ** 2))
    np.testing.assert_allclose(second(x), 36 * x**3, rtol=1e-6)
    np.testing.assert_allclose(jax.jvp(jax.grad(lambda x: jnp.sum(Cube()(x))), (x,), (x,))[1], 6 * x**2, rtol=1e-6)
