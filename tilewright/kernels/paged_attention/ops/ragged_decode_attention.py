"""Ragged decoding: one query token of each sequence, over the part of a dense cache between two ends."""

import dataclasses
from typing import Any, Unpack

from jax.typing import ArrayLike

from tilewright.kernels.op.cases import Arguments
from tilewright.kernels.op.public import public_function
from tilewright.kernels.op.signatures import WITH_LSE, results
from tilewright.kernels.paged_attention import arguments
from tilewright.kernels.paged_attention.cases import ServingCase, serving_cases
from tilewright.kernels.paged_attention.inputs import PagedInputs
from tilewright.kernels.paged_attention.op import PagedAttentionKernel
from tilewright.kernels.paged_attention.options import ServingOptions
from tilewright.ops.utils.stable_ids import stable_id


@dataclasses.dataclass(frozen=True, slots=True)
class RaggedDecodeCase(ServingCase):
    """A call over ranges that end with the sequences."""

    def arguments(self, seed: int = 0) -> Arguments:
        drawn = self.drawn(seed)
        cache = drawn.dense()
        starts, ends = drawn.ranges()
        positional = (drawn.query(self.sequences), cache.key, cache.value, starts, ends)
        return positional, {**self.scales(cache), **self.options(drawn)}


@stable_id(
    "tilewright/ragged_decode_attention.RaggedDecodeAttention",
    formerly=("tilewright.kernels.ragged_decode_attention.op:RaggedDecodeAttention",),
)
class RaggedDecodeAttention(PagedAttentionKernel):
    """One query token of each sequence over a range; see ``ragged_decode_attention`` for the arguments."""

    cases = serving_cases(RaggedDecodeCase)

    def __init__(self) -> None:
        super().__init__("ragged_decode_attention")

    def prepare(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        starts: ArrayLike,
        ends: ArrayLike,
        **options: Unpack[ServingOptions],
    ) -> PagedInputs:
        """Checks a call and returns it as the core takes it."""
        queries = arguments.query_array(query, (3,), "[sequences, heads, head_dim]")
        layout = "[sequences, kv_length, kv_heads, head_dim]"
        keys, values = arguments.cache_arrays(key, arguments.required("value", value), layout)
        sequences = queries.shape[0]
        if keys.shape[0] != sequences:
            raise ValueError(f"query, key and value must have as many sequences, got {queries.shape=}, {keys.shape=}")
        return self.canonical(
            queries,
            keys,
            values,
            arguments.lengths_array("ends", ends, sequences),
            kv_starts=arguments.lengths_array("starts", starts, sequences),
            **options,
        )


_RAGGED_DECODE_ATTENTION = RaggedDecodeAttention()


@public_function(RaggedDecodeAttention.prepare)
@results(WITH_LSE)
def ragged_decode_attention(*args: Any, **kwargs: Any) -> Any:
    """Attention of one query token of each sequence over the part of a dense cache between two ends.

    Args:
      query: ``[sequences, heads, head_dim]``, float16, bfloat16, float32 or float64.
      key: ``[sequences, kv_length, kv_heads, head_dim]`` in the query's dtype, int8, float8_e4m3fn or float8_e5m2;
        ``kv_heads`` divides ``heads``.
      value: ``[sequences, kv_length, kv_heads, value_dim]`` in the same dtype.
      starts: ``[sequences]`` integers: the first visible position.
      ends: ``[sequences]``: the position after the last visible one, which is the query's.

    Returns:
      ``[sequences, heads, value_dim]`` in the query's dtype, with the log-sum-exp if asked for. An empty range gives
      zeros and −inf (the log-sum-exp of the sinks if there are any).

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    return _RAGGED_DECODE_ATTENTION(*args, **kwargs)
