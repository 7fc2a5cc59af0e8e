"""How attention over a cache is split over the explicit axes of a mesh: by heads, as tensor parallelism does."""

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from tilewright.kernels.paged_attention.inputs import PagedInputs
from tilewright.kernels.sharding import Partitioning, typed_spec
from tilewright.ops.core.arrays import explicit_sharding


def paged_partitioning(inputs: PagedInputs) -> Partitioning | None:
    """The partitioning that the types of query and cache ask for.

    Raises:
      ValueError: something other than heads is split, or query and cache disagree.
    """
    arrays = {"query": inputs.query, "key": inputs.key, "value": inputs.value}
    present = {name: array for name, array in arrays.items() if array is not None}
    shardings = [explicit_sharding(jax.typeof(array)) for array in present.values()]
    given = [sharding for sharding in shardings if sharding is not None]
    if not given:
        return None
    specs = {name: (*typed_spec(array), *(None,) * 4)[: array.ndim] for name, array in present.items()}
    said = ", ".join(f"{name}: {P(*spec)}" for name, spec in specs.items())
    for spec in specs.values():
        if any(axis is not None for position, axis in enumerate(spec) if position != len(spec) - 2):
            raise ValueError(f"attention over a cache can be split by heads alone ({said}); reshard it first")
    heads, kv_heads = specs["query"][1], specs["key"][2]
    shared = inputs.key.shape[2] == 1 and kv_heads is None
    if not shared and (kv_heads != heads or specs.get("value", specs["key"])[2] != heads):
        raise ValueError(f"query and cache must be split alike by heads ({said}); reshard them first")

    def cache(array: Any) -> Any:
        return None if array is None else P(None, None, kv_heads if array.shape[2] > 1 else None)

    # Any: PagedInputs is also the pytree that holds a spec in the place of each of its arrays.
    rows: Any = P(None, heads)
    by_head: Any = P(heads)
    whole: Any = P()
    return Partitioning(
        mesh=given[0].mesh,
        inputs=PagedInputs(
            query=rows,
            key=cache(inputs.key),
            value=cache(inputs.value),
            page_table=None if inputs.page_table is None else whole,
            kv_lengths=whole,
            kv_starts=None if inputs.kv_starts is None else whole,
            cum_q_lens=None if inputs.cum_q_lens is None else whole,
            key_scale=cache(inputs.key_scale),
            value_scale=cache(inputs.value_scale),
            alibi_slopes=None if inputs.alibi_slopes is None else by_head,
            softmax_aux=None if inputs.softmax_aux is None else by_head,
            options=inputs.options,
        ),
        results=(rows, rows),
        gradients={},
    )
