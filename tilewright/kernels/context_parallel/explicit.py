"""``flash_attention`` on explicit mesh axes that split the length of queries and keys alike."""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from tilewright.kernels.arguments import as_array
from tilewright.kernels.context_parallel.function import attention_over_axis, check_refused
from tilewright.kernels.context_parallel.ring import AttentionKernel
from tilewright.kernels.sharding import explicit_mesh, placed, typed_axes

_BY_BATCH = frozenset({"query_seq_lengths", "key_value_seq_lengths"})
_BY_ROWS = frozenset({"q_segment_ids", "kv_segment_ids"})
_BY_HEADS = frozenset({"softmax_aux"})
_WHOLE = frozenset({"cum_seqlens_q", "cum_seqlens_k"})


def lengths_are_split(query: object, key: object, value: object) -> bool:
    """True if the types of query, key and value split their lengths, and everything else, over the same mesh axes."""
    # The keys first: of nearly every call this is all that is read.
    if not isinstance(key, jax.Array) or (axes := _split(key)) is None:
        return False
    return all(isinstance(each, jax.Array) and _split(each) == axes for each in (query, value))


def _split(array: jax.Array) -> tuple[Any, ...] | None:
    """The mesh axes of each dimension of an array if they split its length and not its head_dim."""
    if array.ndim not in (3, 4):
        return None
    axes = typed_axes(array)
    return axes if axes[-3] is not None and axes[-1] is None else None


def attention_on_explicit_axes(
    kernel: AttentionKernel,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: object = None,
    mask: object = None,
    **options: Any,
) -> Any:
    """Attention whose lengths are split over explicit axes: its strategy is chosen as for ``strategy="auto"``.

    Raises:
      ValueError, TypeError: a wrong argument, or one that has no meaning over several devices.
    """
    check_refused(bias, mask, options)
    axes = typed_axes(query)
    batch, rows, heads = (None, *axes[:2]) if query.ndim == 3 else axes[:3]
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
            array = options.pop(name)
            if array is not None and not (name == "cum_seqlens_k" and self_attention):
                arrays[name], specs[name] = as_array(name, array), by
    mesh: Any = explicit_mesh(query)

    def on_device(parts: dict[str, Any]) -> Any:
        if self_attention and "cum_seqlens_q" in parts:
            parts = parts | {"cum_seqlens_k": parts["cum_seqlens_q"]}
        return attention_over_axis(kernel, axis_name=rows, layout="contiguous", **parts, **options)

    lse = PartitionSpec(*leading, heads, rows)
    run = jax.shard_map(
        on_device, mesh=mesh, in_specs=(specs,), out_specs=(spec, lse) if options.get("return_lse") else spec
    )
    return run(placed(arrays, specs, mesh))
