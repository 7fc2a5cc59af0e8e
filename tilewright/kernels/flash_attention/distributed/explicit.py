"""``flash_attention`` on explicit mesh axes that split the length of the keys, and that of the queries alike or not."""

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from tilewright.kernels.flash_attention.distributed.op import ContextParallelOp, check_refused
from tilewright.kernels.numerics.softmax import accumulation_dtype
from tilewright.kernels.op.arguments import as_array, on_host
from tilewright.kernels.op.sharding import axis_names, explicit_mesh, over_explicit_axes, placed, typed_axes
from tilewright.ops.kernel.arrays import is_symbolic

_BY_BATCH = frozenset({"query_seq_lengths", "key_value_seq_lengths"})
_BY_ROWS = frozenset({"q_segment_ids", "kv_segment_ids"})
_BY_HEADS = frozenset({"softmax_aux"})
_WHOLE = frozenset({"cum_seqlens_q", "cum_seqlens_k"})


def keys_travel(call: Mapping[str, Any]) -> bool:
    """True if the types of query, key and value ask for `attention_on_explicit_axes`.

    Keys and values are split by their length, and the query over the same mesh axes; or it is whole, and splitting its
    rows for the call moves fewer bytes than combining the results of each device's keys. Batch and heads of keys and
    values are split like the query's, or whole: then each device takes its part of them.

    Args:
      call: the arguments by name.
    """
    query, key, value = (call.get(name) for name in ("query", "key", "value"))
    # The keys first: of nearly every call this is all that is read.
    if not isinstance(key, jax.Array) or (of_key := _axes(key)) is None or of_key[-3] is None:
        return False
    if not (isinstance(query, jax.Array) and isinstance(value, jax.Array)) or (of_query := _axes(query)) is None:
        return False
    wanted = (*of_query[:-3], of_key[-3], *of_query[-2:])
    if not all(_is_part(_axes(each), wanted) and _divides(each, wanted[-2]) for each in (key, value)):
        return False
    if of_query[-3] is not None:
        return bool(of_query[-3] == of_key[-3])
    # The query is whole: its rows take the axes of the keys, unless these split its batch or its heads.
    names = [name for axes in wanted for name in axis_names(axes)]
    whole = call.get("bias") is None and call.get("mask") is None and not call.get("dropout_prob")
    return whole and len(set(names)) == len(names) and _rows_are_cheaper(query, key, value, _devices(key, wanted[-3]))


def _axes(array: jax.Array) -> tuple[Any, ...] | None:
    """The mesh axes of each dimension of an operand, whose head_dim is whole."""
    if array.ndim not in (3, 4):
        return None
    axes = typed_axes(array)
    return axes if axes[-1] is None else None


def _is_part(axes: tuple[Any, ...] | None, wanted: tuple[Any, ...]) -> bool:
    """True if axes are the wanted ones, some of batch and heads left out."""
    if axes is None or len(axes) != len(wanted) or axes[-3] != wanted[-3]:
        return False
    return all(each in (None, other) for each, other in zip(axes, wanted, strict=True))


def _divides(array: jax.Array, axes: Any) -> bool:
    """True if the devices along mesh axes divide an array's heads."""
    return array.shape[-2] % _devices(array, axes) == 0


def _devices(array: jax.Array, axes: Any) -> int:
    mesh: Any = explicit_mesh(array)
    return math.prod(mesh.shape[name] for name in axis_names(axes))


def _rows_are_cheaper(query: jax.Array, key: jax.Array, value: jax.Array, devices: int) -> bool:
    """True if a training step moves fewer bytes with the rows of a whole query split than with results combined."""
    if is_symbolic(*query.shape, *key.shape) or query.shape[-3] % devices:
        return False
    out_size, item = query.size // query.shape[-1] * value.shape[-1], query.dtype.itemsize
    wide, keys = accumulation_dtype(query.dtype).itemsize, key.size + value.size
    # A reduction moves what a gather does, twice. Both of the query's elements: out forward, dQ backward.
    combined = 2 * wide * (out_size + query.size)
    # Keys in both passes and their gradients in float32; then out and dQ are gathered.
    return bool((2 * item + wide) * keys + item * (out_size + query.size) < combined)


def attention_on_explicit_axes(
    op: ContextParallelOp,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: object = None,
    mask: object = None,
    **options: Any,
) -> Any:
    """Attention whose keys are split by their length over explicit axes: a strategy is chosen as by "auto".

    The query is split over the same axes; a whole one is, too, for the call, and then the results are whole again.

    Raises:
      ValueError, TypeError: a wrong argument, or one that has no meaning over several devices.
    """
    check_refused(bias, mask, options)
    axes = typed_axes(query)
    batch, own_rows, heads = (None, *axes[:2]) if query.ndim == 3 else axes[:3]
    rows = typed_axes(key)[-3]
    leading = () if query.ndim == 3 else (batch,)
    spec = PartitionSpec(*leading, rows, heads, None)
    specs: dict[str, PartitionSpec] = dict.fromkeys(("query", "key", "value"), spec)
    arrays: dict[str, Any] = {"query": query, "key": key, "value": value}
    if isinstance(options.get("softmax_scale"), jax.Array):
        arrays["softmax_scale"], specs["softmax_scale"] = options.pop("softmax_scale"), PartitionSpec()
    # The very same boundaries on both sides mean self-attention, and must still be one array inside.
    self_attention = options.get("cum_seqlens_q") is options.get("cum_seqlens_k")
    for names, by in (
        (_BY_BATCH, PartitionSpec(*leading)),
        (_BY_ROWS, PartitionSpec(*leading, rows)),
        (_BY_HEADS, PartitionSpec(heads)),
        (_WHOLE, PartitionSpec()),
    ):
        for name in names & options.keys():
            if name in _WHOLE and on_host(options[name]):
                continue  # known boundaries leave steps of a ring out
            array = options.pop(name)
            if array is not None and not (name == "cum_seqlens_k" and self_attention):
                arrays[name], specs[name] = as_array(name, array), by
    mesh: Any = explicit_mesh(key)

    def on_device(parts: dict[str, Any]) -> Any:
        if self_attention and "cum_seqlens_q" in parts:
            parts = parts | {"cum_seqlens_k": parts["cum_seqlens_q"]}
        return op(axis_name=rows, layout="contiguous", **parts, **options)

    lse = PartitionSpec(*leading, heads, rows)
    out = (spec, lse) if options.get("return_lse") else spec
    found = over_explicit_axes(on_device, mesh, arrays, specs, out)
    if own_rows is not None:
        return found
    # Rows were split for the call only.
    whole = PartitionSpec(*leading, None, heads, None), PartitionSpec(*leading, heads, None)
    return placed(found, whole if options.get("return_lse") else whole[0], mesh)
