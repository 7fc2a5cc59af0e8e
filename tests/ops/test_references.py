"""A kernel that works on references of its own: under each transformation nothing of them shows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.ops.kernel.samples import Config, Product
from tests.support.draws import draw
from tilewright.ops import ConfigSelectorChain, Executor


class Accumulating(Product):
    """The product and its gradients, each added to a reference."""

    def run(self, a: Any, b: Any, *, cfg: Config, scale: float = 1.0) -> Any:
        return accumulated(scale * (a @ b))

    def custom_vjp(self, primals: Any, cfg: Config, kwargs: Any, cotangents: Any) -> Any:
        return accumulated(cotangents[0] @ primals[1].T), accumulated(primals[0].T @ cotangents[0])


def accumulated(value: jax.Array) -> jax.Array:
    ref = jax.new_ref(0 * value)
    ref[...] += value
    return jax.freeze(ref)


A, B = draw(2, 3), draw(3, 4, seed=1)
KERNEL = Accumulating("tests.references")
STACKED = draw(2, 2, 3, seed=2), draw(2, 3, 4, seed=3)


def product(a: Any, b: Any) -> Any:
    return Executor(ConfigSelectorChain())(KERNEL, a, b)


def gradients(function: Any) -> Any:
    return jax.grad(lambda a, b: jnp.sin(function(a, b)).sum(), argnums=(0, 1))


TRANSFORMS: dict[str, Any] = {
    "eager": lambda f: f(A, B),
    "jit": lambda f: jax.jit(f)(A, B),
    "grad": lambda f: gradients(f)(A, B),
    "jit of grad": lambda f: jax.jit(gradients(f))(A, B),
    "vmap": lambda f: jax.vmap(f)(*STACKED),
    "jit of vmap of grad": lambda f: jax.jit(jax.vmap(gradients(f), in_axes=(0, None)))(STACKED[0], B),
    "jacobian": lambda f: jax.jacrev(f)(A, B),
    "scan": lambda f: jax.lax.scan(lambda carry, b: (carry + f(A, b).sum(), None), 0.0, STACKED[1])[0],
    "remat": lambda f: jax.jit(gradients(jax.checkpoint(f)))(A, B),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_as_without_references(name: str) -> None:
    got, want = TRANSFORMS[name](product), TRANSFORMS[name](jnp.matmul)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("check_vma", [False, True])
def test_in_a_shard_map(check_vma: bool) -> None:
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(product, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), check_vma=check_vma)
    for got, want in zip(jax.jit(gradients(mapped))(A, B), gradients(jnp.matmul)(A, B), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
