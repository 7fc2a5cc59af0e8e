"""The strategies in which one call sees whole sequences: gathered keys and values, or some of the heads."""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.flash_attention.distributed.call import ContextCall, MaskArrays, mask_of, order_matters
from tilewright.kernels.flash_attention.distributed.layout import Layout
from tilewright.kernels.flash_attention.distributed.ring import AttentionKernel, Keys
from tilewright.kernels.numerics.softmax import accumulation_dtype
from tilewright.kernels.op.sharding import AxisName

type Results = tuple[jax.Array, jax.Array]


def gathered_attention(
    kernel: AttentionKernel,
    call: ContextCall,
    query: jax.Array,
    keys: Keys,
    sinks: jax.Array | None,
    arrays: MaskArrays,
) -> Results:
    """``(out, lse)`` of this device's queries, from the keys and values of all devices."""
    layout, axis = call.layout, call.axis
    key, value = (_gathered(each, axis, layout) for each in (keys.key, keys.value))
    ids = None if keys.ids is None else layout.in_order(lax.all_gather(keys.ids, axis, axis=1, tiled=True), 1)
    # The offset of the queries is traced, so it is an array of positions; kernels classify their tiles by it.
    rows = layout.positions(lax.axis_index(axis), layout.q_length)
    mask = mask_of(call, arrays, (rows, arrays.q_ids), (jnp.arange(key.shape[1], dtype=jnp.int32), ids), None)
    return _call(kernel, call, query, key, value, mask, sinks)


def ulysses_attention(
    kernel: AttentionKernel,
    call: ContextCall,
    query: jax.Array,
    keys: Keys,
    sinks: jax.Array | None,
    arrays: MaskArrays,
) -> Results:
    """``(out, lse)`` of this device's queries, from calls on whole sequences with a part of the heads each."""
    layout, axis = call.layout, call.axis
    # Segment ids go with their rows, so that without positions the order of the devices is as good as any.
    in_order = order_matters(call, arrays)

    def to_heads(x: jax.Array) -> jax.Array:
        rows = lax.all_to_all(x, axis, split_axis=2, concat_axis=1, tiled=True)
        return layout.in_order(rows, 1) if in_order else rows

    def ids_of(x: jax.Array | None) -> jax.Array | None:
        if x is None:
            return None
        rows = lax.all_gather(x, axis, axis=1, tiled=True)
        return layout.in_order(rows, 1) if in_order else rows

    def to_rows(x: jax.Array, length_axis: int, head_axis: int) -> jax.Array:
        rows = layout.by_device(x, length_axis) if in_order else x
        return cast(jax.Array, lax.all_to_all(rows, axis, split_axis=length_axis, concat_axis=head_axis, tiled=True))

    # Consecutive query heads share a key head, so equal parts of both kinds of heads belong together.
    heads = query.shape[2] // layout.shards
    if sinks is not None:
        sinks = lax.dynamic_slice_in_dim(sinks, lax.axis_index(axis).astype(jnp.int32) * heads, heads)
    query, key, value = to_heads(query), to_heads(keys.key), to_heads(keys.value)
    rows, columns = (jnp.arange(each.shape[1], dtype=jnp.int32) for each in (query, key))
    mask = mask_of(call, arrays, (rows, ids_of(arrays.q_ids)), (columns, ids_of(keys.ids)), call.band)
    out, lse = _call(kernel, call, query, key, value, mask, sinks)
    return to_rows(out, 1, 2), to_rows(lse, 2, 1)


def _call(
    kernel: AttentionKernel,
    call: ContextCall,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Any,
    sinks: jax.Array | None,
) -> Results:
    options = dict(call.options) | {"softmax_aux": sinks, "return_lse": call.return_lse}
    found = kernel(query, key, value, None, mask, cfg=call.cfg, **options)
    if call.return_lse:
        return cast(Results, found)
    # Nobody reads it: XLA removes it with the transfers that it would need.
    return found, jnp.zeros((query.shape[0], query.shape[2], query.shape[1]), accumulation_dtype(query.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(x: jax.Array, axis: AxisName, layout: Layout) -> Any:
    """The rows of all devices in order. The gradient is summed over the devices in float32 or wider."""
    return layout.in_order(lax.all_gather(x, axis, axis=1, tiled=True), 1)


def _gathered_forward(x: jax.Array, axis: AxisName, layout: Layout) -> tuple[jax.Array, None]:
    return _gathered(x, axis, layout), None


def _gathered_backward(axis: AxisName, layout: Layout, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    # In the keys' dtype the sum over many devices would lose what a ring's float32 sums keep.
    parts = layout.by_device(gradient, 1).astype(accumulation_dtype(gradient.dtype))
    return (lax.psum_scatter(parts, axis, scatter_dimension=1, tiled=True).astype(gradient.dtype),)


_gathered.defvjp(_gathered_forward, _gathered_backward)
