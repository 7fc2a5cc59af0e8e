"""Pools of states by slot, which a decoding step reads and updates in place."""

from typing import Any

import jax
import jax.numpy as jnp

from tilewright.kernels.op.arguments import integer_array


def slot_arrays(
    rows: int, slots: int, state_indices: object, write_indices: object
) -> tuple[jax.Array | None, jax.Array | None]:
    """Checks the slots of the rows of a step and returns them as int32.

    Args:
      rows: the rows of the step, each of another sequence.
      slots: the states that the pool holds.
      state_indices: ``[rows]``: the slot of each row's state; a row whose slot does not exist, such as −1, is padding,
        of which the result is 0 and nothing is written. None if row i has slot i.
      write_indices: ``[rows]``: the slot that the new state is written to, by default the one that was read; where it
        does not exist nothing is written.
    """
    if state_indices is None:
        if rows != slots:
            raise ValueError(
                f"without state_indices row i has slot i, and the pool must have {rows=} slots, got {slots}"
            )
    else:
        state_indices = integer_array("state_indices", state_indices, (rows,), False)
    if write_indices is not None:
        write_indices = integer_array("write_indices", write_indices, (rows,), False)
    return state_indices, write_indices


def exists(indices: jax.Array, slots: int) -> jax.Array:
    """True for the slots that the pool has."""
    return (indices >= 0) & (indices < slots)


def read_states(pool: jax.Array, indices: jax.Array | None) -> jax.Array:
    """The states of the rows, ``[rows, ...]``; any for a row without a slot."""
    return pool if indices is None else jnp.take(pool, indices, axis=0, mode="clip")


def slots_to_write(state_indices: jax.Array | None, write_indices: jax.Array | None, slots: int) -> jax.Array | None:
    """The slot of each row's new state: −1 for a row without a state to read, None if row i has slot i."""
    found = state_indices if write_indices is None else write_indices
    if state_indices is None or found is None:
        return found
    return jnp.where(exists(state_indices, slots), found, -1)


def write_states(pool: jax.Array, indices: jax.Array | None, states: jax.Array) -> Any:
    """The pool with new states; rows without a slot are dropped, and of two with the same slot one stays."""
    states = states.astype(pool.dtype)
    if indices is None:
        return states
    # Negative indices would count from the end.
    return pool.at[jnp.where(exists(indices, pool.shape[0]), indices, pool.shape[0])].set(states, mode="drop")
