"""Derivatives of a kernel that is linear in an argument, which they neither read nor keep."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.ops import Kernel

X, FACTORS = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4), jnp.array([3, -2, 0, 5])


@dataclasses.dataclass(frozen=True)
class Config:
    pass


class Multiplied(Kernel):
    """Rows times integers."""

    linear: ClassVar[frozenset[str]] = frozenset({"x"})

    def __init__(self) -> None:
        super().__init__("tests.multiplied")

    def run(self, x: Any, factors: Any, *, cfg: Any) -> Any:
        return x * factors.astype(x.dtype)

    def heuristic_cfg(self, inv: Any) -> Config:
        return Config()

    def forward_with_residuals(self, x: Any, factors: Any, *, cfg: Any) -> Any:
        return self.run(x, factors, cfg=cfg), ()

    def backward(self, residuals: Any, cotangents: Any, x: Any, factors: Any, *, cfg: Any) -> Any:
        # Zeros, whatever the caller gave; the sum would show anything else.
        return cotangents[0] * factors.astype(x.dtype) + jnp.sum(x**2), None

    def reference(self, x: Any, factors: Any) -> Any:
        return self.run(x, factors, cfg=Config())


MULTIPLIED = Multiplied()


def test_a_linear_argument_is_neither_read_nor_kept() -> None:
    def layers(multiplied: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, _: (jnp.sin(multiplied(2.0 * x, FACTORS)), None), x, None, length=5)[0].sum()

    ours, plain = (jax.grad(lambda x, f=f: layers(f, x)) for f in (MULTIPLIED, lambda x, factors: x * factors))
    np.testing.assert_allclose(ours(X), plain(X), rtol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.vmap(ours))(X), jax.vmap(plain)(X), rtol=1e-5)
    assert str(jax.make_jaxpr(ours)(X)).count("f32[5,3,4]") == str(jax.make_jaxpr(plain)(X)).count("f32[5,3,4]")


def test_forward_mode_and_second_derivatives_of_a_linear_argument() -> None:
    square = lambda x: jnp.sum(MULTIPLIED(x, FACTORS) ** 2)
    np.testing.assert_allclose(jax.jvp(lambda x: MULTIPLIED(x, FACTORS), (X,), (jnp.cos(X),))[1], jnp.cos(X) * FACTORS)
    along = jax.jvp(jax.grad(square), (X,), (jnp.cos(X),))[1]
    np.testing.assert_allclose(along, 2 * FACTORS**2 * jnp.cos(X), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda x: jax.grad(square)(x).sum())(X), 0 * X + 2 * FACTORS**2, rtol=1e-6)
