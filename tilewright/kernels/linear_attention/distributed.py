"""Linear attention over sequences whose tokens are split over devices, by calls of the op on each device's tokens."""

from typing import Any

import jax
import jax.numpy as jnp

from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs
from tilewright.kernels.linear_attention.partitioning import TOKENS, layouts_of
from tilewright.kernels.op.portfolio import PortfolioKernel
from tilewright.kernels.op.sharding import AxisName
from tilewright.kernels.sequences import sequence_ids, without_padding
from tilewright.kernels.split_sequences import Recurrence, StateMaps, on_explicit_axes


def split_attention(op: PortfolioKernel[Any, Any], inputs: LinearAttentionInputs, axis: AxisName, cfg: object) -> Any:
    """The results inside ``shard_map``; see ``context_parallel_linear_attention``."""
    return Recurrence(op, state_maps, axis, cfg).run(inputs)


def attention_on_explicit_axes(op: PortfolioKernel[Any, Any], inputs: LinearAttentionInputs, cfg: object) -> Any:
    """The results of a call whose types split its tokens over explicit axes."""
    layouts = layouts_of(inputs)

    def on_device(part: LinearAttentionInputs, axis: AxisName) -> Any:
        return split_attention(op, part, axis, cfg)

    results = (TOKENS, layouts["initial_state"]) if inputs.return_state else (TOKENS,)
    return on_explicit_axes(on_device, inputs, layouts, results, {"b": "batch", "t": "tokens", "h": "heads"})


def state_maps(
    op: PortfolioKernel[Any, Any], inputs: LinearAttentionInputs, cfg: object
) -> tuple[StateMaps, jax.Array]:
    """The maps of the states before all tokens, and what these make of zeros."""
    added = op(inputs.replace(only_maps=True), cfg=cfg)
    if inputs.has_matrix:
        added, matrix = jnp.split(added, [inputs.value_dim], axis=-1)
        return StateMaps(matrix=matrix), added
    return StateMaps(factors=_factors(inputs)), added


def _factors(inputs: LinearAttentionInputs) -> jax.Array | None:
    """The products of all decays, by which tokens multiply the states before them."""
    decay = inputs.log_decay
    if decay is None:
        return None
    # Finite, since a product with 0 tokens must be 0.
    decay = jnp.maximum(decay.astype(inputs.state_dtype), jnp.finfo(inputs.state_dtype).min)
    lengths = inputs.seq_lengths
    if inputs.gate == "head":
        tokens = jnp.full(inputs.batch, inputs.length, jnp.int32) if lengths is None else lengths
        return jnp.exp(decay * tokens[:, None].astype(decay.dtype))[..., None, None]
    ids = sequence_ids(inputs.batch, inputs.length, cum_seqlens=inputs.cum_seqlens, seq_lengths=lengths)
    total = jnp.exp(jnp.sum(without_padding(decay, ids), axis=1))
    return total[..., None] if inputs.gate == "channel" else total[..., None, None]
