"""Rotates new queries and keys and writes keys and values into pages: the inputs, and the form in plain JAX."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, Num

from tilewright.kernels.op.inputs import OpInputs, array, static
from tilewright.kernels.paged_attention.token_layout import bounded, packed_tokens
from tilewright.kernels.paged_attention.writing import Cache, WriteInputs, write_pages
from tilewright.kernels.rope.inputs import RopeInputs
from tilewright.kernels.rope.scaling import RopeScaling
from tilewright.kernels.rope.turning import turned

type Rotated = tuple[Any, Any, Any, Any, Any]
"""The rotated query, and the ``Cache``."""


class RotateInputs(OpInputs):
    """Queries, pages and the tokens to write into them; scales may be absent.

    Attributes:
      query, key, value: packed.
      cum_q_lens: ``None`` if every sequence has one token.
      positions: ``None`` for the tokens' places in the cache.
      rotary_dim: the number of elements that are rotated, the first ones of a head; ``None`` for all.
      kv_dtype: the dtype in which pages are stored; in the oracle their arrays may have a wider one.
    """

    query: Float[Array, "tokens heads head_dim"]
    key_pages: Num[Array, "num_pages page_size kv_heads head_dim"]
    value_pages: Num[Array, "num_pages page_size kv_heads value_dim"]
    _: dataclasses.KW_ONLY
    key_scale: Float[Array, "#num_pages #page_size #kv_heads"] | None = None
    value_scale: Float[Array, "#num_pages #page_size #kv_heads"] | None = None
    key: Float[Array, "tokens kv_heads head_dim"]
    value: Float[Array, "tokens kv_heads value_dim"]
    page_table: Integer[Array, "sequences pages_per_sequence"]
    kv_lengths: Integer[Array, " sequences"]
    cum_q_lens: Integer[Array, " sequences+1"] | None = array(default=None, role="call")
    positions: Integer[Array, " tokens 1"] | None = array(default=None, role="call")
    base: float = static(default=RopeInputs.base)
    scaling: RopeScaling | None = static(default=None)
    interleaved: bool = static(default=False)
    rotary_dim: int | None = static(default=None)
    kv_dtype: str = static(role="call")

    def rotation(self, x: jax.Array, positions: jax.Array) -> RopeInputs:
        """The rotation of queries or keys."""
        return RopeInputs(
            x, positions, self.base, self.scaling, interleaved=self.interleaved, rotary_dim=self.rotary_dim
        )

    def write(self, key: jax.Array) -> WriteInputs:
        """The write of keys that are rotated, and of the values."""
        return WriteInputs(
            self.key_pages,
            value_pages=self.value_pages,
            key_scale=self.key_scale,
            value_scale=self.value_scale,
            key=key,
            value=self.value,
            page_table=self.page_table,
            kv_lengths=self.kv_lengths,
            cum_q_lens=self.cum_q_lens,
            kv_dtype=self.kv_dtype,
        )

    def all_positions(self) -> Any:
        """Positions as `rotation` takes them: those given, or the tokens' places, 0 for a token without a sequence."""
        if self.positions is not None:
            return self.positions
        sequences = self.kv_lengths.shape[0]
        if sequences == 0:
            return jnp.zeros((self.query.shape[0], 1), jnp.int32)
        one = 1 if self.cum_q_lens is None else None
        tokens = packed_tokens(self.cum_q_lens, self.query.shape[0], sequences, one)
        place = bounded(self.kv_lengths)[tokens.sequence] - tokens.new + tokens.offset
        return jnp.where(tokens.owned, place, 0)[:, None]


def rotate_and_write(inputs: RotateInputs) -> Rotated:
    """The rotated query, and the cache with the rotated keys and the values."""
    positions = inputs.all_positions()
    query, key = (turned(inputs.rotation(x, positions), x, 1.0) for x in (inputs.query, inputs.key))
    cache: Cache = write_pages(inputs.write(key))
    return query, *cache
