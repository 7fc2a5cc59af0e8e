"""The split of vocabulary losses over explicit mesh axes: by tokens, with the matrix whole on every device."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax import lax
from jax.sharding import PartitionSpec

from tilewright.kernels.linear_cross_entropy.inputs import LossInputs, LossResults
from tilewright.kernels.linear_cross_entropy.kl_inputs import KlInputs, KlResults
from tilewright.kernels.op.sharding import (
    GradientParts,
    Partitioning,
    axis_names,
    explicit_mesh,
    typed_axes,
    typed_spec,
)


def arrays_of(inputs: LossInputs | KlInputs) -> dict[str, Any]:
    """The arrays that a call has, by name."""
    return {name: array for name, array in inputs.arrays.items() if array is not None}


def token_axes(arrays: dict[str, Any], tokens: int) -> tuple[list[Any], tuple[str, ...]]:
    """The mesh axes of every dimension of the tokens, and all their names.

    Raises:
      ValueError: a dimension is split in two ways, or d is.
    """
    described = ", ".join(f"{name}: {typed_spec(array)}" for name, array in arrays.items())
    split: list[Any] = [None] * tokens
    for name, array in arrays.items():
        axes = typed_axes(array)
        if any(axes[tokens:]):
            raise ValueError(f"{name} must be whole along d ({described}); reshard it first")
        for position, each in enumerate(axes[:tokens]):
            if None not in (each, split[position]) and each != split[position]:
                raise ValueError(f"tokens must be split alike in all arrays ({described}); reshard {name} first")
            split[position] = split[position] or each
    return split, tuple(name for axes in split for name in axis_names(axes))


def split_by_tokens(
    inputs: LossInputs | KlInputs, statistics: Callable[[PartitionSpec], LossResults | KlResults]
) -> Partitioning | None:
    """The partitioning that the types of the arrays imply; ``None`` without explicit axes.

    A matrix that is split is gathered, and its gradient is split again.

    Args:
      statistics: results with the spec of an array by tokens for each statistic.

    Raises:
      ValueError: tokens are split in two ways, or d is.
    """
    arrays = arrays_of(inputs)
    mesh = explicit_mesh(*arrays.values())
    if mesh is None:
        return None
    by_token = {name: array for name, array in arrays.items() if name not in inputs.vocab_axes}
    split, names = token_axes(by_token, len(inputs.token_shape))
    tokens, whole = PartitionSpec(*split), PartitionSpec()
    specs = {name: tokens if name in by_token else whole for name in arrays}
    scalar = inputs.summary == "scalar"
    of_total = None if inputs.summary == "statistics" else whole if scalar else tokens

    def on_results(results: LossResults | KlResults) -> LossResults | KlResults:
        if not scalar or not names:
            return results
        # The backward pass scales with the sum of all weights, so both are residuals of the whole call.
        total, count = lax.psum((results.total, results.count), names)
        return dataclasses.replace(results, total=total, count=count)

    return Partitioning(
        mesh=mesh,
        inputs=inputs.replace(**specs),
        results=dataclasses.replace(statistics(tokens), total=of_total, count=whole if scalar else None),
        gradients={
            name: GradientParts(specs[name], () if name in by_token else names, typed_spec(array))
            for name, array in arrays.items()
        },
        on_results=on_results,
        shared_with_xla=False,
    )
