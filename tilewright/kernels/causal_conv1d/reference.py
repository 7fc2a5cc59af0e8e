"""The oracle: every output from the inputs that its window names, by gathering them."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.causal_conv1d.inputs import ConvInputs, ConvResults, StepInputs, final_state
from tilewright.kernels.sequences import PADDING, begins, without_padding
from tilewright.kernels.state_pools import exists, read_states, slots_to_write, write_states


def activated(x: jax.Array, activation: str | None) -> Any:
    return x if activation is None else jax.nn.silu(x)


def conv_reference(inputs: ConvInputs, compute_dtype: DTypeLike | None = None) -> ConvResults:
    """The results with ``out`` in ``compute_dtype``, float32 by default and float64 if x is; nothing is rounded."""
    dtype = jnp.dtype(compute_dtype or inputs.compute_dtype)
    batch, length, _ = inputs.x.shape
    width = inputs.width
    state = final_state(inputs) if inputs.return_state else None
    if 0 in inputs.x.shape:
        return ConvResults(inputs.x.astype(dtype), state)
    ids = inputs.ids()
    ids = jnp.zeros((batch, length), jnp.int32) if ids is None else ids
    x = without_padding(inputs.x, ids).astype(dtype)
    time = jnp.arange(length, dtype=jnp.int32)
    begin = lax.cummax(jnp.where(begins(ids), time, 0), axis=1)
    tap = jnp.arange(width, dtype=jnp.int32)
    position = time[:, None] - (width - 1) + tap + 0 * begin[..., None]
    window = jnp.take_along_axis(x[:, :, None], jnp.maximum(position, 0)[..., None], axis=1, mode="clip")
    inside = position >= begin[..., None]
    if inputs.initial_state is None or width == 1:
        window = jnp.where(inside[..., None], window, 0)
    else:
        row = jnp.arange(batch, dtype=jnp.int32)[:, None] if inputs.cum_seqlens is None else jnp.maximum(ids, 0)
        row = row + 0 * ids
        column = jnp.clip(position - begin[..., None] + width - 1, 0, width - 2)
        states = inputs.initial_state.astype(dtype).swapaxes(1, 2)
        window = jnp.where(inside[..., None], window, states.at[row[..., None], column].get(mode="clip"))
    out = jnp.einsum("btwd,dw->btd", window, inputs.weight.astype(dtype), precision="highest")
    if inputs.bias is not None:
        out = out + inputs.bias.astype(dtype)
    out = jnp.where((ids != PADDING)[..., None], activated(out, inputs.activation), 0)
    return ConvResults(out, state)


def step_reference(inputs: StepInputs) -> tuple[Any, Any]:
    """``(y, pool)``: y rounded to x's dtype, the states to that of the pool."""
    dtype, tokens, width = inputs.compute_dtype, inputs.x.shape[1], inputs.width
    states = read_states(inputs.conv_pool, inputs.state_indices)
    window = jnp.concatenate([states.astype(dtype), inputs.x.swapaxes(1, 2).astype(dtype)], axis=2)
    # [batch, channels, tokens], a sum over the columns of the window that each token ends.
    total: Any = sum(inputs.weight[:, j, None].astype(dtype) * window[:, :, j : j + tokens] for j in range(width))
    if inputs.bias is not None:
        total = total + inputs.bias[:, None].astype(dtype)
    y = activated(total, inputs.activation).swapaxes(1, 2).astype(inputs.x.dtype)
    slots = inputs.conv_pool.shape[0]
    if inputs.state_indices is not None:
        y = jnp.where(exists(inputs.state_indices, slots)[:, None, None], y, 0)
    write = slots_to_write(inputs.state_indices, inputs.write_indices, slots)
    return y, write_states(inputs.conv_pool, write, window[:, :, tokens:])
