"""The results of all backends of attention over a cache, and ``vmap`` for kernels without a rule of their own."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tilewright.kernels.numerics.softmax import accumulation_dtype, sinks_statistics
from tilewright.kernels.paged_attention.inputs import PagedInputs

type Results = tuple[Float[Array, "tokens heads value_dim"], Float[Array, "tokens heads"]]

PAGES: Mapping[str, Any] = {
    "": Array,
    "value_pages": tuple[Array, Array],
    "key_scale": tuple[Array, Array],
    "value_pages key_scale value_scale": tuple[Array, Array, Array, Array],
}
"""The new pages and their scales, by the arrays that exist: see ``signatures.results``.

They are plain tuples, for a loop of JAX must carry what it was given.
"""

WITH_PAGES: Mapping[str, Any] = {
    "": tuple[Array, Array, Array],
    "return_lse": tuple[Array, Array, Array, Array],
    "key_scale value_scale": tuple[Array, Array, Array, Array, Array],
    "return_lse key_scale value_scale": tuple[Array, Array, Array, Array, Array, Array],
}
"""The output, with the log-sum-exp if asked for, then new pages of keys and of values, and their scales."""


def sinks_of(inputs: PagedInputs) -> tuple[jax.Array, jax.Array]:
    """The maximum and the sum of exponentials of each head's sinks; −inf and 0 without any."""
    dtype = accumulation_dtype(inputs.query.dtype)
    heads = inputs.query.shape[1]
    if inputs.softmax_aux is None:
        return jnp.full(heads, -jnp.inf, dtype), jnp.zeros(heads, dtype)
    return sinks_statistics(inputs.softmax_aux.astype(dtype))


def empty_forward(inputs: PagedInputs) -> Results:
    """The results of fully masked queries."""
    tokens, heads, _ = inputs.query.shape
    maximum, total = sinks_of(inputs)
    lse = jnp.broadcast_to((maximum + jnp.log(total)).reshape(heads), (tokens, heads))
    return jnp.zeros((tokens, heads, inputs.value_dim), inputs.query.dtype), lse


def run_with_sequential_vmap(run: Callable[[PagedInputs], Results], inputs: PagedInputs) -> Results:
    """Runs ``run(inputs)`` by a kernel without a rule for ``vmap``: mapped calls run sequentially."""
    leaves, tree = jax.tree.flatten(inputs)

    @jax.custom_batching.sequential_vmap
    def each(*leaves: jax.Array) -> Results:
        return run(jax.tree.unflatten(tree, leaves))

    return each(*leaves)
