"""Params of FlashAttention-4's kernels, and masks in their terms."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import jax.numpy as jnp
import numpy as np

from tilewright.kernels.flash_attention.mask_terms import MaskParts
from tilewright.kernels.flash_attention.operands import min_lengths
from tilewright.kernels.masks import Mask
from tilewright.ops.utils.stable_ids import stable_id

DTYPES = (np.dtype(jnp.bfloat16), np.dtype(np.float16))

WIDEST = 256
"""Maximum head dim."""


class _Tunables:
    """The base of both directions' params: None is the package's own choice for a call."""

    __slots__ = ()

    def completed(self, defaults: Self) -> Self:
        """The params with the defaults in place of every None."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        given = {field.name: getattr(self, field.name) for field in fields}
        return dataclasses.replace(defaults, **{name: x for name, x in given.items() if x is not None})  # type: ignore[type-var]


def _check_counts(params: object, names: Sequence[str]) -> None:
    for name in names:
        value = getattr(params, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{type(params).__name__} needs a positive integer, got {name}={value!r}")


@stable_id(
    "tilewright/flash_attention.Fa4ForwardParams", formerly=("tilewright.kernels.flash_attention.fa4:Fa4ForwardParams",)
)
@dataclasses.dataclass(frozen=True, slots=True)
class Fa4ForwardParams(_Tunables):
    """Tiling of the forward pass; None is FlashAttention-4's own choice for a call, or where a GPU has no choice.

    Attributes:
      block_q: query rows of a CTA: on Hopper 64 for each consumer warpgroup, on data-center Blackwell one or two tiles
        of 128.
      block_k: keys per tile.
      num_stages: tiles of keys and of values in shared memory, where that is not what is left of it.
      overlap: overlap a warpgroup's softmax with its matmuls (Hopper).
      weights_in_registers: keep P in registers between the two matmuls (Hopper).
      pack_groups: put the query heads that share a key head into one tile.
      two_ctas: a matmul is of a pair of CTAs, each with half of the keys in shared memory (data-center Blackwell).
    """

    block_q: int | None = None
    block_k: int | None = None
    num_stages: int | None = None
    overlap: bool | None = None
    weights_in_registers: bool | None = None
    pack_groups: bool | None = None
    two_ctas: bool | None = None

    def __post_init__(self) -> None:
        _check_counts(self, ("block_q", "block_k", "num_stages"))


@stable_id(
    "tilewright/flash_attention.Fa4BackwardParams",
    formerly=("tilewright.kernels.flash_attention.fa4:Fa4BackwardParams",),
)
@dataclasses.dataclass(frozen=True, slots=True)
class Fa4BackwardParams(_Tunables):
    """Tiling of the backward pass; None is FlashAttention-4's own choice for a call, or where a GPU has no choice.

    It accumulates dQ, and dK and dV of shared key heads, in no fixed order.

    Attributes:
      block_q: query rows per tile.
      block_k: keys per tile.
      query_stages: tiles of Q in shared memory.
      d_out_stages: tiles of dO; 1 or ``query_stages`` on Hopper.
      score_stages: tiles of P and dS; 1 or ``query_stages``.
      swap_scores: compute Sᵀ = KQᵀ instead of S = QKᵀ.
      swap_d_key: compute dKᵀ and dVᵀ.
      swap_d_query: compute dQᵀ.
      score_groups_q: number of warpgroups that divide the rows of S; the others divide its columns.
      d_key_groups_k: number of warpgroups that divide the keys of dK and dV.
      d_query_groups_q: number of warpgroups that divide the rows of dQ.
      groups: number of consumer warpgroups.
      one_d_query_group: compute dQ by a single warpgroup.
      two_ctas: a matmul is of a pair of CTAs (data-center Blackwell); all between the tiles and this is Hopper's, but
        for the stages of Q and dO.
    """

    deterministic: ClassVar[bool] = False

    block_q: int | None = None
    block_k: int | None = None
    query_stages: int | None = None
    d_out_stages: int | None = None
    score_stages: int | None = None
    swap_scores: bool | None = None
    swap_d_key: bool | None = None
    swap_d_query: bool | None = None
    score_groups_q: int | None = None
    d_key_groups_k: int | None = None
    d_query_groups_q: int | None = None
    groups: int | None = None
    one_d_query_group: bool | None = None
    two_ctas: bool | None = None

    def __post_init__(self) -> None:
        counts = ("block_q", "block_k", "query_stages", "d_out_stages", "score_stages")
        _check_counts(self, (*counts, "score_groups_q", "d_key_groups_k", "d_query_groups_q", "groups"))


@dataclasses.dataclass(frozen=True, slots=True)
class Fa4Mask:
    """A mask in FlashAttention-4's terms, with windows aligned at the ends of both sequences.

    Attributes:
      left: number of visible keys before the query's own; None for all.
      right: number of visible keys after it; negative if the last one is before it.
    """

    left: int | None
    right: int | None
    parts: MaskParts

    @classmethod
    def of(cls, mask: Mask | None, q_length: int, kv_length: int) -> "Fa4Mask":
        """Converts a mask to which ``reasons`` has no objection."""
        parts, more_keys = MaskParts.of(mask), kv_length - q_length
        # Clamping to these bounds changes nothing, and keeps the kernels' sums of indices small.
        lowest, highest = min(parts.band.lowest, kv_length), max(parts.band.highest, -q_length)
        return cls(
            None if lowest <= 1 - q_length else more_keys - lowest,
            None if highest >= kv_length - 1 else highest - more_keys,
            parts,
        )

    @property
    def is_band(self) -> bool:
        """True if the visible keys depend on the query's index."""
        return self.left is not None or self.right is not None

    def reasons(self) -> list[str]:
        """Reasons why the mask cannot be expressed in these terms."""
        parts = self.parts
        reasons = parts.unsupported_terms()
        if self.is_band and parts.positions is None and any(part.kv_lengths is not None for part in parts.lengths):
            reasons.append(
                "counts causality and windows from the end of each sequence's keys, so it has none beside lengths of "
                f"keys, got {parts.band}"
            )
        return reasons

    def lengths(self, batch: int, q_length: int, kv_length: int) -> tuple[Any | None, Any | None]:
        """The lengths of queries and of keys, int32 ``[batch]`` each, clipped to the arrays; None without lengths."""
        given = self.parts.lengths
        queries = [part.q_lengths for part in given if part.q_lengths is not None]
        keys = [part.kv_lengths for part in given if part.kv_lengths is not None]
        return (
            min_lengths(queries, batch, q_length) if queries else None,
            min_lengths(keys, batch, kv_length) if keys else None,
        )
