"""The split of vocabulary losses over explicit mesh axes: by tokens, with the matrix whole on every device."""

import dataclasses
from typing import Any

from jax import lax
from jax.sharding import PartitionSpec

from tilewright.kernels.linear_cross_entropy.inputs import LossInputs, LossResults
from tilewright.kernels.op.sharding import (
    GradientParts,
    Partitioning,
    axis_names,
    explicit_mesh,
    typed_axes,
    typed_spec,
)


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


def loss_partitioning(inputs: LossInputs) -> Partitioning | None:
    """The partitioning that the types of the arrays imply; ``None`` without explicit axes.

    A matrix that is split is gathered, and its gradient is split again.

    Raises:
      ValueError: tokens are split in two ways, or d is.
    """
    given: dict[str, Any] = {
        "x": inputs.x, "weight": inputs.weight, "labels": inputs.labels, "bias": inputs.bias,
        "token_weights": inputs.token_weights,
    }  # fmt: skip
    arrays: dict[str, Any] = {name: array for name, array in given.items() if array is not None}
    mesh = explicit_mesh(*arrays.values())
    if mesh is None:
        return None
    by_token: dict[str, Any] = {name: arrays[name] for name in ("x", "labels", "token_weights") if name in arrays}
    split, names = token_axes(by_token, inputs.labels.ndim)
    tokens, whole = PartitionSpec(*split), PartitionSpec()
    specs = {name: tokens if name in by_token else whole for name in arrays}
    options = inputs.options
    scalar = options.summary == "scalar"
    structure: Any = inputs

    def on_results(results: LossResults) -> LossResults:
        if not scalar or not names:
            return results
        # The backward pass scales with the sum of all weights, so both are residuals of the whole call.
        total, count = lax.psum((results.total, results.count), names)
        return dataclasses.replace(results, total=total, count=count)

    return Partitioning(
        mesh=mesh,
        inputs=dataclasses.replace(structure, **specs),
        results=LossResults(
            lse=tokens,
            label_logit=tokens,
            logit_sum=tokens if options.needs_sum else None,
            total=None if options.summary == "statistics" else whole if scalar else tokens,
            count=whole if scalar else None,
        ),
        gradients={
            name: GradientParts(specs[name], () if name in by_token else names, typed_spec(array))
            for name, array in arrays.items()
        },
        on_results=on_results,
        shared_with_xla=False,
    )
