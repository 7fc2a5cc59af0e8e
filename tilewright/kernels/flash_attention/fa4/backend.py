"""Flash attention by FlashAttention-4's kernels for Hopper: what they serve, and the way to their layouts and back."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Self

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tilewright.kernels.flash_attention.fa4 import cute
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.mask_terms import MaskParts
from tilewright.kernels.flash_attention.operands import (
    least_lengths,
    over_batch,
    widened,
    with_blind_rows,
    with_positive_scale,
    without_blind_rows,
    without_hidden,
)
from tilewright.kernels.flash_attention.problem import AttentionProblem
from tilewright.kernels.flash_attention.results import Results, empty_backward, empty_forward
from tilewright.kernels.registry import Implementation, Platform
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.stable_ids import stable_id

DTYPES = (np.dtype(jnp.bfloat16), np.dtype(np.float16))

WIDEST = 256
"""Elements of a head."""

SHARED_BYTES = 232448
"""Shared memory that a block may have on compute capability 9.0."""

REGISTERS = {1: 256, 2: 240, 3: 160}
"""Of a thread, by the warpgroups that compute."""


class _Tunables:
    """What both directions' params have in common: None is what the package itself picks for a call."""

    __slots__ = ()

    def completed(self, defaults: Self) -> Self:
        """With the defaults in place of every None."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        given = {field.name: getattr(self, field.name) for field in fields}
        return dataclasses.replace(defaults, **{name: x for name, x in given.items() if x is not None})  # type: ignore[type-var]


def _check_counts(params: Any, names: Sequence[str]) -> None:
    for name in names:
        value = getattr(params, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{type(params).__name__} needs a positive integer, got {name}={value!r}")


@stable_id(
    "tilewright/flash_attention.Fa4ForwardParams", formerly=("tilewright.kernels.flash_attention.fa4:Fa4ForwardParams",)
)
@dataclasses.dataclass(frozen=True, slots=True)
class Fa4ForwardParams(_Tunables):
    """How the forward pass is tiled; None is what FlashAttention-4 itself picks for a call.

    Attributes:
      block_q: query rows per tile, 64 for each warpgroup that computes.
      block_k: keys per tile.
      num_stages: tiles of keys and of values in shared memory.
      overlap: whether a warpgroup's softmax runs beside its products.
      weights_in_registers: whether probabilities stay there between the two products.
      pack_groups: whether the query heads that share a key share a tile.
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
    """How the backward pass is tiled; None is what FlashAttention-4 itself picks for a call.

    It adds the gradient of the queries, and of keys that query heads share, in no fixed order.

    Attributes:
      block_q: query rows per tile.
      block_k: keys per tile.
      query_stages: tiles of queries in shared memory.
      d_out_stages: tiles of the gradient of the output; 1 or as many as of queries.
      score_stages: tiles of probabilities and of their gradient; 1 or as many as of queries.
      swap_scores: whether the product of keys and queries is computed instead of that of queries and keys.
      swap_d_key: whether gradients of keys and values are computed with the head dim first.
      swap_d_query: whether the gradient of queries is.
      score_groups_q: among how many warpgroups the rows of a tile of scores are divided; its columns among the rest.
      d_key_groups_k: the same of the keys of the gradients of keys and values.
      d_query_groups_q: the same of the rows of the gradient of queries.
      groups: warpgroups that compute.
      one_d_query_group: whether one of them computes the gradient of queries alone.
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
    """A mask in FlashAttention-4's terms, which counts a window from the end of both sequences.

    Attributes:
      left: keys before the query's own that it sees; None is all.
      right: keys after it; negative where the last one is before it.
    """

    left: int | None
    right: int | None
    parts: MaskParts

    @classmethod
    def of(cls, mask: Any, q_length: int, kv_length: int) -> "Fa4Mask":
        """The terms for a mask that ``reasons`` says nothing against."""
        parts, more_keys = MaskParts.of(mask), kv_length - q_length
        # Past these bounds nothing changes, and the kernels' sums of indices stay small.
        lowest, highest = min(parts.band.lowest, kv_length), max(parts.band.highest, -q_length)
        return cls(
            None if lowest <= 1 - q_length else more_keys - lowest,
            None if highest >= kv_length - 1 else highest - more_keys,
            parts,
        )

    @property
    def is_band(self) -> bool:
        """Whether a query's index says anything of the keys that it sees."""
        return self.left is not None or self.right is not None

    def reasons(self) -> list[str]:
        """What of the mask has no such terms."""
        reasons, parts = [], self.parts
        if parts.segments is not None:
            reasons.append("has no segments, of which packed sequences are made as well")
        if parts.positions is not None:
            reasons.append("takes a query's index for its position, got positions of their own")
        if parts.matrix is not None:
            reasons.append("masks by causality, windows and lengths, got a mask that is none of them")
        if self.is_band and parts.positions is None and any(part.kv_lengths is not None for part in parts.lengths):
            reasons.append(
                "counts causality and windows from the end of each sequence's keys, so it has none beside lengths of "
                f"keys, got {parts.band}"
            )
        return reasons

    def lengths(self, batch: int, q_length: int, kv_length: int) -> tuple[Any | None, Any | None]:
        """Of queries and of keys, int32 ``[batch]`` each, none beyond its array; None if all are whole."""
        given = self.parts.lengths
        queries = [part.q_lengths for part in given if part.q_lengths is not None]
        keys = [part.kv_lengths for part in given if part.kv_lengths is not None]
        return (
            least_lengths(queries, batch, q_length) if queries else None,
            least_lengths(keys, batch, kv_length) if keys else None,
        )


def computed_dims(problem: AttentionProblem, direction: Direction) -> tuple[int, int]:
    """The head dims of keys and of values that the kernels get; the rest of a head is zeros.

    Sums of gradients are of tiles of 32 columns, above 128 of 64, where the kernels' own rounding does not agree with
    itself for other head dims.
    """
    widest = max(problem.head_dim, problem.value_dim)
    multiple = 8 if direction == "forward" else 32 if widest <= 128 else 64
    head_dim, value_dim = (-(-dim // multiple) * multiple for dim in (problem.head_dim, problem.value_dim))
    if 128 < head_dim <= 192 and value_dim <= 128 and (direction == "forward" or problem.groups == 1):
        return head_dim, 128  # the one pair of different head dims that there are tiles for
    return (max(head_dim, value_dim),) * 2


def forward_defaults(problem: AttentionProblem, mask: Fa4Mask) -> Fa4ForwardParams:
    """FlashAttention-4's own choice on Hopper."""
    head_dim, value_dim = computed_dims(problem, "forward")
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
    return Fa4ForwardParams(block_q, block_k, 2, True, registers, problem.groups > 1)


def backward_defaults(problem: AttentionProblem, mask: Fa4Mask) -> Fa4BackwardParams:
    """FlashAttention-4's own choice on Hopper."""
    head_dim, value_dim = computed_dims(problem, "backward")
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
    """Of the tiles of a block in shared memory."""
    head_dim, value_dim = (-(-dim // 16) * 16 for dim in (head_dim, value_dim))
    weights = 0 if params.weights_in_registers else params.block_q * params.block_k
    # The output takes the queries' place.
    queries = params.block_q * max(head_dim, value_dim)
    return 2 * (queries + params.num_stages * params.block_k * (head_dim + value_dim) + weights)


def forward_params_reasons(params: Any, head_dim: int, value_dim: int) -> list[str]:
    """Why complete params cannot serve these head dims."""
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
    weights = 4 if params.weights_in_registers else 0
    registers = (params.block_k * (8 + weights) // 8 + value_dim) // 2
    limit = REGISTERS[params.block_q // 64] - 32
    if registers > limit:
        reasons.append(f"a thread's tiles need {registers} registers of {limit}, got {params=}")
    return reasons


def backward_params_reasons(params: Any, head_dim: int, value_dim: int, grouped: bool) -> list[str]:
    """Why complete params cannot serve these head dims."""
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
    in_registers = params.score_groups_q == 1 and params.d_key_groups_k == groups
    in_registers = in_registers and params.swap_scores and not params.swap_d_key
    halves = params.block_q * (queries * head_dim + params.d_out_stages * value_dim)
    halves += params.block_k * (head_dim + value_dim)
    halves += (1 if in_registers else 2) * params.score_stages * params.block_q * params.block_k
    per_row = -(-params.block_q // 64) * 64 * (queries + params.d_out_stages)
    needed = 2 * halves + 4 * (params.block_q * head_dim + per_row)
    if needed > SHARED_BYTES:
        reasons.append(f"tiles need {needed} bytes of shared memory of {SHARED_BYTES}, got {params=}")
    return reasons


class Fa4FlashAttention(Implementation):
    """Serves float16 and bfloat16 with causal masks, windows, a soft cap and lengths, on compute capability 9.0."""

    platform: ClassVar[Platform] = Platform.CUDA
    algorithm: ClassVar[str | None] = "fa4"
    forward_params: ClassVar[type] = Fa4ForwardParams
    backward_params: ClassVar[type] = Fa4BackwardParams
    late_import: ClassVar[str] = "tilewright.kernels.flash_attention.fa4.cute:kernels"

    def not_supported_reasons(self, problem: AttentionProblem, device: Device, direction: Direction) -> list[str]:
        if device.kind != "gpu" or device.capability is None or device.capability[0] != 9:
            return [f"is for GPUs of compute capability 9.x alone, got {device.name} ({device.capability=})"]
        reasons, options = cute.package_reasons(), problem.options
        if problem.dtype not in DTYPES:
            reasons.append(f"computes in float16 or bfloat16, got {problem.dtype=}")
        if problem.bias is not None:
            reasons.append("adds no bias")
        if problem.sinks:
            reasons.append("has no sinks as it is called here")
        if problem.dropout:
            reasons.append("drops nothing")
        if options.softmax_scale == 0:
            reasons.append("a scale of 0 leaves no logit to be masked")
        if 0 in (*problem.score_shape, problem.head_dim, problem.value_dim):
            return reasons
        if max(problem.head_dim, problem.value_dim) > WIDEST:
            dims = f"{problem.head_dim=}, {problem.value_dim=}"
            reasons.append(f"a head has up to {WIDEST} elements, got {dims}")
        return reasons + Fa4Mask.of(problem.mask, problem.q_length, problem.kv_length).reasons()

    def heuristic(
        self, problem: AttentionProblem, device: Device, direction: Direction
    ) -> Fa4ForwardParams | Fa4BackwardParams:
        mask = Fa4Mask.of(problem.mask, problem.q_length, problem.kv_length)
        return forward_defaults(problem, mask) if direction == "forward" else backward_defaults(problem, mask)

    def candidates(
        self, problem: AttentionProblem, device: Device, direction: Direction
    ) -> list[Fa4ForwardParams | Fa4BackwardParams]:
        """The package's own choice, and tiles around it that fit."""
        mask = Fa4Mask.of(problem.mask, problem.q_length, problem.kv_length)
        found: Iterator[Fa4ForwardParams | Fa4BackwardParams]
        found = _forward_candidates(problem, mask) if direction == "forward" else _backward_candidates(problem, mask)
        fitting = (each for each in found if not self.config_reasons(problem, device, direction, each))
        return list(dict.fromkeys(fitting))

    def config_reasons(self, problem: AttentionProblem, device: Device, direction: Direction, params: Any) -> list[str]:
        if 0 in (*problem.score_shape, problem.head_dim, problem.value_dim):
            return []
        mask, dims = Fa4Mask.of(problem.mask, problem.q_length, problem.kv_length), computed_dims(problem, direction)
        if direction == "forward":
            return forward_params_reasons(params.completed(forward_defaults(problem, mask)), *dims)
        complete = params.completed(backward_defaults(problem, mask))
        return backward_params_reasons(complete, *dims, problem.groups > 1)

    def forward(self, inputs: AttentionInputs, params: Fa4ForwardParams) -> Results:
        """``(out, lse)``."""
        if inputs.is_empty:
            return empty_forward(inputs)
        call = _Call.of(with_positive_scale(inputs))
        if call.sees_nothing:
            return empty_forward(inputs)
        complete = params.completed(forward_defaults(call.problem, call.mask))
        out, lse = call.run(cute.forward, call.operands("forward"), complete)
        out = out[..., : call.problem.value_dim]
        return with_blind_rows(out, lse, call.rows_that_see())

    def backward(
        self,
        inputs: AttentionInputs,
        results: Results,
        cotangents: tuple[Array, Array | None],
        params: Fa4BackwardParams,
    ) -> dict[str, Any]:
        """Gradients for query, key and value, from any backend's ``(out, lse)``."""
        if inputs.is_empty:
            return empty_backward(inputs, *results, *cotangents)
        turned = inputs.options.softmax_scale < 0
        call, dtype = _Call.of(with_positive_scale(inputs)), inputs.query.dtype
        if call.sees_nothing:
            return empty_backward(inputs, *results, *cotangents)
        complete = params.completed(backward_defaults(call.problem, call.mask))
        out, d_out = results[0].astype(dtype), cotangents[0].astype(dtype)
        lse = results[1].astype(jnp.float32)
        d_lse = None if cotangents[1] is None else cotangents[1].astype(jnp.float32)
        blind = jnp.isneginf(lse) if call.rows_that_see() is not None else None
        out, d_out, lse, d_lse = without_blind_rows(out, d_out, lse, d_lse, blind)
        _, value_dim = computed_dims(call.problem, "backward")
        arrays = {**call.operands("backward"), "lse": lse, "d_lse": d_lse}
        arrays |= {"out": widened(out, value_dim), "d_out": widened(d_out, value_dim)}
        d_query, d_key, d_value = call.run(cute.backward, arrays, complete)
        d_query, d_key, d_value = without_hidden(d_query, d_key, d_value, blind, call.lengths[1])
        head_dim, value_dim = call.problem.head_dim, call.problem.value_dim
        return {
            "query": (-d_query if turned else d_query)[..., :head_dim],
            "key": d_key[..., :head_dim],
            "value": d_value[..., :value_dim],
            "bias": None,
            "softmax_aux": None,
        }


def _forward_candidates(problem: AttentionProblem, mask: Fa4Mask) -> Iterator[Fa4ForwardParams]:
    first = forward_defaults(problem, mask)
    yield first
    if problem.groups > 1:
        yield dataclasses.replace(first, pack_groups=False)
    rows = problem.q_length * (problem.groups if problem.groups > 1 else 1)
    # Each is compiled for seconds, so only those next to the package's own.
    own = first.block_k or 128
    near = sorted((128, 176, 144, 112, 96, 80, 64), key=lambda block_k: abs(block_k - own))[:3]
    for block_q in (192, 128, 64) if rows <= 64 else (192, 128):
        for block_k in near:
            yield dataclasses.replace(first, block_q=block_q, block_k=block_k)
    yield dataclasses.replace(first, overlap=False)


def _backward_candidates(problem: AttentionProblem, mask: Fa4Mask) -> Iterator[Fa4BackwardParams]:
    first = backward_defaults(problem, mask)
    yield first
    head_dim, _ = computed_dims(problem, "backward")
    if head_dim <= 64:
        yield dataclasses.replace(first, block_q=64, d_query_groups_q=1)
        yield dataclasses.replace(first, block_q=64, d_query_groups_q=1, one_d_query_group=True)
    elif head_dim <= 128:
        for one in (False, True):
            yield dataclasses.replace(first, block_q=64, swap_d_query=False, one_d_query_group=one)
        yield dataclasses.replace(first, block_q=80, swap_d_query=True, one_d_query_group=False)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call, its sizes and its mask in FlashAttention-4's terms."""

    inputs: AttentionInputs
    problem: AttentionProblem
    mask: Fa4Mask
    lengths: tuple[Any | None, Any | None]

    @classmethod
    def of(cls, inputs: AttentionInputs) -> "_Call":
        problem = AttentionProblem.of(inputs)
        sizes = problem.q_length, problem.kv_length
        mask = Fa4Mask.of(inputs.mask, *sizes)
        return cls(inputs, problem, mask, mask.lengths(problem.batch, *sizes))

    def operands(self, direction: Direction) -> dict[str, Any]:
        """What both directions take."""
        head_dim, value_dim = computed_dims(self.problem, direction)
        arrays = {name: widened(getattr(self.inputs, name), head_dim) for name in ("query", "key")}
        arrays["value"] = widened(self.inputs.value, value_dim)
        if not self.mask.is_band:  # which is counted from the ends of the whole arrays
            lengths = zip(("q_lengths", "kv_lengths"), self.lengths, strict=True)
            # A sequence without any query or key is not left to the kernels: its rows are set right later.
            arrays |= {name: None if x is None else jnp.maximum(x, 1) for name, x in lengths}
        return arrays

    def seen_keys(self) -> tuple[np.ndarray, np.ndarray]:
        """The first and the last key that the band shows to each query; the last is before the first for none."""
        band, rows = self.mask.parts.band, np.arange(self.problem.q_length)
        return np.maximum(rows + band.lowest, 0), np.minimum(rows + band.highest, self.problem.kv_length - 1)

    @property
    def sees_nothing(self) -> bool:
        """Whether no query sees any key, whatever the lengths are."""
        first, last = self.seen_keys()
        return bool((first > last).all())

    def rows_that_see(self) -> Any:
        """``[batch|1, 1, q_length]``: whether a query sees any key; None where each does."""
        q_length, kv_length = self.problem.q_length, self.problem.kv_length
        (first, last), (q_lengths, kv_lengths) = self.seen_keys(), self.lengths
        if q_lengths is None and kv_lengths is None:
            return None if (first <= last).all() else jnp.asarray(first <= last)[None, None, :]
        seen = jnp.asarray(first <= last)[None]
        if kv_lengths is not None:
            seen = seen & (jnp.asarray(np.minimum(first, kv_length), jnp.int32) < kv_lengths[:, None])
        if q_lengths is not None:
            seen = seen & (jnp.arange(q_length, dtype=jnp.int32) < q_lengths[:, None])
        return seen[:, None, :]

    def run(self, function: Any, arrays: dict[str, Any], params: Any) -> tuple[Any, ...]:
        """``function`` of arrays that lead with the batch."""
        options = self.inputs.options
        soft_cap = None if options.logits_soft_cap is None else float(options.logits_soft_cap)
        scores = cute.Scores(float(options.softmax_scale), soft_cap, self.mask.left, self.mask.right)

        def call(given: dict[str, Any]) -> tuple[Any, ...]:
            lengths = given.get("q_lengths"), given.get("kv_lengths")
            others = {name: array for name, array in given.items() if name not in ("q_lengths", "kv_lengths")}
            return tuple(function(**others, lengths=lengths, scores=scores, params=params))

        given = {name: array for name, array in arrays.items() if array is not None}
        return over_batch(call, self.problem.batch, given, frozenset())
