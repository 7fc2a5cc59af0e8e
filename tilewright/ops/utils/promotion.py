"""Code of this package under JAX's own rules of promotion, whatever the program around it sets."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def default_promotion() -> Iterator[None]:
    """A context, and a decorator, in which ranks and dtypes are promoted as JAX does by default.

    ``jax_numpy_rank_promotion`` and ``jax_numpy_dtype_promotion`` are for a user's own code. JAX's trace caches know
    both, so that what is traced here is not taken for what a user's setting would refuse.
    """
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield
