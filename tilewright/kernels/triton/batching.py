"""The rule of ``vmap`` for launches: a mapped axis multiplies the batch that arrays have as their first axis."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def over_batch(run: Callable[[Any, Any], Any], mapped: Sequence[jax.Array | None], shared: Any) -> Any:
    """Returns ``run(mapped, shared)``, all of whose arrays have a batch as their first axis; ``vmap`` multiplies it.

    Args:
      mapped: arrays with an element for each of the batch; the first one is not None.
      shared: arrays with one element for the whole batch, which no ``vmap`` repeats, or all as many as ``mapped``.
    """

    @jax.custom_batching.custom_vmap
    def call(mapped: Any, shared: Any) -> Any:
        return run(mapped, shared)

    @call.def_vmap
    def _(size: int, batched: Any, mapped: Any, shared: Any) -> tuple[Any, Any]:
        batch = mapped[0].shape[1 if batched[0][0] else 0]

        def merged(array: jax.Array, is_batched: bool) -> jax.Array:
            array = array if is_batched else array[None]
            return jnp.broadcast_to(array, (size, batch, *array.shape[2:])).reshape(size * batch, *array.shape[2:])

        together = jax.tree.map(merged, mapped, batched[0])
        # All or none: kernels have one stride between elements of the batch for all of these.
        if any(jax.tree.leaves(batched[1])) or any(x.shape[0] > 1 for x in jax.tree.leaves(shared)):
            shared = jax.tree.map(merged, shared, batched[1])
        # Through `over_batch` again, for a vmap around this one.
        results = over_batch(run, together, shared)
        results = jax.tree.map(lambda x: x.reshape(size, batch, *x.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    return call(list(mapped), shared)
