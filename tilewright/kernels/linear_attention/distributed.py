"""Linear attention over sequences whose tokens are split over devices, by calls of the op on each device's tokens."""

from typing import Any

import jax.numpy as jnp

from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs
from tilewright.kernels.op.portfolio import PortfolioKernel
from tilewright.kernels.op.sharding import AxisName
from tilewright.kernels.sequences import sequence_ids, without_padding
from tilewright.kernels.split_sequences import Recurrence, StateMaps, on_explicit_axes

_TOKENS = "bthx"


def split_attention(op: PortfolioKernel[Any, Any], inputs: LinearAttentionInputs, axis: AxisName, cfg: object) -> Any:
    """The results inside ``shard_map``; see ``context_parallel_linear_attention``."""
    return Recurrence(op, state_maps, axis, cfg).run(inputs)


def attention_on_explicit_axes(op: PortfolioKernel[Any, Any], inputs: LinearAttentionInputs, cfg: object) -> Any:
    """The results of a call whose types split its tokens over explicit axes."""
    states = "bhxx" if inputs.cum_seqlens is None else "nhxx"
    layouts = dict.fromkeys(("query", "key", "value", "removal_read", "removal_write"), _TOKENS) | {
        "log_decay": "h" if inputs.gate == "head" else "bth" if inputs.gate == "token" else _TOKENS,
        "beta": "bth",
        "bonus": "hx",
        "initial_state": states,
        "cum_seqlens": "n",
        "seq_lengths": "b",
    }

    def on_device(part: LinearAttentionInputs, axis: AxisName) -> Any:
        return split_attention(op, part, axis, cfg)

    results = (_TOKENS, states) if inputs.return_state else (_TOKENS,)
    return on_explicit_axes(on_device, inputs, layouts, results, whole="xn")


def state_maps(op: PortfolioKernel[Any, Any], inputs: LinearAttentionInputs, cfg: object) -> StateMaps:
    """The maps of the states before all tokens, beside what these add."""
    if inputs.beta is not None or inputs.removal is not None:
        # The columns of the identity are states like any others, to which values of zero add nothing.
        flows, heads, key_dim, _ = inputs.state_shape
        unit = jnp.broadcast_to(jnp.eye(key_dim, dtype=inputs.state_dtype), (flows, heads, key_dim, key_dim))
        value = jnp.zeros((*inputs.value.shape[:3], key_dim), inputs.value.dtype)
        return StateMaps(matrix=op(inputs.replace(value=value, initial_state=unit), cfg=cfg)[1])
    decay = inputs.log_decay
    if decay is None:
        return StateMaps()
    # Finite, since a product with 0 tokens must be 0.
    decay = jnp.maximum(decay.astype(inputs.state_dtype), jnp.finfo(inputs.state_dtype).min)
    lengths = inputs.seq_lengths
    if inputs.gate == "head":
        tokens = jnp.full(inputs.batch, inputs.length, jnp.int32) if lengths is None else lengths
        return StateMaps(factors=jnp.exp(decay * tokens[:, None].astype(decay.dtype))[..., None, None])
    ids = sequence_ids(inputs.batch, inputs.length, cum_seqlens=inputs.cum_seqlens, seq_lengths=lengths)
    total = jnp.exp(jnp.sum(without_padding(decay, ids), axis=1))
    return StateMaps(factors=total[..., None] if inputs.gate == "channel" else total[..., None, None])
