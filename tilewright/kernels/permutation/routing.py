"""The order of the rows of a mixture of experts."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32


class Routing(NamedTuple):
    """The places of choices among rows that are sorted by expert, and by choice within an expert.

    Choice ``token · k + j`` is the j-th of its token. One is dropped, and has no row, if its expert does not exist or
    has as many choices before it as its capacity.

    Attributes:
      source: the choice that each row holds; −1 for rows behind those of the last expert.
      positions: the row of each choice; −1 for a dropped one.
      group_sizes: the number of rows of each expert.
    """

    source: Int32[Array, " choices"]
    positions: Int32[Array, "tokens k"]
    group_sizes: Int32[Array, " experts"]


def scattered(values: jax.Array, places: jax.Array, size: int) -> Int32[Array, " size"]:
    """An array of −1 with ``values`` at distinct ``places``; those with a place outside of it are left out."""
    index = jnp.arange(places.shape[0], dtype=jnp.int32)
    # Also places that do not exist are distinct, as is promised to XLA.
    places = jnp.where((places >= 0) & (places < size), places, size + index)
    return jnp.full(size, -1, jnp.int32).at[places].set(values, mode="drop", unique_indices=True)


def positions_of(source: Int32[Array, " choices"], k: int) -> Int32[Array, "tokens k"]:
    """The rows of choices, from the choices of rows."""
    choices = source.shape[0]
    return scattered(jnp.arange(choices, dtype=jnp.int32), source, choices).reshape(choices // k, k)


def exists(experts: jax.Array, num_experts: int) -> jax.Array:
    """True for choices of experts that there are."""
    return (experts >= 0) & (experts < num_experts)
