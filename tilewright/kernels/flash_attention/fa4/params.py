"""Params of FlashAttention-4's kernels, the package's own choice of them, and their limits."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Self

import jax.numpy as jnp
import numpy as np

from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.mask_terms import MaskParts
from tilewright.kernels.flash_attention.operands import (
    min_lengths,
)
from tilewright.kernels.hopper.limits import SHARED_BYTES
from tilewright.kernels.masks import Mask
from tilewright.ops.types import Direction
from tilewright.ops.utils.stable_ids import stable_id

DTYPES = (np.dtype(jnp.bfloat16), np.dtype(np.float16))

WIDEST = 256
"""Maximum head dim."""

REGISTERS = {1: 256, 2: 240, 3: 160}
"""Registers of a thread, by the number of consumer warpgroups."""


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
    """Tiling of the forward pass; None is FlashAttention-4's own choice for a call.

    Attributes:
      block_q: query rows per tile, 64 for each consumer warpgroup.
      block_k: keys per tile.
      num_stages: tiles of keys and of values in shared memory.
      overlap: overlap a warpgroup's softmax with its matmuls.
      weights_in_registers: keep P in registers between the two matmuls.
      pack_groups: put the query heads that share a key head into one tile.
    """

    block_q: int | None = None
    block_k: int | None = None
    num_stages: int | None = None
    overlap: bool | None = None
    weights_in_registers: bool | None = None
    pack_groups: bool | None = None

    def __post_init__(self) -> None:
        _check_counts(self, ("block_q", "block_k", "num_stages"))


@stable_id(
    "tilewright/flash_attention.Fa4BackwardParams",
    formerly=("tilewright.kernels.flash_attention.fa4:Fa4BackwardParams",),
)
@dataclasses.dataclass(frozen=True, slots=True)
class Fa4BackwardParams(_Tunables):
    """Tiling of the backward pass; None is FlashAttention-4's own choice for a call.

    It accumulates dQ, and dK and dV of shared key heads, in no fixed order.

    Attributes:
      block_q: query rows per tile.
      block_k: keys per tile.
      query_stages: tiles of Q in shared memory.
      d_out_stages: tiles of dO; 1 or ``query_stages``.
      score_stages: tiles of P and dS; 1 or ``query_stages``.
      swap_scores: compute Sᵀ = KQᵀ instead of S = QKᵀ.
      swap_d_key: compute dKᵀ and dVᵀ.
      swap_d_query: compute dQᵀ.
      score_groups_q: number of warpgroups that divide the rows of S; the others divide its columns.
      d_key_groups_k: number of warpgroups that divide the keys of dK and dV.
      d_query_groups_q: number of warpgroups that divide the rows of dQ.
      groups: number of consumer warpgroups.
      one_d_query_group: compute dQ by a single warpgroup.
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


def computed_dims(inputs: AttentionInputs, direction: Direction) -> tuple[int, int]:
    """The head dims of keys and of values that the kernels compute with, padded with zeros.

    Accumulators of gradients have tiles of 32 columns, above 128 of 64; for other head dims the kernels' own rounding
    is inconsistent.
    """
    widest = max(inputs.head_dim, inputs.value_dim)
    multiple = 8 if direction == "forward" else 32 if widest <= 128 else 64
    head_dim, value_dim = (-(-dim // multiple) * multiple for dim in (inputs.head_dim, inputs.value_dim))
    if 128 < head_dim <= 192 and value_dim <= 128 and (direction == "forward" or inputs.groups == 1):
        return head_dim, 128  # the only pair of different head dims with tiles
    return (max(head_dim, value_dim),) * 2


def forward_defaults(inputs: AttentionInputs, mask: Fa4Mask) -> Fa4ForwardParams:
    """FlashAttention-4's own choice on Hopper."""
    head_dim, value_dim = computed_dims(inputs, "forward")
    local = mask.left is not None or mask.right not in (None, 0)
    block_q, registers = 128, True
    if head_dim <= 64:
        block_q, block_k = 192, 128
    elif head_dim <= 96:
        block_q, block_k, registers = 192, 128 if mask.is_band else 144, False
    elif head_dim <= 128:
        block_k = 128
    elif head_dim <= 192:
        block_k = 96 if local else 128 if value_dim <= 128 else 112
    else:
        block_k = 64 if local else 80
    return Fa4ForwardParams(block_q, block_k, 2, True, registers, inputs.groups > 1)


def backward_defaults(inputs: AttentionInputs, mask: Fa4Mask) -> Fa4BackwardParams:
    """FlashAttention-4's own choice on Hopper."""
    head_dim, value_dim = computed_dims(inputs, "backward")
    narrow = Fa4BackwardParams(64, 128, 2, 2, 2, True, False, False, 1, 2, 1, 2, False)
    wide = Fa4BackwardParams(64, 96, 2, 1, 1, False, True, False, 1, 2, 1, 2, False)
    if head_dim <= 64:
        return dataclasses.replace(narrow, block_q=128, d_query_groups_q=2)
    if head_dim <= 96:
        return dataclasses.replace(narrow, one_d_query_group=True)
    if head_dim <= 128:
        return narrow if mask.is_band else dataclasses.replace(narrow, block_q=80, swap_d_query=True)
    if head_dim <= 192:
        return dataclasses.replace(wide, d_out_stages=2) if value_dim <= 128 else wide
    return dataclasses.replace(wide, block_k=48, d_key_groups_k=1)


def forward_shared_bytes(params: Any, head_dim: int, value_dim: int) -> int:
    """Bytes of a block's tiles in shared memory."""
    head_dim, value_dim = (-(-dim // 16) * 16 for dim in (head_dim, value_dim))
    p_elements = 0 if params.weights_in_registers else params.block_q * params.block_k
    # The output overwrites the queries.
    queries = params.block_q * max(head_dim, value_dim)
    return 2 * (queries + params.num_stages * params.block_k * (head_dim + value_dim) + p_elements)


def forward_params_reasons(params: Any, head_dim: int, value_dim: int) -> list[str]:
    """Reasons why complete params cannot serve these head dims."""
    reasons = []
    if params.block_q not in (64, 128, 192):
        reasons.append(f"tiles have 64, 128 or 192 queries, got {params.block_q=}")
    if params.block_k % 16 or params.block_k > 256:
        reasons.append(f"keys per tile are a multiple of 16 up to 256, got {params.block_k=}")
    needed = forward_shared_bytes(params, head_dim, value_dim) + 1024
    if needed > SHARED_BYTES:
        reasons.append(f"tiles need {needed} bytes of shared memory of {SHARED_BYTES}, got {params=}")
    if reasons:
        return reasons
    p_bytes = 4 if params.weights_in_registers else 0
    # A warpgroup has 64 rows for 128 threads: half an element of each column a thread. S and O take 4 bytes an element,
    # P another 2 where it stays in registers.
    registers = (params.block_k * (8 + p_bytes) // 8 + value_dim) // 2
    limit = REGISTERS[params.block_q // 64] - 32
    if registers > limit:
        reasons.append(f"a thread's tiles need {registers} registers of {limit}, got {params=}")
    return reasons


def backward_params_reasons(params: Any, head_dim: int, value_dim: int, grouped: bool) -> list[str]:
    """Reasons why complete params cannot serve these head dims."""
    reasons, queries, groups = [], params.query_stages, params.groups
    if not {params.d_out_stages, params.score_stages} <= {1, queries}:
        reasons.append(f"stages are 1 or as many as of queries, got {params=}")
    if groups not in ((2,) if grouped else (2, 3)):
        reasons.append(f"2 warpgroups compute, or 3 where each query head has a key of its own, got {params.groups=}")
    if params.one_d_query_group and groups != 2:
        reasons.append(f"one of two warpgroups may compute the gradient of queries, got {params.groups=}")
    of_query = 1 if params.one_d_query_group else groups
    if groups % params.score_groups_q or groups % params.d_key_groups_k or of_query % params.d_query_groups_q:
        reasons.append(f"warpgroups are divided evenly, got {params=}")
    if params.block_q % 16 or params.block_k % 16:
        reasons.append(f"tiles are multiples of 16, got {params.block_q=}, {params.block_k=}")
    if params.block_q * head_dim % 1024:
        reasons.append(f"sums are cleared 1024 at a time, got {params.block_q=}, {head_dim=}")
    # P in registers: only where Sᵀ has the layout of operand A of dV, with all warpgroups along the keys. Then dS alone
    # takes shared memory.
    in_registers = params.score_groups_q == 1 and params.d_key_groups_k == groups
    in_registers = in_registers and params.swap_scores and not params.swap_d_key
    halves = params.block_q * (queries * head_dim + params.d_out_stages * value_dim)
    halves += params.block_k * (head_dim + value_dim)
    halves += (1 if in_registers else 2) * params.score_stages * params.block_q * params.block_k
    per_row = -(-params.block_q // 64) * 64 * (queries + params.d_out_stages)
    # 16-bit tiles; and in float32 a tile of dQ, and lse and delta of every stage.
    needed = 2 * halves + 4 * (params.block_q * head_dim + per_row)
    if needed > SHARED_BYTES:
        reasons.append(f"tiles need {needed} bytes of shared memory of {SHARED_BYTES}, got {params=}")
    return reasons


def forward_candidates(inputs: AttentionInputs, mask: Fa4Mask) -> Iterator[Fa4ForwardParams]:
    first = forward_defaults(inputs, mask)
    yield first
    if inputs.groups > 1:
        yield dataclasses.replace(first, pack_groups=False)
    rows = inputs.q_length * (inputs.groups if inputs.groups > 1 else 1)
    # Compiling each takes seconds, so only sizes near the package's own.
    own_block_k = first.block_k or 128
    near = sorted((128, 176, 144, 112, 96, 80, 64), key=lambda block_k: abs(block_k - own_block_k))[:3]
    for block_q in (192, 128, 64) if rows <= 64 else (192, 128):
        for block_k in near:
            yield dataclasses.replace(first, block_q=block_q, block_k=block_k)
    yield dataclasses.replace(first, overlap=False)


def backward_candidates(inputs: AttentionInputs, mask: Fa4Mask) -> Iterator[Fa4BackwardParams]:
    first = backward_defaults(inputs, mask)
    yield first
    head_dim, _ = computed_dims(inputs, "backward")
    if head_dim <= 64:
        yield dataclasses.replace(first, block_q=64, d_query_groups_q=1)
        yield dataclasses.replace(first, block_q=64, d_query_groups_q=1, one_d_query_group=True)
    elif head_dim <= 128:
        for one_group in (False, True):
            yield dataclasses.replace(first, block_q=64, swap_d_query=False, one_d_query_group=one_group)
        yield dataclasses.replace(first, block_q=80, swap_d_query=True, one_d_query_group=False)
