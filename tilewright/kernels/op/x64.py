"""Implementations under ``jax_enable_x64``."""

import contextlib
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
import numpy as np


def without_x64(*operands: object) -> AbstractContextManager[None]:
    """A context without ``jax_enable_x64``, unless an operand has a 64-bit dtype.

    With x64, indices become int64, which GPU kernels cannot lower and which are slower elsewhere. In this context an
    implementation is the same program whether x64 is enabled or not.
    """
    dtypes = (leaf.dtype for leaf in jax.tree.leaves(operands) if isinstance(leaf, jax.Array | np.ndarray))
    # Only numbers count: PRNG keys have extended dtypes, which are no numbers.
    has_64_bits = any(jnp.issubdtype(dtype, np.number) and dtype.itemsize >= 8 for dtype in dtypes)
    return contextlib.nullcontext() if has_64_bits else jax.enable_x64(False)
