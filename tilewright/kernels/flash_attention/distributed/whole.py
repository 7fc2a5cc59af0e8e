"""The plans in which one call sees whole sequences: gathered keys and values, or some of the heads."""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.flash_attention.distributed.inputs import ContextInputs
from tilewright.kernels.flash_attention.distributed.layout import Layout
from tilewright.kernels.flash_attention.distributed.masks import mask_of
from tilewright.kernels.masks import Mask
from tilewright.kernels.numerics.softmax import accumulation_dtype
from tilewright.kernels.op.sharding import AxisName
from tilewright.ops.utils.promotion import default_promotion

type Results = tuple[jax.Array, jax.Array]


def gathered_attention(inputs: ContextInputs, cfg: object) -> Results:
    """``(out, lse)`` of this device's queries, from the keys and values of all devices."""
    layout, axis, kv_ids = inputs.rows, inputs.axis, inputs.kv_ids
    key, value = (_gathered(each, axis, layout) for each in (inputs.key, inputs.value))
    ids = None if kv_ids is None else layout.in_order(lax.all_gather(kv_ids, axis, axis=1, tiled=True), 1)
    # The offset of the queries is traced, so it is an array of positions; kernels classify their tiles by it.
    rows = layout.positions(lax.axis_index(axis), layout.q_length)
    mask = mask_of(inputs, (rows, inputs.q_ids), (jnp.arange(key.shape[1], dtype=jnp.int32), ids), None)
    return _call(inputs.replace(key=key, value=value), mask, cfg)


def ulysses_attention(inputs: ContextInputs, cfg: object) -> Results:
    """``(out, lse)`` of this device's queries, from calls on whole sequences with a part of the heads each."""
    layout, axis, in_order = inputs.rows, inputs.axis, inputs.order_matters
    # Segment ids go with their rows, so that without positions the order of the devices is as good as any.

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
    heads, sinks = inputs.query.shape[2] // layout.shards, inputs.softmax_aux
    if sinks is not None:
        sinks = lax.dynamic_slice_in_dim(sinks, lax.axis_index(axis).astype(jnp.int32) * heads, heads)
    query, key, value = (to_heads(each) for each in (inputs.query, inputs.key, inputs.value))
    rows, columns = (jnp.arange(each.shape[1], dtype=jnp.int32) for each in (query, key))
    mask = mask_of(inputs, (rows, ids_of(inputs.q_ids)), (columns, ids_of(inputs.kv_ids)), inputs.band)
    part = inputs.replace(query=query, key=key, value=value, softmax_aux=sinks)
    out, lse = _call(part, mask, cfg)
    return to_rows(out, 1, 2), to_rows(lse, 2, 1)


def _call(inputs: ContextInputs, mask: Mask | None, cfg: object) -> Results:
    query, options = inputs.query, inputs.of_parts
    found = inputs.kernel(
        query, inputs.key, inputs.value, None, mask,
        softmax_aux=inputs.softmax_aux, return_lse=inputs.return_lse, cfg=cfg, **options,
    )  # fmt: skip
    if inputs.return_lse:
        return cast(Results, found)
    # It is unused: XLA removes it with its transfers.
    return found, jnp.zeros((query.shape[0], query.shape[2], query.shape[1]), accumulation_dtype(query.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(x: jax.Array, axis: AxisName, layout: Layout) -> Any:
    """The rows of all devices in order. The gradient is summed over the devices in float32 or wider."""
    return layout.in_order(lax.all_gather(x, axis, axis=1, tiled=True), 1)


def _gathered_forward(x: jax.Array, axis: AxisName, layout: Layout) -> tuple[jax.Array, None]:
    return _gathered(x, axis, layout), None


@default_promotion()
def _gathered_backward(axis: AxisName, layout: Layout, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    # In the keys' dtype the sum over many devices would lose what a ring's float32 sums keep.
    parts = layout.by_device(gradient, 1).astype(accumulation_dtype(gradient.dtype))
    return (lax.psum_scatter(parts, axis, scatter_dimension=1, tiled=True).astype(gradient.dtype),)


_gathered.defvjp(_gathered_forward, _gathered_backward)
