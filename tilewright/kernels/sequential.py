"""Calls of kernels that have no rule for ``vmap``: mapped ones run one after another."""

from collections.abc import Callable
from typing import cast

import jax


def run_with_sequential_vmap[T, R](run: Callable[[T], R], operands: T) -> R:
    """``run(operands)``, a pytree of arrays, by a kernel without a rule for ``vmap``."""
    leaves, tree = jax.tree.flatten(operands)

    @jax.custom_batching.sequential_vmap
    def each(*leaves: jax.Array) -> R:
        return run(jax.tree.unflatten(tree, leaves))

    return cast(R, each(*leaves))
