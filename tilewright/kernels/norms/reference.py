"""The oracle: the norms by their definition, in ``jax.numpy``."""

from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from tilewright.kernels.norms.inputs import NormInputs


def norm_reference(inputs: NormInputs, compute_dtype: DTypeLike | None = None) -> tuple[Any, Any]:
    """``(out, total)`` in ``compute_dtype``: float32 by default, float64 if x is; differentiable, nothing is rounded.

    ``total`` is x without a residual.
    """
    dtype = jnp.dtype(compute_dtype or jnp.promote_types(inputs.x.dtype, jnp.float32))
    total = inputs.x.astype(dtype)
    if inputs.residual is not None:
        total = total + inputs.residual.astype(dtype)
    centered = total
    if inputs.kind == "layer":
        centered = total - jnp.mean(total, axis=-1, keepdims=True)
    variance = jnp.mean(centered * centered, axis=-1, keepdims=True)
    out = centered / jnp.sqrt(variance + jnp.asarray(inputs.eps, dtype))
    if inputs.weight is not None:
        out = out * (inputs.weight.astype(dtype) + jnp.asarray(inputs.weight_offset, dtype))
    if inputs.bias is not None:
        out = out + inputs.bias.astype(dtype)
    return out, total
