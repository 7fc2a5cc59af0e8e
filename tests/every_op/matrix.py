"""Every registered op, its implementations, and small calls of it: what the generated suite is made from."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.cli.targets import OPS as CASES_OF
from tilewright.cli.targets import op_function
from tilewright.kernels import OPS, kernel
from tilewright.kernels.portfolio import Choice, Portfolio, PortfolioKernel
from tilewright.ops import Invocation
from tilewright.ops.kernel.prepared import prepared
from tilewright.ops.utils.device import current_device
from tilewright.ops.utils.serialize import resolve

SIZES: dict[str, dict[str, Any]] = {
    "flash_attention": {"batch": 2, "q_length": 128, "heads": 4, "kv_heads": 2, "head_dim": 64, "causal": True},
    "mla_decode": {"sequences": 2, "kv_length": 128, "heads": 64, "head_dim": 576, "value_dim": 512, "page_size": 64},
}
SERVING = {"sequences": 2, "kv_length": 64, "heads": 8, "kv_heads": 2, "head_dim": 64, "page_size": 16}
PACKED = ("ragged_page_attention", "unified_attention", "chunked_prefill_paged_decode", "update_pages")


@dataclasses.dataclass(frozen=True)
class OpCall:
    """One call of an op's public function: its arrays, and the options that are none."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def function(self) -> Callable[..., Any]:
        return op_function(self.op)

    @property
    def kernel(self) -> Portfolio:
        return kernel(self.op)

    @property
    def differentiable(self) -> bool:
        return isinstance(self.kernel, PortfolioKernel)

    def on_arrays(self, **more: Any) -> tuple[Callable[..., Any], list[Any]]:
        """The call as a function of its arrays, and these."""
        leaves, tree = jax.tree.flatten((self.args, self.kwargs))
        arrays = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]

        def function(*given: Any) -> Any:
            rest = iter(given)
            args, kwargs = tree.unflatten(
                [next(rest) if is_array else leaf for leaf, is_array in zip(leaves, arrays, strict=True)]
            )
            return self.function(*args, **kwargs, **more)

        return function, [leaf for leaf, is_array in zip(leaves, arrays, strict=True) if is_array]

    def training(self, **more: Any) -> tuple[Callable[..., Any], list[Any]]:
        """The call with the gradients of its floating-point arrays, if it has any."""
        function, arrays = self.on_arrays(**more)
        if not self.differentiable:
            return function, arrays
        floating = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]

        def loss(*given: Any) -> Any:
            out = function(*given)
            return sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in jax.tree.leaves(out)), out

        return jax.value_and_grad(loss, argnums=floating, has_aux=True), arrays

    def invocation(self, direction: str = "forward") -> Invocation:
        inv, _ = prepared(self.kernel, self.args, self.kwargs, concrete=False)
        return dataclasses.replace(inv, direction=direction, device=current_device())


def call_of(op: str, dtype: str = "float32", **fields: Any) -> OpCall:
    """A small call."""
    case = resolve(f"{CASES_OF[op].cases}:{CASES_OF[op].case}")
    sizes = SIZES.get(op, SERVING) | {"dtype": dtype} | fields
    if op in PACKED:
        sizes = {"q_lengths": (1, 5)} | sizes
    return OpCall(op, *case(name="small", **sizes).arguments())


@functools.cache
def every_op() -> tuple[str, ...]:
    return tuple(OPS)


def choices(call: OpCall, direction: str = "forward") -> Iterator[Choice]:
    """What every implementation that can serve a call would run it with on the device in force."""
    inv = call.invocation(direction)
    yield from {choice.implementation: choice for choice in call.kernel._supported(inv)}.values()
