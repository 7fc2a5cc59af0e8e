"""What several backends do to their operands before a kernel gets them: turn a scale, widen heads, fold ``vmap``."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from tilewright.kernels.flash_attention.inputs import AttentionInputs


def with_positive_scale(inputs: AttentionInputs) -> AttentionInputs:
    """The same logits without a negative scale: some kernels look for the greatest product before they scale it."""
    scale = inputs.options.softmax_scale
    if scale >= 0:
        return inputs
    return dataclasses.replace(
        inputs, query=-inputs.query, options=dataclasses.replace(inputs.options, softmax_scale=-scale)
    )


def widened(array: Any, dim: int) -> Any:
    """With zeros up to ``dim`` at the end of the last axis."""
    if array.shape[-1] == dim:
        return array
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, dim - array.shape[-1])])


def into_batch(array: Any, is_mapped: bool, size: int, batch: int) -> Any:
    """``[size * batch, ...]`` of an array whose first dimension is ``batch`` or 1, behind a mapped axis or without."""
    array = array if is_mapped else array[None]
    own = array.shape[2:]
    return jnp.broadcast_to(array, (size, batch, *own)).reshape(size * batch, *own)


def over_batch(
    call: Callable[[dict[str, Any]], tuple[Any, ...]], batch: int, arrays: dict[str, Any], shared: frozenset[str]
) -> tuple[Any, ...]:
    """``call(arrays)``, to which ``vmap`` gives a mapped axis as a part of the batch.

    Args:
      arrays: by name; the first dimension of each is ``batch``, or 1.
      shared: names of those that stay as they are where they have only one and are not mapped.
    """

    @custom_vmap
    def launch(arrays: dict[str, Any]) -> tuple[Any, ...]:
        return call(arrays)

    @launch.def_vmap
    def _(size: int, mapped: Sequence[dict[str, bool]], arrays: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        folded = {
            name: array
            if name in shared and not mapped[0][name] and array.shape[0] == 1
            else into_batch(array, mapped[0][name], size, batch)
            for name, array in arrays.items()
        }
        results = over_batch(call, size * batch, folded, shared)
        return tuple(x.reshape(size, batch, *x.shape[1:]) for x in results), (True,) * len(results)

    return launch(arrays)


def by_row(rows: Any) -> Any:
    """``[batch, heads, length]`` as it goes with ``[batch, length, heads, head_dim]``."""
    return rows.transpose(0, 2, 1)[..., None]


def least_lengths(lengths: Sequence[Any], batch: int, length: int) -> Any:
    """int32 ``[batch]``: the least of several lengths, none of them negative or beyond ``length``."""
    given = [jnp.clip(each, 0, length).astype(jnp.int32) for each in lengths if each is not None]
    return functools.reduce(jnp.minimum, given, jnp.full((batch,), length, jnp.int32))
