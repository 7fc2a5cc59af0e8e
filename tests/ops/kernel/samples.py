"""Kernels that tests share, and a look at which configs they ran with."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from tests.support.draws import draw
from tilewright.ops import Invocation, Kernel, Tuner
from tilewright.ops.utils.memory import clear_all


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    block: int = 64
    platform: str = "auto"


def matmul(x, y, like):
    """``x @ y`` sharded as ``like``, whose shape it has."""
    sharding = jax.typeof(like).sharding
    explicit = AxisType.Explicit in sharding.mesh.axis_types
    return jnp.matmul(x, y, out_sharding=sharding.spec if explicit else None)


@dataclasses.dataclass(frozen=True)
class Seen:
    """One run of a stage of a kernel as it was traced."""

    stage: str
    cfg: Any


class Product(Kernel[Config, jax.Array]):
    """``scale * a @ b``; JAX differentiates it."""

    traced: ClassVar[list[Seen]] = []

    def __init__(self, name: str = "tests.product", **kwargs: Any):
        super().__init__(name, **kwargs)

    def run(self, a, b, *, cfg, scale=1.0):
        self.traced.append(Seen("run", cfg))
        return scale * (a @ b)

    def heuristic_cfg(self, inv: Invocation) -> Config:
        return Config(64 if inv.direction == "forward" else 32)

    def config_space(self, inv: Invocation) -> list[Config]:
        return [Config(16), Config(32), Config(64)]

    def reference(self, a, b, *, scale=1.0):
        return scale * (a @ b)


class Recomputing(Product):
    """With gradients that recompute what they need."""

    def __init__(self, name: str = "tests.recomputing", **kwargs: Any):
        super().__init__(name, **kwargs)

    def custom_vjp(self, primals, cfg, kwargs, cotangents):
        self.traced.append(Seen("backward", cfg))
        (a, b), (c,), scale = primals, cotangents, kwargs.get("scale", 1.0)
        return scale * matmul(c, b.T, a), scale * matmul(a.T, c, b)


class Pair(Product):
    """With gradients from residuals."""

    def __init__(self, name: str = "tests.pair", **kwargs: Any):
        super().__init__(name, **kwargs)

    def forward_with_residuals(self, a, b, *, cfg, scale=1.0):
        self.traced.append(Seen("forward", cfg))
        return scale * (a @ b), {"b": b.T, "a": (a.T,)}

    def backward(self, residuals, cotangents, a, b, *, cfg, scale=1.0):
        self.traced.append(Seen("backward", cfg))
        (c,) = cotangents
        return {"b": scale * matmul(residuals["a"][0], c, b), "a": scale * matmul(c, residuals["b"], a)}


FORMS = (Product, Recomputing, Pair)


@contextlib.contextmanager
def watching(kernel: type[Product] = Product) -> Iterator[list[Seen]]:
    """Collects what is traced inside, as if none of it had been traced before."""
    clear_all()
    start = len(kernel.traced)
    seen: list[Seen] = []
    try:
        yield seen
    finally:
        seen += kernel.traced[start:]
        del kernel.traced[start:]


def operands(*shapes: tuple[int, ...], dtype: Any = jnp.float32, seed: int = 0) -> list[jax.Array]:
    return [draw(*shape, seed=10 * seed + i, dtype=dtype) for i, shape in enumerate(shapes)]


A, B = operands((6, 5), (5, 4))
"""Operands of a `Product`."""
QUICK = Tuner(warmup=0, iters=1)
