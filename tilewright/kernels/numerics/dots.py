"""Matmuls in plain XLA with defined dtypes, and the dtypes of their results and sums, for all ops that multiply."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from tilewright.kernels.op.arguments import is_floating
from tilewright.ops.utils.device import current_device


def accumulator(*dtypes: Any) -> np.dtype:
    """The dtype in which products of the dtypes are summed: float32, or float64 if one of them is float64."""
    wide = any(jnp.dtype(dtype).itemsize == 8 for dtype in dtypes)
    return np.dtype(np.float64 if wide else np.float32)


def dot(
    lhs: Array, rhs: Array, contracting: tuple[int | Sequence[int], int | Sequence[int]], precision: Any, dtype: Any
) -> Array:
    """The sum over axes of either operand, of products in the wider of their dtypes, summed in ``dtype``."""
    # Numbers of 8 bits are exact in bfloat16, which accelerators multiply. XLA for CPUs fails where it moves a
    # transpose of them behind the conversion (jaxlib 0.12.0: "Unsupported element type for DotThunk").
    multiplied = jnp.float32 if current_device().kind == "cpu" else jnp.bfloat16
    lhs, rhs = (x.astype(multiplied) if x.dtype.itemsize == 1 else x for x in (lhs, rhs))
    wide = jnp.promote_types(lhs.dtype, rhs.dtype)
    axes = [(each,) if isinstance(each, int) else tuple(each) for each in contracting]
    return lax.dot_general(lhs.astype(wide), rhs.astype(wide), ((axes[0], axes[1]), ((), ())), precision, dtype)


def result_dtype(preferred: Any, *dtypes: Any) -> np.dtype:
    """The dtype of a result: the preferred one, or that of the operands."""
    if preferred is not None:
        dtype = jnp.dtype(preferred)
        if not is_floating(dtype):
            raise ValueError(f"preferred_element_type must be floating-point, got {preferred!r}")
        return dtype
    try:
        return jnp.dtype(functools.reduce(jnp.promote_types, dtypes))
    except ValueError:
        raise ValueError(f"operands of {' and '.join(map(str, dtypes))} need a preferred_element_type") from None
