"""Calls over several devices: tokens split over explicit axes, and a vocabulary that is split over a mesh axis.

With tokens split the matrix is whole on every device. With the vocabulary split, inside ``shard_map`` or by the types
of the matrices, there is one gather of the statistics of each token forward. The gradient of x is a sum over the
devices; that of a device's part of the matrix is complete.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from tilewright.kernels.linear_cross_entropy.inputs import IGNORED, LossResults, VocabularyInputs
from tilewright.kernels.numerics.softmax import accumulation_dtype
from tilewright.kernels.op.sharding import (
    AxisName,
    GradientParts,
    Partitioning,
    axis_names,
    common_axes,
    explicit_mesh,
    over_explicit_axes,
    typed_axes,
    typed_spec,
    vary_over,
    varying_axes,
)


def _token_axes(inputs: VocabularyInputs, arrays: dict[str, Any]) -> tuple[PartitionSpec, tuple[str, ...]]:
    """The mesh axes of every dimension of the tokens, and all their names.

    Raises:
      ValueError: a dimension is split in two ways, or d is.
    """
    by_token = {name: array for name, array in arrays.items() if name not in inputs.vocab_axes}
    split = common_axes(by_token, dict.fromkeys(by_token, len(inputs.token_shape)), whats="tokens", core="d")
    return PartitionSpec(*split), tuple(name for axes in split for name in axis_names(axes))


def split_by_tokens(inputs: VocabularyInputs) -> Partitioning | None:
    """The partitioning that the types of the arrays imply; ``None`` without explicit axes.

    A matrix that is split is gathered, and its gradient is split again.

    Raises:
      ValueError: tokens are split in two ways, or d is.
    """
    arrays = {name: array for name, array in inputs.arrays.items() if array is not None}
    mesh = explicit_mesh(*arrays.values())
    if mesh is None:
        return None
    tokens, names = _token_axes(inputs, arrays)
    whole = PartitionSpec()
    specs = {name: whole if name in inputs.vocab_axes else tokens for name in arrays}
    scalar = inputs.summary == "scalar"
    of_total = None if inputs.summary == "statistics" else whole if scalar else tokens

    def on_results(results: LossResults) -> LossResults:
        if not scalar or not names:
            return results
        # The backward pass scales with the sum of all weights, so both are residuals of the whole call.
        total, count = lax.psum((results.total, results.count), names)
        return dataclasses.replace(results, total=total, count=count)

    return Partitioning(
        mesh=mesh,
        inputs=inputs.replace(**specs),
        results=LossResults(
            (tokens, tokens, tokens if inputs.needs_sum else None), of_total, whole if scalar else None
        ),
        gradients={
            name: GradientParts(specs[name], names if name in inputs.vocab_axes else (), typed_spec(array))
            for name, array in arrays.items()
        },
        on_results=on_results,
        shared_with_xla=False,
    )


def by_typed_vocabulary(inputs: VocabularyInputs, of_parts: Callable[..., Any]) -> Callable[[], Any] | None:
    """A call by the devices' parts of a vocabulary that the types of arrays split, and maybe of the tokens.

    None if the vocabulary is whole, or split over the axes of the tokens, so that it is gathered.

    Args:
      of_parts: computes the call inside ``shard_map``, from a part of the inputs and the names of the axes that split
        the vocabulary and the tokens.

    Raises:
      ValueError: tokens are split in two ways, or d is.
    """
    arrays = {name: array for name, array in inputs.arrays.items() if array is not None}
    axes = {name: axis for name, axis in inputs.vocab_axes.items() if name in arrays}
    split = [names for name, axis in axes.items() if (names := axis_names(typed_axes(arrays[name])[axis]))]
    if not split:
        return None
    tokens, token_names = _token_axes(inputs, arrays)
    # An axis that splits the tokens gives each device other tokens, which need the whole vocabulary.
    vocab = tuple(name for name in split[0] if name not in token_names)
    mesh = explicit_mesh(*(arrays[name] for name in axes))
    if mesh is None or not vocab:
        return None

    def spec(name: str, rank: int) -> PartitionSpec:
        return PartitionSpec(*(vocab if at == axes[name] else None for at in range(rank))) if name in axes else tokens

    specs = {name: spec(name, array.ndim) for name, array in arrays.items()}
    of_loss = tokens if inputs.reduction == "none" else PartitionSpec()
    out = (of_loss, tokens) if inputs.return_lse else of_loss
    return lambda: over_explicit_axes(
        lambda parts: of_parts(inputs.replace(**parts), vocab, token_names), mesh, arrays, specs, out
    )


def splits_vocabulary(vocab_first: object, *matrices: object) -> bool:
    """True if the type of a matrix splits the vocabulary: of nearly every call this is all that is read."""
    axis, known = 0 if vocab_first else 1, [x for x in matrices if isinstance(x, jax.Array) and x.ndim == 2]
    return len(known) == len(matrices) and any(typed_axes(x)[axis] is not None for x in known)


def of_all_devices(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """An operand that is the same along an axis; its gradient is summed over the devices in float32 or wider."""
    axes = varying_axes(lax.axis_index(axis_name)) - varying_axes(x)
    # Without checked types the transpose of ``shard_map`` sums, in the operand's dtype.
    return _of_all_devices(x, axes) if axes else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _of_all_devices(x: jax.Array, axes: frozenset[str]) -> Any:
    return vary_over(axes, x)


def _of_all_devices_backward(axes: frozenset[str], _: None, gradient: jax.Array) -> tuple[jax.Array]:
    wide = gradient.astype(accumulation_dtype(gradient.dtype))
    return (lax.psum(wide, tuple(sorted(axes))).astype(gradient.dtype),)


_of_all_devices.defvjp(lambda x, axes: (_of_all_devices(x, axes), None), _of_all_devices_backward)


def local_labels(labels: jax.Array, part: int, axis_name: AxisName) -> jax.Array:
    """Labels in a device's part of the vocabulary; labels of other parts are not ignored.

    Args:
      labels: canonical, with ``IGNORED``, of the whole vocabulary.
      part: classes of each device.
    """
    # A label of another part is past the classes of this one: its logit comes from the device that has it.
    own = labels - lax.axis_index(axis_name).astype(jnp.int32) * part
    inside = (own >= 0) & (own < part)
    return jnp.where(labels == IGNORED, IGNORED, jnp.where(inside, own, part))
