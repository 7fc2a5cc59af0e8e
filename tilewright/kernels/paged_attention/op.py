"""The base class of all attention ops over a cache: from a checked call to the core's inputs and back."""

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tilewright.kernels.numerics.softmax import accumulation_dtype
from tilewright.kernels.op.arguments import flag, reshape, scaled, sinks_array, soft_cap, to_32_bit
from tilewright.kernels.op.choice import Choice
from tilewright.kernels.op.portfolio import InferenceKernel
from tilewright.kernels.op.public import with_defaults
from tilewright.kernels.op.roofline import Cost
from tilewright.kernels.op.sharding import Partitioning
from tilewright.kernels.paged_attention import arguments, sampling
from tilewright.kernels.paged_attention.debugging import report
from tilewright.kernels.paged_attention.inputs import PagedInputs
from tilewright.kernels.paged_attention.options import ServingOptions
from tilewright.kernels.paged_attention.partitioning import paged_partitioning
from tilewright.kernels.paged_attention.reference import oracle_parts, paged_reference, write_reference
from tilewright.kernels.paged_attention.results import Results
from tilewright.kernels.paged_attention.writing import Cache, WriteInputs, write_pages
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.kernel.parts import OraclePart


class PagedAttentionKernel(InferenceKernel[PagedInputs, Results], abc.ABC):
    """An op that defines only ``prepare``, which ends in ``canonical`` or ``canonical_blocks``, and ``cases``.

    What ``prepare`` computes becomes part of the caller's program unchanged: it must work on ``ShapeDtypeStruct``
    (``arguments.apply``), symbolic dimensions and explicit mesh axes, and stay int32 with ``jax_enable_x64``.
    """

    cuda_tables = MappingProxyType({"packed_attention_hopper": "tilewright.kernels.paged_attention.cuda.packed:TABLE"})

    def __init__(self, name: str, *more: str, packed: bool = False) -> None:
        """``more`` are backends only for this op, which come first; ``packed``: its queries are packed."""
        for_packed = [
            "tilewright.kernels.paged_attention.cuda.packed:CudaPackedAttention",
            "tilewright.kernels.paged_attention.hopper.packed_backend:PallasGpuPackedAttention",
        ]
        super().__init__(
            name,
            version="1",
            backends=(
                *more,
                *(for_packed if packed else []),
                "tilewright.kernels.paged_attention.tpu.backend:TpuPagedAttention",
                "tilewright.kernels.paged_attention.triton.backend:TritonPagedAttention",
                "tilewright.kernels.paged_attention.xla.backend:XlaPagedAttention",
            ),
        )

    def canonical(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array | None,
        kv_lengths: jax.Array,
        *,
        page_table: jax.Array | None = None,
        kv_starts: jax.Array | None = None,
        cum_q_lens: jax.Array | None = None,
        q_length: int | None = 1,
        new: tuple[Any, Any] | None = None,
        causal: Any = True,
        tree_mask: ArrayLike | None = None,
        latent_dim: int | None = None,
        row_format: str | None = None,
        **options: Unpack[ServingOptions],
    ) -> PagedInputs:
        """The call as backends take it: arrays of checked ranks, and static options.

        Args:
          query: any leading shape, which the results have too; its tokens are ordered by sequence.
          value: ``None`` if the first ``latent_dim`` elements of a key are the value.
          kv_lengths: tokens of each sequence, the query's included, which are the last.
          row_format: of checked pages of latents, see ``arguments.latent_format``.
          page_table: ``None`` if sequence s has only page s.
          kv_starts: the first visible position of each sequence, instead of 0.
          q_length: the number of query tokens of every sequence; ``None`` with ``cum_q_lens``.
          new: keys and values of the query's tokens, packed, which are written to the pages first; the new pages follow
            the results.
          tree_mask: bits of the new tokens that a token sees, in place of ``causal`` and of the window's right side.
        """
        given = with_defaults(ServingOptions, options)
        if row_format is None:
            arguments.check_heads(query, key)
        *leading, heads, head_dim = query.shape
        query, scale = scaled(query, given["softmax_scale"])
        packed = reshape(query, (math.prod(leading), heads, head_dim))
        left, right = arguments.window_sides(given["sliding_window"], flag("causal", causal))
        bits = arguments.tree_mask_array(tree_mask, packed.shape[0])
        page_table = arguments.moved_pages(page_table, given["page_offset"])
        new_key, new_value = (None, None)
        if new is not None:
            new_key, new_value = arguments.new_tokens(*new, key, value, packed.shape[0])
            if page_table is not None and page_table.shape[1] == 0 and packed.shape[0]:
                raise ValueError(f"a page table without columns has no page to write to: {page_table.shape=}")
        report(
            self.name,
            page_table,
            kv_lengths,
            cum_q_lens,
            num_pages=key.shape[0],
            page_size=key.shape[1],
            tokens=packed.shape[0],
            q_length=q_length,
            writes=new is not None,
            by_place=(left, right) != (None, None) or bits is not None,
        )
        sinks = given["softmax_aux"]
        return PagedInputs(
            packed,
            key,
            value=value,
            page_table=page_table,
            kv_lengths=kv_lengths,
            kv_starts=kv_starts,
            cum_q_lens=cum_q_lens,
            key_scale=arguments.scale_array("key_scale", given["key_scale"], key),
            value_scale=arguments.scale_array("value_scale", given["value_scale"], value),
            alibi_slopes=to_32_bit(arguments.slopes_array(given["alibi_slopes"], heads), query.dtype),
            softmax_aux=to_32_bit(None if sinks is None else sinks_array(sinks, heads), query.dtype),
            tree_mask=bits,
            new_key=new_key,
            new_value=new_value,
            softmax_scale=scale,
            left=left,
            right=right if bits is None else None,
            logits_soft_cap=soft_cap(given["logits_soft_cap"]),
            q_length=q_length,
            latent_dim=latent_dim,
            row_format=row_format,
            kv_dtype=key.dtype.name,
            leading=tuple(leading),
            return_lse=flag("return_lse", given["return_lse"]),
            platform=self.backends.allowed(given["platform"]),
        )

    def canonical_blocks(
        self,
        query: ArrayLike,
        key_cache: ArrayLike,
        value_cache: ArrayLike,
        block_table: ArrayLike,
        lengths: tuple[str, ArrayLike],
        boundaries: tuple[str, ArrayLike],
        **others: Any,
    ) -> PagedInputs:
        """``canonical`` of packed queries over blocks, which are pages by vLLM's argument names.

        Args:
          lengths, boundaries: the name of the argument, and tokens of each sequence in the cache, or where the
            sequences' queries begin and end.
          others: further arguments of ``canonical``.
        """
        queries = arguments.query_array(query, (3,), "[tokens, heads, head_dim]")
        keys, values = arguments.block_arrays(key_cache, value_cache)
        kv_lengths = arguments.lengths_array(*lengths, None)
        sequences = kv_lengths.shape[0]
        return self.canonical(
            queries,
            keys,
            values,
            kv_lengths,
            page_table=arguments.page_table_array(block_table, sequences, "block_table"),
            cum_q_lens=arguments.boundaries_array(*boundaries, sequences),
            q_length=None,
            **others,
        )

    def completed(self, inputs: PagedInputs) -> PagedInputs:
        """The inputs with any new tokens in the cache."""
        return _written(inputs, write_pages)

    def results(self, inputs: PagedInputs) -> Any:
        """``(out, lse)``: the output in the query's dtype, the log-sum-exp in that of sums."""
        rows, dtype = inputs.query.shape[:2], inputs.query.dtype
        return (
            jax.ShapeDtypeStruct((*rows, inputs.value_dim), dtype),
            jax.ShapeDtypeStruct(rows, accumulation_dtype(dtype)),
        )

    def outputs(self, inputs: PagedInputs, results: Results) -> Any:
        """The caller's results: the output, the log-sum-exp if requested, the cache if it was written to."""
        out, lse = (result.reshape(*inputs.leading, *result.shape[1:]) for result in results)
        found: tuple[Any, ...] = (out, lse) if inputs.return_lse else (out,)
        if inputs.writes:
            cache = (inputs.key, inputs.value, inputs.key_scale, inputs.value_scale)
            found += tuple(array for array in cache if array is not None)
        return found if len(found) > 1 else out

    def reference(self, inputs: PagedInputs) -> Any:
        """The oracle, computed in the query's dtype: promote narrow arrays for exact results."""
        inputs = _written(inputs, write_reference)
        out, lse = paged_reference(inputs, inputs.query.dtype)
        return self.outputs(inputs, (out, lse.astype(jnp.promote_types(lse.dtype, jnp.float32))))

    def oracle_parts(self, invocation: Invocation[Any, Any]) -> list[OraclePart]:
        """Some query heads of the first and the last key head; empty for small calls."""
        return oracle_parts(self.inputs_of(invocation))

    def sampled(self, inputs: PagedInputs, key: jax.Array) -> PagedInputs:
        """Normal arrays, tables of distinct pages if there are enough, lengths of at least half."""
        return sampling.sampled(inputs, key)

    def partitioning(self, inputs: PagedInputs) -> Partitioning | None:
        """Splits by heads and by sequences, as in the types of query and cache."""
        return paged_partitioning(inputs)

    def split_alike(self, inputs: PagedInputs) -> Sequence[Mapping[str, int]]:
        """The heads of queries and of a cache that has several, and the sequences of a cache without a table."""
        caches = [name for name in ("key", "value") if inputs.arrays[name] is not None]
        alike = [{"query": 1} | dict.fromkeys(caches, 2)] if inputs.key.shape[2] > 1 else []
        return alike if inputs.page_table is not None else [*alike, {"query": 0} | dict.fromkeys(caches, 0)]

    def tolerance_factor(self, invocation: Invocation[Any, Any]) -> float:
        """The tolerance factor, which is larger with a soft cap, since that flattens the logits."""
        return 3.0 if self.inputs_of(invocation).logits_soft_cap else 2.0

    def cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """The cost if sequences fill their tables: every visible key read once, every query and output moved once."""
        inputs = self.inputs_of(inv)
        # The windows of several queries cover more keys than that of one.
        per_sequence = inputs.capacity if inputs.longest_q > 1 else inputs.visible
        scores = inputs.tokens * inputs.heads * inputs.visible
        rows = inputs.tokens * inputs.heads * (inputs.head_dim + inputs.value_dim) * inputs.dtype.itemsize
        flops = 2.0 * scores * (inputs.head_dim + inputs.value_dim)
        return Cost(flops, float(inputs.sequences * per_sequence * inputs.kv_bytes + rows))

    def min_cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """The cost if all lengths are zero: writing the output."""
        inputs = self.inputs_of(inv)
        return Cost(0.0, float(inputs.tokens * inputs.heads * inputs.value_dim * inputs.dtype.itemsize))


def _written(inputs: PagedInputs, write: Callable[[WriteInputs], Cache]) -> PagedInputs:
    """The inputs with any new tokens in the cache, before attention, as they are among the keys that queries see."""
    if inputs.new_key is None:
        return inputs
    assert inputs.page_table is not None
    key, value, key_scale, value_scale = write(
        WriteInputs(
            inputs.key,
            value_pages=inputs.value,
            key_scale=inputs.key_scale,
            value_scale=inputs.value_scale,
            key=inputs.new_key,
            value=inputs.new_value,
            page_table=inputs.page_table,
            kv_lengths=inputs.kv_lengths,
            cum_q_lens=inputs.cum_q_lens,
            kv_dtype=inputs.kv_dtype,
        )
    )
    return inputs.replace(
        key=key,
        value=value,
        key_scale=key_scale,
        value_scale=value_scale,
        new_key=None,
        new_value=None,
        written=True,
    )
