"""Arrays that a kernel updates in place, kept apart from the stacked arrays of a loop.

XLA makes one operation of a custom call, the slice of a stacked array that it reads, and the write of its result into
another (dynamic-slice fusion). That the call updates one of its operands is lost then, whichever is the slice: the
result has another buffer, of which only what the kernel writes is defined. Behind a barrier a call is no part of such
an operation; slices are copied instead, and nothing where there are none.
"""

from typing import Any

import jax


def apart[T](arrays: T) -> T:
    """The same arrays, as all operands or all results of a call that updates some of them in place."""
    return jax.lax.optimization_barrier(arrays)


def frozen(ref: Any) -> jax.Array:
    """The array of a reference that kernels have written, which is no reference any more."""
    return apart(jax.freeze(ref))
