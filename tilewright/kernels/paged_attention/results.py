"""The results of all backends of attention over a cache, and ``vmap`` for kernels without a rule of their own."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tilewright.kernels.numerics.softmax import accumulation_dtype, sinks_statistics
from tilewright.kernels.paged_attention.inputs import PagedInputs

type Results = tuple[Float[Array, "tokens heads value_dim"], Float[Array, "tokens heads"]]


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
