"""The oracle of the selective scan: the recurrence, token by token."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.selective_scan.inputs import SelectiveScanInputs, SelectiveScanStepInputs
from tilewright.kernels.sequences import PADDING, begins
from tilewright.kernels.state_pools import exists, read_states, slots_to_write, write_states


def scan_reference(inputs: SelectiveScanInputs) -> tuple[Any, Any]:
    """``(out, state)`` in float32, or float64 if u is; nothing is rounded."""
    batch, length, channels = inputs.u.shape
    dtype = inputs.dtype
    ids = inputs.ids()
    if ids is None:
        ids = jnp.zeros((batch, length), jnp.int32)
    resets = jnp.zeros_like(ids, bool).at[:, :1].set(True) if inputs.segment_ids is None else begins(ids)
    if inputs.cum_seqlens is not None:
        resets = begins(ids)
    initial = inputs.initial_state
    if initial is None:
        initial = jnp.zeros((inputs.sequences, channels, inputs.state), dtype)
    own = jnp.arange(batch, dtype=jnp.int32)  # the state of each row, unless a row is packed

    def step(carry: tuple[jax.Array, jax.Array], token: tuple[jax.Array, ...]) -> Any:
        (u, delta, b, c, z), seq, reset = token
        states, h = carry
        row = own if inputs.cum_seqlens is None else jnp.maximum(seq, 0)
        start = jnp.zeros_like(h) if inputs.segment_ids is not None else states[row]
        before = jnp.where(reset[:, None, None], start, h)
        y, after = _token(inputs, before, u, delta, b, c, z)
        is_token = seq != PADDING
        h = jnp.where(is_token[:, None, None], after, h)
        if inputs.segment_ids is None:
            states = states.at[row].set(jnp.where(is_token[:, None, None], after, states[row]))
        return (states, h), jnp.where(is_token[:, None], y, 0)

    # One more, for a row without sequences. A packed row reads the state of a sequence where it begins, and has written
    # it when it ends.
    tokens = (inputs.u, inputs.delta, inputs.B, inputs.C, inputs.z)
    by_token = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (tokens, ids, resets))
    first = (
        jnp.pad(initial.astype(dtype), ((0, 1), (0, 0), (0, 0))),
        jnp.zeros((batch, channels, inputs.state), dtype),
    )
    (states, _), out = lax.scan(step, first, by_token)
    return jnp.moveaxis(out, 0, 1), states[:-1]


def step_reference(inputs: SelectiveScanStepInputs) -> tuple[Any, Any]:
    """``(out, pool)``, out in float32 or float64, the pool in its dtype."""
    before = read_states(inputs.state_pool, inputs.state_indices).astype(inputs.dtype)
    y, after = _token(inputs, before, inputs.u, inputs.delta, inputs.B, inputs.C, inputs.z)
    slots = inputs.state_pool.shape[0]
    if inputs.state_indices is not None:
        y = jnp.where(exists(inputs.state_indices, slots)[:, None], y, 0)
    write = slots_to_write(inputs.state_indices, inputs.write_indices, slots)
    return y, write_states(inputs.state_pool, write, after)


def _token(
    inputs: SelectiveScanInputs | SelectiveScanStepInputs,
    before: jax.Array,
    u: jax.Array,
    delta: jax.Array,
    b: jax.Array,
    c: jax.Array,
    z: jax.Array | None,
) -> tuple[Any, Any]:
    """The output and the state after one token of each row, ``[rows, channels]`` and ``[rows, channels, state]``."""
    dtype = inputs.dtype
    u, delta, b, c = (x.astype(dtype) for x in (u, delta, b, c))
    if inputs.delta_bias is not None:
        delta = delta + inputs.delta_bias.astype(dtype)
    if inputs.delta_softplus:
        delta = jax.nn.softplus(delta)
    if inputs.groups > 1:
        b, c = (jnp.repeat(x, inputs.channels // inputs.groups, axis=1) for x in (b, c))
    after = jnp.exp(delta[..., None] * inputs.A.astype(dtype)) * before + (delta * u)[..., None] * b
    y = jnp.sum(after * c, axis=-1)
    if inputs.D is not None:
        y = y + inputs.D.astype(dtype) * u
    return y if z is None else y * jax.nn.silu(z.astype(dtype)), after
