"""Splits attention over a cache over the explicit axes of a mesh: by heads, and by sequences.

By heads, as in tensor parallelism: the cache is split like the query, or has one head for all. By sequences, as in data
parallelism, if all have the same number of query tokens: a cache without a page table is split like the query; pages of
a table may belong to any sequence, so every device has all of them.
"""

from typing import Any

from jax.sharding import PartitionSpec as P

from tilewright.kernels.op.sharding import Partitioning, explicit_mesh, typed_axes
from tilewright.kernels.paged_attention.inputs import PagedInputs


def paged_partitioning(inputs: PagedInputs) -> Partitioning | None:
    """The partitioning implied by the types of query and cache.

    Raises:
      ValueError: a dimension other than heads or sequences is split, or query and cache are split differently.
    """
    arrays = {"query": inputs.query, "key": inputs.key, "value": inputs.value}
    present = {name: array for name, array in arrays.items() if array is not None}
    mesh = explicit_mesh(*present.values())
    if mesh is None:
        return None
    sequences, heads, kv_heads = _checked({name: typed_axes(array) for name, array in present.items()}, inputs)
    pages = None if inputs.page_table is not None else sequences

    def cache(array: Any) -> Any:
        if array is None:
            return None
        axes = (pages, None, kv_heads)
        # Scales may broadcast over pages, rows or heads: a dimension of 1 is whole on every device.
        return P(*(each if size > 1 else None for each, size in zip(axes, array.shape, strict=False)))

    rows, by_head, by_sequence, replicated = P(sequences, heads), P(heads), P(sequences), P()
    return Partitioning(
        mesh=mesh,
        inputs=inputs.replace(
            query=rows,
            key=cache(inputs.key),
            value=cache(inputs.value),
            page_table=None if inputs.page_table is None else by_sequence,
            kv_lengths=by_sequence,
            kv_starts=None if inputs.kv_starts is None else by_sequence,
            cum_q_lens=None if inputs.cum_q_lens is None else replicated,
            key_scale=cache(inputs.key_scale),
            value_scale=cache(inputs.value_scale),
            alibi_slopes=None if inputs.alibi_slopes is None else by_head,
            softmax_aux=None if inputs.softmax_aux is None else by_head,
            # Only calls with boundaries have bits, and their tokens are not split.
            tree_mask=None if inputs.tree_mask is None else replicated,
        ),
        results=(rows, rows),
        gradients={},
    )


def _checked(specs: dict[str, tuple[Any, ...]], inputs: PagedInputs) -> tuple[Any, Any, Any]:
    """The mesh axes of sequences, query heads and key heads."""
    text = ", ".join(f"{name}: {P(*spec)}" for name, spec in specs.items())
    sequences, heads, head_dim = specs["query"]
    kv_heads = specs["key"][2]
    caches = [spec for name, spec in specs.items() if name != "query"]
    if head_dim is not None or any(spec[1] is not None or spec[3] is not None for spec in caches):
        by_length = inputs.page_table is None and any(spec[1] is not None for spec in caches)
        instead = ", or call flash_attention with key_value_seq_lengths, which takes split lengths" if by_length else ""
        raise ValueError(
            f"attention over a cache can be split by heads and by sequences alone ({text}); reshard it{instead}"
        )
    if sequences is not None and inputs.cum_q_lens is not None:
        raise ValueError(
            f"queries of different lengths laid end to end cannot be split by tokens ({text}), since a sequence may "
            "lie on two devices; give each device its own sequences by jax.shard_map, or reshard the query"
        )
    if any(spec[0] is not None for spec in caches):
        if inputs.page_table is not None:
            instead = "call context_parallel_page_attention inside of jax.shard_map"
            if inputs.value is None:
                instead = "call context_parallel_mla_decode inside of jax.shard_map"
                if inputs.cum_q_lens is not None:
                    instead = "give each device its own sequences and pages by jax.shard_map"
            raise ValueError(
                f"pages that a table names cannot be split by page ({text}), since a sequence's may lie anywhere; "
                f"reshard the cache, or {instead}"
            )
        if any(spec[0] not in (None, sequences) for spec in caches):
            raise ValueError(f"query and cache must be split alike by sequences ({text}); reshard them first")
    shared = inputs.key.shape[2] == 1 and kv_heads is None
    if any(spec[2] != kv_heads for spec in caches) or not (shared or kv_heads == heads):
        # Slicing a replicated cache would copy part of it in every call.
        raise ValueError(
            f"query and cache must be split alike by heads ({text}); reshard the cache once, and repeat its heads "
            "first if there are more devices than heads of keys"
        )
    return sequences, heads, kv_heads
