"""What several backends do to their operands before a kernel gets them: turn a scale, widen heads, fold ``vmap``."""

import dataclasses
from typing import Any

import jax.numpy as jnp

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
