"""The declared results of a call in place of those of a backend: all that tracing a call needs, without its kernel.

Equations of a primitive that is never lowered stand for what a backend computes. So the code around a backend (splits
over devices, outputs, gradients by argument) is traced as it runs, under any transformation, in a few equations.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Never

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching
from jax.sharding import PartitionSpec

from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.op.inputs import OpInputs
from tilewright.kernels.op.sharding import typed_axes
from tilewright.ops.kernel.arrays import result_like
from tilewright.ops.types import Device, Direction

declared_p = Primitive("tilewright_declared")
declared_p.multiple_results = True


def declared(structs: Any, operands: object) -> Any:
    """Arrays of the types that ``structs`` gives in each leaf, as if a backend had computed them from ``operands``."""
    leaves, tree = jax.tree.flatten(structs)
    types = tuple((tuple(leaf.shape), jnp.dtype(leaf.dtype)) for leaf in leaves)
    return jax.tree.unflatten(tree, declared_p.bind(*jax.tree.leaves(operands), types=types, mapped=()))


def _abstract_eval(
    *avals: jax.core.ShapedArray, types: tuple[tuple[Any, Any], ...], mapped: tuple[tuple[Any, Any], ...]
) -> list[Any]:
    """The types, split over the axes of mapped dimensions alone."""
    front, sizes = tuple(axes for _, axes in mapped), tuple(size for size, _ in mapped)
    specs = [PartitionSpec(*front, *(None,) * len(shape)) for shape, _ in types]
    return [
        result_like(avals, (*sizes, *shape), dtype, spec) for (shape, dtype), spec in zip(types, specs, strict=True)
    ]


declared_p.def_abstract_eval(_abstract_eval)


def _batched(operands: Any, dims: Any, *, types: Any, mapped: Any) -> tuple[list[Any], list[int]]:
    """One more axis in front of every result, split over mesh axes as that of an operand is."""
    moved = [x if d is None or d == 0 else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True)]
    first = next(x for x, d in zip(moved, dims, strict=True) if d is not None)
    axis = (first.shape[0], typed_axes(first)[0])
    results = declared_p.bind(*moved, types=types, mapped=(axis, *mapped))
    return results, [0] * len(results)


batching.primitive_batchers[declared_p] = _batched


class Declared(Backend[OpInputs, Any, None, None]):
    """Stands for the backend of a call whose config is not chosen yet; no call runs it."""

    name: ClassVar[str] = "declared"
    platform: ClassVar[Platform] = Platform.XLA

    def __init__(self, results: Callable[[Any], Any]) -> None:
        self._results = results

    def forward(self, inputs: OpInputs, params: None) -> Any:
        return declared(self._results(inputs), inputs)

    def backward(self, inputs: OpInputs, results: Any, cotangents: Any, params: None) -> dict[str, Any]:
        found: dict[str, Any] = declared(inputs.gradients, (inputs, results, cotangents))
        return found

    def reasons(self, inputs: OpInputs, device: Device, direction: Direction) -> list[str]:
        return ["it computes nothing"]

    def candidates(self, inputs: OpInputs, device: Device, direction: Direction) -> tuple[Never, ...]:
        return ()
