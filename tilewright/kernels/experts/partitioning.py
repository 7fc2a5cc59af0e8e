"""The split of a layer of experts over explicit mesh axes: by tokens, and by n."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from tilewright.kernels.experts.inputs import TOKENS, ExpertsInputs, ExpertsResults
from tilewright.kernels.op.sharding import (
    GradientParts,
    Partitioning,
    axis_names,
    common_axes,
    explicit_mesh,
    typed_axes,
    typed_spec,
)
from tilewright.kernels.permutation.routing import Routing, of_rows, scattered

_N_AXES = {"gate": 2, "up": 2, "down": 1, "gate_bias": 1, "up_bias": 1}
"""The axis of n of each parameter that has one."""


def experts_partitioning(inputs: ExpertsInputs) -> Partitioning | None:
    """The partitioning that the types of the arrays imply; ``None`` without explicit axes.

    A device has all experts: their matrices are split along n alone, and gathered over axes that split the tokens,
    too. With n split the result is a sum over devices, in the dtype of sums.

    Raises:
      ValueError: d or the experts are split, capacity is of tokens that are split, or arrays are split in two ways.
    """
    arrays = {name: array for name, array in inputs.arrays.items() if array is not None}
    mesh = explicit_mesh(*arrays.values())
    if mesh is None:
        return None
    of_tokens = {name: arrays[name] for name in TOKENS}
    split = common_axes(of_tokens, dict.fromkeys(of_tokens, len(inputs.leading)), whats="tokens", core="d and k")
    names = tuple(name for axes in split for name in axis_names(axes))
    if inputs.capacity is not None and names:
        raise ValueError(f"with capacity tokens must be whole, and are split over {names}; reshard them first")
    n = _split_of_n(arrays, names)
    leading, rows, summed = PartitionSpec(*split), names or None, axis_names(n)

    def spec(name: str) -> PartitionSpec:
        if name in TOKENS:
            return leading
        return PartitionSpec(*(n if axis == _N_AXES.get(name) else None for axis in range(arrays[name].ndim)))

    def gradient(name: str) -> GradientParts:
        # Gradients of tokens are sums over the parts of n, those of parameters over parts of the tokens. The bias of
        # down has no n: its gradient is the same on all devices that n is split over.
        over = summed if name in TOKENS else names
        return GradientParts(spec(name), over, typed_spec(arrays[name]))

    def on_part(part: ExpertsInputs) -> ExpertsInputs:
        if not summed:
            return part
        # A device adds its share of n; the bias of the result is added once.
        part = part.replace(is_partial=True)
        if part.down_bias is None:
            return part
        first = lax.axis_index(summed) == 0
        return part.replace(down_bias=jnp.where(first, part.down_bias, 0))

    def on_results(results: ExpertsResults) -> ExpertsResults:
        if summed:
            results = results._replace(out=lax.psum(results.out, summed).astype(inputs.out_dtype))
        if rows is None or results.routing.group_sizes is None:
            return results
        # Each device has sizes of its own, which are no part of one array.
        sizes = jnp.zeros_like(results.routing.group_sizes)
        return results._replace(routing=results.routing._replace(group_sizes=sizes))

    def on_backward(backward: Any, part: ExpertsInputs, results: ExpertsResults, cotangents: ExpertsResults) -> Any:
        if rows is not None:
            results = results._replace(routing=_with_sizes(results.routing, part.flat.experts, part.num_experts))
        return backward(on_part(part), results, cotangents)

    of_rows: Any = PartitionSpec(rows)
    whole: Any = PartitionSpec()
    routing = Routing(of_rows, of_rows, whole)
    results: Any = ExpertsResults(leading, PartitionSpec(rows, n), PartitionSpec(rows, n), routing)
    return Partitioning(
        mesh=mesh,
        inputs=inputs.replace(**{name: spec(name) for name in arrays}),
        results=results,
        gradients={name: gradient(name) for name in arrays},
        on_part=on_part,
        on_results=on_results,
        backward=on_backward,
        shared_with_xla=False,
    )


def _with_sizes(routing: Routing, experts: jax.Array, number: int) -> Routing:
    """The routing with the sizes of its experts, from the choices of its rows, which are sorted by expert."""
    row = jnp.arange(routing.source.size, dtype=jnp.int32)
    expert = of_rows(experts, routing.source, -1)
    is_first = expert != jnp.append(jnp.full(1, -1, jnp.int32), expert[:-1])
    is_last = expert != jnp.append(expert[1:], jnp.full(1, -1, jnp.int32))
    # Both −1 for an expert without rows. Not by a search, for which JAX has no rule where a part is lowered.
    first = scattered(row, jnp.where(is_first, expert, -1), number)
    end = scattered(row + 1, jnp.where(is_last, expert, -1), number)
    return routing._replace(group_sizes=end - first)


def _split_of_n(arrays: dict[str, Any], names: tuple[str, ...]) -> Any:
    """The mesh axes that split n, without those of the tokens: over these matrices are gathered."""
    described = ", ".join(f"{name}: {typed_spec(arrays[name])}" for name in arrays if name not in TOKENS)
    found: list[Any] = []
    for name, array in arrays.items():
        if name in TOKENS:
            continue
        for axis, axes in enumerate(typed_axes(array)):
            kept = tuple(each for each in axis_names(axes) if each not in names)
            if axis == _N_AXES.get(name):
                found.append(kept)
            elif kept:
                raise ValueError(
                    f"experts and d must be whole ({described}); reshard them first, or give axis_name inside shard_map"
                )
    split = {each for each in found if each}
    if len(split) > 1:
        raise ValueError(f"n must be split alike in all matrices ({described}); reshard one first")
    return next(iter(split), None)
