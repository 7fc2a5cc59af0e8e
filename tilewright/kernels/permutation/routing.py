"""The order of the rows of a mixture of experts."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped


class Routing(NamedTuple):
    """The places of choices among rows that are sorted by expert, and by choice within an expert.

    Choice ``token · k + j`` is the j-th of its token. One is dropped, and has no row, if its expert does not exist or
    has as many choices before it as its capacity.

    There are as many rows as choices, or fewer where a capacity leaves none for more.

    Attributes:
      source: the choice that each row holds; −1 for rows behind those of the last expert.
      positions: the row of each choice; −1 for a dropped one.
      group_sizes: the number of rows of each expert.
    """

    source: Int32[Array, " rows"]
    positions: Int32[Array, "tokens k"]
    group_sizes: Int32[Array, " experts"]


def declared(rows: int, tokens: int, k: int, num_experts: int) -> Any:
    """Shapes and dtypes of a routing."""
    shapes = (rows,), (tokens, k), (num_experts,)
    structs: Any = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    return Routing(*structs)


def of_rows(values: Shaped[Array, "tokens k"], source: Int32[Array, " rows"], nothing: int) -> jax.Array:
    """The values of the choices that rows hold, and ``nothing`` for rows that hold none."""
    return jnp.where(source >= 0, values.reshape(-1)[jnp.maximum(source, 0)], nothing)


def scattered(values: jax.Array, places: jax.Array, size: int) -> Int32[Array, " size"]:
    """An array of −1 with ``values`` at distinct ``places``; those with a place outside of it are left out."""
    index = jnp.arange(places.shape[0], dtype=jnp.int32)
    # Also places that do not exist are distinct, as is promised to XLA.
    places = jnp.where(exists(places, size), places, size + index)
    return jnp.full(size, -1, jnp.int32).at[places].set(values, mode="drop", unique_indices=True)


def positions_of(source: Int32[Array, " choices"], tokens: int, k: int) -> Int32[Array, "tokens k"]:
    """The rows of choices, from the choices of rows."""
    choices = source.shape[0]
    return scattered(jnp.arange(choices, dtype=jnp.int32), source, choices).reshape(tokens, k)


def exists(ids: jax.Array, count: int) -> jax.Array:
    """True for ids of what there is."""
    return (ids >= 0) & (ids < count)


def routing_of(source: Int32[Array, " choices"], tokens: int, k: int) -> Routing:
    """The routing of rows that hold these choices, without the sizes of experts; choices that do not exist are none."""
    source = jnp.where(exists(source, source.shape[0]), source, -1)
    return Routing(source, positions_of(source, tokens, k), jnp.zeros(0, jnp.int32))
