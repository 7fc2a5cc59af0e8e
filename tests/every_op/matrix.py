"""Every registered op, its backends, and small calls of it: what the generated suite is made from."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lib import gpu_triton

from tilewright.kernels import OPS, function, kernel
from tilewright.kernels.cuda import toolchain
from tilewright.kernels.op.choice import Choice, Platform
from tilewright.kernels.op.portfolio import Portfolio
from tilewright.ops import Invocation
from tilewright.ops.kernel.prepared import prepared
from tilewright.ops.utils.device import current_device


class _TritonCall:
    """A stand-in for the part of jaxlib that is only where CUDA's plugin is."""

    def __init__(self, *args: Any):
        self.args = args

    def to_proto(self, *_: Any) -> bytes:
        return repr(self.args).encode()


@contextlib.contextmanager
def without_builds() -> Iterator[None]:
    """Kernels in CUDA C++, which take minutes to build, have no compiler; Triton's are lowered without a plugin."""
    stand_ins: dict[str, Any] = {"TritonKernelCall": _TritonCall}
    for name in ("TritonKernel", "create_array_parameter", "create_scalar_parameter"):
        stand_ins[name] = lambda *args: args
    if hasattr(gpu_triton, "TritonKernelCall"):
        stand_ins.clear()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(toolchain, "missing", return_value=["there is no nvcc"]))
        for name, value in stand_ins.items():
            stack.enter_context(mock.patch.object(gpu_triton, name, value, create=True))
        yield


@contextlib.contextmanager
def strict_promotion() -> Iterator[None]:
    """What many programs and test suites set: neither ranks nor dtypes are promoted without a word."""
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


@contextlib.contextmanager
def debugging() -> Iterator[None]:
    """What a program that is searched for its mistakes sets."""
    with jax.debug_nans(True), jax.enable_checks(True):
        yield


SETTINGS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "strict_promotion": strict_promotion,
    "debugging": debugging,
}
"""Settings of JAX under which every op gives what it gives without them; x64, with dtypes of its own, is apart."""


@dataclasses.dataclass(frozen=True)
class OpCall:
    """One call of an op's public function: its arrays, and the options that are not arrays."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def function(self) -> Callable[..., Any]:
        return function(self.op)

    @property
    def kernel(self) -> Portfolio:
        return kernel(self.op)

    @property
    def differentiable(self) -> bool:
        return self.kernel.differentiable

    @property
    def platforms(self) -> set[Platform]:
        """Those that the op has backends for."""
        return {each.platform for each in self.kernel.backends.usable}

    def on_arrays(self, **more: Any) -> tuple[Callable[..., Any], list[Any]]:
        """The call as a function of its arrays, and these."""
        leaves, tree = jax.tree.flatten((self.args, self.kwargs))
        arrays = [isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct) for leaf in leaves]

        def function(*given: Any) -> Any:
            rest = iter(given)
            args, kwargs = tree.unflatten(
                [next(rest) if is_array else leaf for leaf, is_array in zip(leaves, arrays, strict=True)]
            )
            return self.function(*args, **kwargs, **more)

        return function, [leaf for leaf, is_array in zip(leaves, arrays, strict=True) if is_array]

    def training(self, *, of_keywords: bool = True, **more: Any) -> tuple[Callable[..., Any], list[Any]]:
        """The call with the gradients of its floating-point arrays, or of those that are positional, if it has any."""
        function, arrays = self.on_arrays(**more)
        if not self.differentiable:
            return function, arrays
        of = arrays if of_keywords else arrays[: len(jax.tree.leaves(self.args))]
        floating = [i for i, x in enumerate(of) if jnp.issubdtype(x.dtype, jnp.floating)]

        def loss(*given: Any) -> Any:
            out = function(*given)
            return sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in jax.tree.leaves(out)), out

        return jax.value_and_grad(loss, argnums=floating, has_aux=True), arrays

    def invocation(self, direction: str = "forward") -> Invocation:
        inv, _ = prepared(self.kernel, self.args, self.kwargs, concrete=False)
        return dataclasses.replace(inv, direction=direction, device=current_device())


def call_of(op: str, dtype: str = "float32", **fields: Any) -> OpCall:
    """A small call."""
    return OpCall(op, *dataclasses.replace(kernel(op).cases.small, dtype=dtype, **fields).arguments())


def large_call_of(op: str) -> OpCall:
    """The same call in other sizes: what differs between the two shall be symbolic."""
    return OpCall(op, *kernel(op).cases.large.arguments())


@functools.cache
def every_op() -> tuple[str, ...]:
    return tuple(OPS)


def choices(call: OpCall, direction: str = "forward") -> Iterator[Choice]:
    """What every backend that can serve a call would run it with on the device in force."""
    inv = call.invocation(direction)
    yield from {choice.backend: choice for choice in call.kernel._by_preference(inv)}.values()
