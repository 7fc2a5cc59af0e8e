"""Tokens that are not finite, whose zeros in matmuls would be NaN in the results of tokens before them."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs, LinearAttentionResults
from tilewright.kernels.sequences import begins, sequence_ids, without_padding


@dataclasses.dataclass(frozen=True)
class FiniteTokens:
    """A call whose tokens write finite numbers, and where its results are NaN.

    A query is left as it is: it reaches nothing but its own results.

    Attributes:
      inputs: with 0 for what is NaN or infinite in keys, values and gates; a log decay of −∞ stays.
      last: ``[batch, length, value_heads]``: the last token so far of which something was; −1 before the first.
      ids: of each token its sequence, as ``sequence_ids`` has them.
    """

    inputs: LinearAttentionInputs
    last: jax.Array
    ids: jax.Array | None

    @classmethod
    def of(cls, inputs: LinearAttentionInputs) -> "FiniteTokens":
        ids = sequence_ids(
            inputs.batch,
            inputs.length,
            cum_seqlens=inputs.cum_seqlens,
            segment_ids=inputs.segment_ids,
            seq_lengths=inputs.seq_lengths,
        )
        finite = jnp.ones(inputs.value.shape[:3], bool)
        cleared: dict[str, jax.Array] = {}
        for name in ("key", "value", "log_decay", "beta", "removal_read", "removal_write"):
            array = inputs.arrays[name]
            if array is None or array.ndim == 1:
                continue
            known = array < jnp.inf if name == "log_decay" else jnp.isfinite(array)
            cleared[name] = jnp.where(known, array, jnp.zeros((), array.dtype))
            of_head = jnp.all(known, axis=-1) if array.ndim == 4 else known
            finite &= jnp.repeat(of_head, inputs.groups, axis=2) if name == "key" else of_head
        position = jnp.arange(inputs.length, dtype=jnp.int32)[None, :, None]
        broken = without_padding(~finite, ids)
        return cls(inputs.replace(**cleared), lax.cummax(jnp.where(broken, position, -1), axis=1), ids)

    def marked(self, results: LinearAttentionResults) -> LinearAttentionResults:
        """The results, NaN from such a token on to the end of its sequence, and so is the state."""
        inputs, state = self.inputs, results.state
        first: jax.Array | int = 0
        if self.ids is not None and inputs.seq_lengths is None:
            position = jnp.arange(inputs.length, dtype=jnp.int32)[None]
            first = lax.cummax(jnp.where(begins(self.ids), position, 0), axis=1)[..., None]
        reached = without_padding(self.last >= first, self.ids)
        out = None if results.out is None else jnp.where(reached[..., None], jnp.nan, results.out)
        if state is not None:
            ends = self.last[:, -1] >= 0
            if inputs.cum_seqlens is not None:
                begin, end = inputs.cum_seqlens[:-1], inputs.cum_seqlens[1:]
                at_end = self.last[0].at[end - 1].get(mode="clip")
                ends = (end > begin)[:, None] & (at_end >= begin[:, None])
            state = jnp.where(ends[..., None, None], jnp.nan, state)
        return LinearAttentionResults(out, state)
