"""The base class of all attention ops over a cache: from prepared arguments to the core's problem and back."""

import abc
import math
from types import MappingProxyType
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tilewright.kernels.numerics.softmax import accumulation_dtype
from tilewright.kernels.op.arguments import flag, platforms, reshape, scaled, sinks_array, soft_cap, to_32_bit
from tilewright.kernels.op.portfolio import Choice, InferenceKernel, LazyImplementation, lazy
from tilewright.kernels.op.public import with_defaults
from tilewright.kernels.op.roofline import Cost
from tilewright.kernels.op.sharding import Partitioning
from tilewright.kernels.paged_attention import arguments, sampling
from tilewright.kernels.paged_attention.debugging import report
from tilewright.kernels.paged_attention.inputs import PagedInputs, PagedOptions, PagedProblem
from tilewright.kernels.paged_attention.options import ServingOptions
from tilewright.kernels.paged_attention.partitioning import paged_partitioning
from tilewright.kernels.paged_attention.reference import paged_reference, write_reference
from tilewright.kernels.paged_attention.results import Results
from tilewright.kernels.paged_attention.writing import WriteInputs, applied, write_pages
from tilewright.ops.kernel.kernel import Invocation

type Call = tuple[tuple[Any, ...], dict[str, Any]]


class PagedAttentionKernel(InferenceKernel[PagedInputs, PagedProblem, Results], abc.ABC):
    """An op that defines only ``prepare``, which ends in ``canonical`` or ``canonical_blocks``, and ``cases``.

    What ``prepare`` computes becomes part of the caller's program as it stands: it must work on ``ShapeDtypeStruct``
    (``arguments.apply``), symbolic dimensions and explicit mesh axes, and stay int32 with ``jax_enable_x64``.
    """

    cuda_tables = MappingProxyType({"packed_attention_hopper": "tilewright.kernels.paged_attention.cuda.packed:TABLE"})

    def __init__(self, name: str, *more: LazyImplementation, packed: bool = False) -> None:
        """``more`` are implementations for this op alone, which come first; ``packed``: its queries are packed."""
        for_packed = [
            lazy("tilewright.kernels.paged_attention.cuda.packed:CudaPackedAttention"),
            lazy("tilewright.kernels.paged_attention.hopper.packed_backend:PallasGpuPackedAttention"),
        ]
        super().__init__(
            name,
            version="1",
            implementations=(
                *more,
                *(for_packed if packed else []),
                lazy("tilewright.kernels.paged_attention.triton.backend:TritonPagedAttention"),
                lazy("tilewright.kernels.paged_attention.xla.backend:XlaPagedAttention"),
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
        latent_dim: int | None = None,
        **options: Unpack[ServingOptions],
    ) -> Call:
        """The prepared call: arrays in the core's order with checked ranks, and static options.

        Args:
          query: any leading shape, which the results have too; its tokens are those of one sequence after the other.
          value: ``None`` if the first ``latent_dim`` elements of a key are the value.
          kv_lengths: tokens of each sequence, the query's included, which are the last.
          page_table: ``None`` if sequence s has page s alone.
          kv_starts: the first visible position of each sequence, instead of 0.
          q_length: the number of query tokens of every sequence; ``None`` with ``cum_q_lens``.
          new: keys and values of the query's tokens, packed, which are written to the pages first; the new pages follow
            the results.
        """
        given = with_defaults(ServingOptions, options)
        arguments.check_heads(query, key)
        *leading, heads, head_dim = query.shape
        query, scale = scaled(query, given["softmax_scale"])
        packed = reshape(query, (math.prod(leading), heads, head_dim))
        left, right = arguments.window_sides(given["sliding_window"], flag("causal", causal))
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
        )
        sinks = given["softmax_aux"]
        args = (
            packed,
            key,
            value,
            page_table,
            kv_lengths,
            kv_starts,
            cum_q_lens,
            arguments.scale_array("key_scale", given["key_scale"], key),
            arguments.scale_array("value_scale", given["value_scale"], value),
            to_32_bit(arguments.slopes_array(given["alibi_slopes"], heads), query.dtype),
            to_32_bit(None if sinks is None else sinks_array(sinks, heads), query.dtype),
            new_key,
            new_value,
        )
        return args, {
            "softmax_scale": scale,
            "left": left,
            "right": right,
            "logits_soft_cap": soft_cap(given["logits_soft_cap"]),
            "q_length": q_length,
            "latent_dim": latent_dim,
            "kv_dtype": key.dtype.name,
            "leading": tuple(leading),
            "return_lse": flag("return_lse", given["return_lse"]),
            "writes": new is not None,
            "platform": platforms(given["platform"]),
        }

    def canonical_blocks(
        self,
        query: ArrayLike,
        key_cache: ArrayLike,
        value_cache: ArrayLike,
        block_table: ArrayLike,
        lengths: tuple[str, ArrayLike],
        boundaries: tuple[str, ArrayLike],
        **others: Any,
    ) -> Call:
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

    def inputs(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array | None,
        page_table: jax.Array,
        kv_lengths: jax.Array,
        kv_starts: jax.Array,
        cum_q_lens: jax.Array | None,
        key_scale: jax.Array | None,
        value_scale: jax.Array | None,
        alibi_slopes: jax.Array | None,
        softmax_aux: jax.Array | None,
        new_key: jax.Array | None,
        new_value: jax.Array | None,
        *,
        write: Any = write_pages,
        kv_dtype: str,
        softmax_scale: float,
        left: int | None,
        right: int | None,
        logits_soft_cap: float | None,
        q_length: int | None,
        latent_dim: int | None,
        **_: Any,
    ) -> PagedInputs:
        """The prepared arguments in the form that backends take, with any new tokens written to the cache."""
        # Before attention, as new tokens are among the keys that queries see.
        if new_key is not None:
            arrays = WriteInputs(
                key, value, key_scale, value_scale, new_key, new_value, page_table, kv_lengths, cum_q_lens, kv_dtype
            )
            key, value, key_scale, value_scale = applied(write, arrays)
        return PagedInputs(
            query, key, value, page_table, kv_lengths, kv_starts, cum_q_lens, key_scale, value_scale, alibi_slopes,
            softmax_aux, PagedOptions(softmax_scale, left, right, logits_soft_cap, q_length, latent_dim),
        )  # fmt: skip

    def problem(self, *args: Any, **kwargs: Any) -> PagedProblem:
        """The sizes of prepared arguments, abstract or concrete."""
        return PagedProblem.of(self.inputs(*args, **kwargs))

    def results(self, inputs: PagedInputs) -> Any:
        """``(out, lse)``: the output in the query's dtype, the log-sum-exp in that of sums."""
        rows, dtype = inputs.query.shape[:2], inputs.query.dtype
        return (
            jax.ShapeDtypeStruct((*rows, inputs.value_dim), dtype),
            jax.ShapeDtypeStruct(rows, accumulation_dtype(dtype)),
        )

    def outputs(
        self,
        inputs: PagedInputs,
        results: Results,
        *_: Any,
        leading: tuple[int, ...],
        return_lse: bool,
        writes: bool,
        **kwargs: Any,
    ) -> Any:
        """The caller's results: the output, the log-sum-exp if requested, the cache if it was written to."""
        out, lse = (result.reshape(*leading, *result.shape[1:]) for result in results)
        found: tuple[Any, ...] = (out, lse) if return_lse else (out,)
        if writes:
            cache = (inputs.key, inputs.value, inputs.key_scale, inputs.value_scale)
            found += tuple(array for array in cache if array is not None)
        return found if len(found) > 1 else out

    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """The oracle on prepared arguments, computed in the query's dtype: promote narrow arrays for exact results."""
        inputs = self.inputs(*args, write=write_reference, **kwargs)
        out, lse = paged_reference(inputs, inputs.query.dtype)
        return self.outputs(inputs, (out, lse.astype(jnp.promote_types(lse.dtype, jnp.float32))), **kwargs)

    def sample_inputs(self, invocation: Invocation[Any, Any], key: jax.Array) -> Call:
        """Normal arrays, tables of distinct pages if there are enough, lengths of at least half."""
        return sampling.sampled(invocation.abstract_args, key), dict(invocation.abstract_kwargs)

    def partitioning(self, inputs: PagedInputs) -> Partitioning | None:
        """Splits by heads and by sequences, as in the types of query and cache."""
        return paged_partitioning(inputs)

    def tolerance_factor(self, invocation: Invocation[Any, Any]) -> float:
        """The tolerance factor, which is larger with a soft cap, since that flattens the logits."""
        return 3.0 if invocation.abstract_kwargs["logits_soft_cap"] else 2.0

    def cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """The cost if sequences fill their tables: every visible key read once, every query and output moved once."""
        problem = self.problem_of(inv)
        # The windows of several queries cover more keys than that of one.
        per_sequence = problem.capacity if problem.longest_q > 1 else problem.visible
        scores = problem.tokens * problem.heads * problem.visible
        rows = problem.tokens * problem.heads * (problem.head_dim + problem.value_dim) * problem.dtype.itemsize
        flops = 2.0 * scores * (problem.head_dim + problem.value_dim)
        return Cost(flops, float(problem.sequences * per_sequence * problem.kv_bytes + rows))

    def min_cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """The cost if all lengths are zero: writing the output."""
        problem = self.problem_of(inv)
        return Cost(0.0, float(problem.tokens * problem.heads * problem.value_dim * problem.dtype.itemsize))
