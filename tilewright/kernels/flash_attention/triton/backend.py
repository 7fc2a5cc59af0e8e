"""Flash attention in Triton: what it serves, its configs, and the way to its kernels."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tilewright.kernels.dropout import keep_threshold
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.mask_terms import MaskParts, score_arrays
from tilewright.kernels.flash_attention.masking import FAR, Band
from tilewright.kernels.flash_attention.operands import (
    INT32_LIMIT,
    backward_arrays,
    bias_gradient,
    over_batch,
    wants_exact_products,
    with_positive_scale,
)
from tilewright.kernels.flash_attention.problem import AttentionProblem
from tilewright.kernels.flash_attention.results import Results, empty_backward, empty_forward, row_terms, sinks_gradient
from tilewright.kernels.footprint import block_limits
from tilewright.kernels.registry import Implementation, Platform
from tilewright.kernels.softmax import sinks_lse
from tilewright.kernels.triton import launch, unavailable
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.device import current_device
from tilewright.ops.utils.stable_ids import stable_id

DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(jnp.bfloat16))

WIDEST = 256
"""Head dim; beyond it an accumulator does not fit the registers."""

LEAST_BLOCK = 16
"""Rows, columns and depth of the smallest product of tensor cores."""

CACHED_BYTES = 16 << 20
"""Of keys and values that are worked on at a time, so that they stay in the cache between a head's programs."""

LEAST_SHARED_BYTES = 99 << 10
"""That a block may have on any compute capability from 8.0 on."""

TMA_BYTES = 16
"""Of which TMA wants a whole number between rows, and before the first."""

ROW_TERMS_BLOCK = 32
"""Rows per program of the kernel that multiplies out and its gradient."""


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@stable_id("tilewright/flash_attention.Tiles", formerly=("tilewright.kernels.flash_attention.triton:Tiles",))
@dataclasses.dataclass(frozen=True, slots=True)
class Tiles:
    """One kernel's tiles and launch.

    Attributes:
      block_q, block_k: queries and keys per tile.
      num_warps: warps per program.
      num_stages: stages of its pipelines.
      tma: whether tiles are loaded by TMA where it can be had: on compute capability 9.0 and up, for rows of a whole
        number of 16 bytes.
    """

    block_q: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 2
    tma: bool = False

    def __post_init__(self) -> None:
        for name, least, most in (
            ("block_q", LEAST_BLOCK, 256), ("block_k", LEAST_BLOCK, 256), ("num_warps", 1, 16),
        ):  # fmt: skip
            value = getattr(self, name)
            if not _is_int(value) or value & (value - 1) or not least <= value <= most:
                raise ValueError(f"{name} must be a power of two from {least} to {most}, got {self}")
        if not _is_int(self.num_stages) or not 1 <= self.num_stages <= 8:
            raise ValueError(f"num_stages must be from 1 to 8, got {self}")
        if not isinstance(self.tma, bool):
            raise ValueError(f"tma must be true or false, got {self}")

    def shared_bytes(self, resident: int, streamed: int, depth: int, itemsize: int) -> int:
        """About what a program takes: rows that stay and rows that stream, of so many elements together."""
        return (resident + self.num_stages * streamed) * depth * itemsize


@stable_id(
    "tilewright/flash_attention.TritonForwardParams",
    formerly=("tilewright.kernels.flash_attention.triton:TritonForwardParams",),
)
@dataclasses.dataclass(frozen=True, slots=True)
class TritonForwardParams:
    """How the forward kernel runs."""

    tiles: Tiles = Tiles(128, 64, 4, 3)


@stable_id(
    "tilewright/flash_attention.TritonBackwardParams",
    formerly=("tilewright.kernels.flash_attention.triton:TritonBackwardParams",),
)
@dataclasses.dataclass(frozen=True, slots=True)
class TritonBackwardParams:
    """How the backward pass runs.

    Attributes:
      key_value: of the kernel of dK and dV, which goes through tiles of queries.
      query: of that of dQ, which goes through tiles of keys; unused if not deterministic.
      deterministic: bitwise repeatable: dQ by a kernel of its own, two matrix products more. Otherwise the kernel of dK
        and dV adds to dQ in float32, in no fixed order.
    """

    key_value: Tiles = Tiles(64, 128, 8, 2)
    query: Tiles = Tiles(128, 64, 8, 2)
    deterministic: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.deterministic, bool):
            raise ValueError(f"deterministic must be true or false, got {self}")


def padded_dim(dim: int) -> int:
    """The head dim that kernels compute with."""
    return max(LEAST_BLOCK, 1 << (dim - 1).bit_length())


class TritonFlashAttention(Implementation):
    """Serves float32, float16 and bfloat16 of head dims to 256, and every option, on compute capability 8.0 and up."""

    platform: ClassVar[Platform] = Platform.TRITON
    algorithm: ClassVar[str | None] = None
    forward_params: ClassVar[type] = TritonForwardParams
    backward_params: ClassVar[type] = TritonBackwardParams
    late_import: ClassVar[str] = "triton"

    def not_supported_reasons(self, problem: AttentionProblem, device: Device, direction: Direction) -> list[str]:
        reasons = unavailable(device)
        if problem.dtype not in DTYPES:
            reasons.append(f"computes in float32, float16 or bfloat16, got {problem.dtype=}")
        if max(problem.head_dim, problem.value_dim) > WIDEST:
            reasons.append(f"head dims go to {WIDEST}, got {problem.head_dim=}, {problem.value_dim=}")
        if problem.bias is not None and problem.bias.dtype == np.float64:
            reasons.append("a bias is added in float32, got float64")
        widest, longest = max(problem.head_dim, problem.value_dim), max(problem.q_length, problem.kv_length)
        if problem.heads * widest * longest >= INT32_LIMIT:
            reasons.append(f"elements of a sequence must be counted by 32 bits, got {problem.score_shape=}, {widest=}")
        return reasons

    def heuristic(
        self, problem: AttentionProblem, device: Device, direction: Direction
    ) -> TritonForwardParams | TritonBackwardParams:
        return self.candidates(problem, device, direction)[0]

    def candidates(
        self, problem: AttentionProblem, device: Device, direction: Direction
    ) -> list[TritonForwardParams | TritonBackwardParams]:
        """Those of the list for the problem's width that a block's shared memory has room for, and in any case one."""
        listed = _listed(problem, device, direction)
        fitting = [params for params in listed if not self.config_reasons(problem, device, direction, params)]
        return fitting or [_smallest(direction)]

    def config_reasons(self, problem: AttentionProblem, device: Device, direction: Direction, params: Any) -> list[str]:
        dims, itemsize = padded_dim(problem.head_dim) + padded_dim(problem.value_dim), problem.dtype.itemsize
        if direction == "forward":
            # Products in float32 take both operands from there, those on tensor cores the queries alone.
            resident = params.tiles.block_q // (1 if itemsize == 4 else 2)
            wanted = {"tiles": params.tiles.shared_bytes(resident, params.tiles.block_k, dims, itemsize)}
        else:
            tiles = params.key_value
            wanted = {"key_value": tiles.shared_bytes(tiles.block_k, tiles.block_q, dims, itemsize)}
            if params.deterministic:
                tiles = params.query
                wanted["query"] = tiles.shared_bytes(tiles.block_q, tiles.block_k, dims, itemsize)
            elif tiles.tma:  # tiles of dQ in float32, which are added from there
                wanted["key_value"] += 4 * tiles.block_q * padded_dim(problem.head_dim)
        limits = block_limits(device.capability)
        most = LEAST_SHARED_BYTES if limits is None else limits.shared_bytes
        return [
            f"{getattr(params, name)} takes about {size} bytes of shared memory at head dims of {dims} together; "
            f"a block has {most}"
            for name, size in wanted.items()
            if size > most
        ]

    def forward(self, inputs: AttentionInputs, params: TritonForwardParams) -> Results:
        """``(out, lse)``."""
        if inputs.is_empty:
            return empty_forward(inputs)
        inputs = with_positive_scale(inputs)
        call = _Call.of(inputs)
        sinks = sinks_lse(inputs.softmax_aux)
        arrays = {
            "query": inputs.query, "key": inputs.key, "value": inputs.value,
            "sinks": None if sinks is None else sinks[None],
        }  # fmt: skip
        out, lse = call.run(functools.partial(call.forward, params), arrays | score_arrays(inputs, backward=False))
        return out, lse

    def backward(
        self,
        inputs: AttentionInputs,
        results: Results,
        cotangents: tuple[Array, Array | None],
        params: TritonBackwardParams,
    ) -> dict[str, Any]:
        """Gradients for query, key, value, bias and softmax_aux, from any backend's ``(out, lse)``."""
        if inputs.is_empty:
            return empty_backward(inputs, *results, *cotangents)
        turned, inputs = inputs.options.softmax_scale < 0, with_positive_scale(inputs)
        call, (out, lse), (d_out, d_lse) = _Call.of(inputs), results, cotangents
        arrays = backward_arrays(inputs, results, cotangents) | score_arrays(inputs, backward=True)
        d_query, d_key, d_value, *rest = call.run(functools.partial(call.backward, params), arrays)
        d_bias = d_sinks = None
        if inputs.bias is not None:
            # Stored apart, so that its sum has an order.
            d_bias = bias_gradient(rest[0], inputs.bias)
        if inputs.softmax_aux is not None:
            d_sinks = sinks_gradient(inputs, *row_terms(inputs, out, lse, d_out, d_lse))
        return {
            "query": -d_query if turned else d_query,
            "key": d_key,
            "value": d_value,
            "bias": d_bias,
            "softmax_aux": d_sinks,
        }


# By the widest head dim. On Hopper TMA leaves the registers that addresses would take; elsewhere there is none.
# For Hopper in the order of what tuning on an H100 and an H200 measured (benchmarks/results/*/attention_tuned.json).
_HOPPER_FORWARD = {
    64: ((128, 64, 4, 3, False), (64, 128, 4, 2, True), (64, 64, 4, 3, True), (128, 64, 4, 3, True),
         (128, 128, 8, 3, True), (128, 128, 8, 2, True)),
    128: ((64, 64, 4, 3, False), (64, 64, 4, 3, True), (128, 128, 8, 2, False), (128, 64, 8, 3, True)),
    256: ((64, 32, 4, 2, True), (128, 32, 8, 2, True)),
}  # fmt: skip
_FORWARD = {
    64: ((128, 64, 8, 3, False), (64, 64, 4, 3, False), (64, 32, 4, 3, False)),
    128: ((64, 64, 8, 3, False), (128, 64, 8, 3, False), (64, 32, 4, 2, False)),
    256: ((64, 32, 8, 2, False), (64, 32, 8, 1, False), (64, 16, 8, 1, False)),
}
# The tiles of queries and keys of dK and dV, which those of dQ have the other way round, and last whether the pass is
# deterministic. Without TMA, where to add to dQ takes all registers, so it always is.
_HOPPER_BACKWARD = {
    64: ((64, 64, 4, 2, True, True), (64, 64, 4, 2, True, False), (64, 128, 8, 3, True, True),
         (64, 128, 8, 2, True, True), (64, 128, 8, 2, True, False)),
    128: ((64, 64, 4, 2, True, True), (64, 128, 8, 2, True, True), (64, 128, 8, 2, True, False),
          (64, 128, 8, 1, True, False), (64, 64, 8, 2, True, False), (64, 64, 8, 2, True, True)),
    256: ((32, 64, 8, 2, True, False), (32, 64, 8, 2, True, True), (16, 64, 8, 2, True, True)),
}  # fmt: skip
_BACKWARD = {
    64: ((32, 128, 8, 2, False, True), (64, 64, 4, 2, False, True), (32, 64, 4, 2, False, True)),
    128: ((32, 64, 8, 2, False, True), (32, 64, 4, 1, False, True)),
    256: ((16, 64, 8, 1, False, True), (32, 64, 8, 1, False, True)),
}
# Where a tile of scores is loaded beside its product, all of whose addresses take registers.
_SCORES_FORWARD = ((64, 64, 8, 2, True), (64, 32, 4, 2, True), (32, 32, 4, 1, True))
_HOPPER_SCORES_FORWARD = ((64, 32, 4, 2, True), (64, 64, 8, 2, True), (32, 32, 4, 1, True))
_HOPPER_SCORES_BACKWARD = ((32, 64, 4, 1, True, True), (64, 64, 8, 2, True, True), (32, 32, 4, 1, True, True))
_SCORES_BACKWARD = ((32, 64, 8, 1, False, True), (32, 32, 4, 1, False, True))
_WIDE_SCORES_BACKWARD = ((32, 64, 8, 2, True, True), (16, 32, 4, 1, True, True))
_FLOAT32_FORWARD = ((64, 32, 4, 2, False), (64, 32, 4, 1, False), (32, 16, 4, 1, False))
_FLOAT32_BACKWARD = ((16, 32, 4, 1, False, True), (16, 16, 4, 1, False, True))


def _listed(problem: AttentionProblem, device: Device, direction: Direction) -> list[Any]:
    """All params for a call's width, best guess first."""
    forward, widest, tma = direction == "forward", max(problem.head_dim, problem.value_dim), _has_tma(problem, device)
    sizes: tuple[tuple[Any, ...], ...]
    if problem.dtype.itemsize == 4:
        sizes = _FLOAT32_FORWARD if forward else _FLOAT32_BACKWARD
    elif problem.bias is not None or MaskParts.of(problem.mask).matrix is not None:
        hopper = tma and widest <= 128
        if forward:
            sizes = _HOPPER_SCORES_FORWARD if hopper else _SCORES_FORWARD
        else:
            narrow = _HOPPER_SCORES_BACKWARD if tma else _SCORES_BACKWARD
            sizes = narrow if widest <= 128 else _WIDE_SCORES_BACKWARD
    else:
        tables = (_HOPPER_FORWARD, _HOPPER_BACKWARD) if tma else (_FORWARD, _BACKWARD)
        table: Mapping[int, tuple[tuple[Any, ...], ...]] = tables[0] if forward else tables[1]
        sizes = next(listed for width, listed in table.items() if widest <= width)
        # What is known of single rows takes registers, and so does the derivative of the cap. (What stands first for
        # Hopper was measured to be first with these, too.)
        capped = problem.options.logits_soft_cap is not None and not forward
        if not tma and (problem.dropout or MaskParts.of(problem.mask).has_rows or capped):
            sizes = tuple(sorted(sizes, key=lambda size: size[0] * size[1] // size[2]))
    if forward:
        return [TritonForwardParams(Tiles(*size)) for size in sizes]
    return [
        TritonBackwardParams(Tiles(few, many, warps, stages, tma), Tiles(many, few, warps, stages, tma), repeats)
        for few, many, warps, stages, tma, repeats in sizes
    ]


def _has_tma(problem: AttentionProblem, device: Device) -> bool:
    """Whether the call's tiles can be loaded by TMA."""
    whole = all(dim * problem.dtype.itemsize % TMA_BYTES == 0 for dim in (problem.head_dim, problem.value_dim))
    return whole and (device.capability or (0, 0)) >= (9, 0)


def _smallest(direction: Direction) -> TritonForwardParams | TritonBackwardParams:
    tiles = Tiles(LEAST_BLOCK, LEAST_BLOCK, 4, 1)
    return TritonForwardParams(tiles) if direction == "forward" else TritonBackwardParams(tiles, tiles)


_SHARED = frozenset({"bias", "mask", "q_rows", "kv_rows", "key_ranges", "query_ranges", "sinks"})
"""Arrays that may have one of the batch."""

_ABSENT = {
    "bias": np.float32, "q_rows": np.int32, "kv_rows": np.int32, "mask": np.uint8, "key_ranges": np.int32,
    "query_ranges": np.int32, "sinks": np.float32, "dropout_keys": np.uint32, "d_lse": np.float32,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Call:
    """What the kernels are told of a call that its arrays do not say."""

    problem: AttentionProblem
    parts: MaskParts

    @classmethod
    def of(cls, inputs: AttentionInputs) -> "_Call":
        problem = AttentionProblem.of(inputs)
        return cls(problem, MaskParts.of(problem.mask))

    def run(self, function: Any, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        given = {name: array for name, array in arrays.items() if array is not None}
        return over_batch(function, self.problem.batch, given, _SHARED)

    def forward(self, params: TritonForwardParams, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        """``(out, lse)`` of arrays whose batch may be larger than the call's."""
        from tilewright.kernels.flash_attention.triton.forward import attention_forward

        problem, tiles = self.problem, params.tiles
        batch, (heads, q_length) = arrays["query"].shape[0], (problem.heads, problem.q_length)
        given = dict(arrays)
        if "sinks" in given:
            given["sinks"] = jnp.broadcast_to(given["sinks"], (batch, heads))
        names = ("query", "key", "value", "bias", "q_rows", "kv_rows", "mask", "key_ranges", "sinks", "dropout_keys")
        outputs = [
            jax.ShapeDtypeStruct((batch, q_length, heads, problem.value_dim), problem.dtype),
            jax.ShapeDtypeStruct((batch, heads, q_length), np.float32),
        ]
        constants = self._constants(arrays, "key_ranges", tiles, batch * heads, problem.groups)
        constants |= {"SINKS": "sinks" in given} | self._by_queries(arrays, tiles)
        return self._launch(attention_forward, given, names, outputs, _cdiv(q_length, tiles.block_q), constants, tiles)

    def backward(self, params: TritonBackwardParams, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        """``(d_query, d_key, d_value)`` and the gradient of every logit where there is a bias."""

        problem, batch = self.problem, arrays["query"].shape[0]
        given = dict(arrays)
        given["deltas"], given["exponents"] = self._row_terms(given, batch)
        given["d_bias"] = given["d_query"] = jnp.zeros((0,), np.float32)
        if "bias" in given:
            # What no program sees has no gradient.
            given["d_bias"] = jnp.zeros((batch, *problem.score_shape[1:]), np.float32)
        if params.deterministic:
            d_key, d_value = self._key_value_gradients(params.key_value, given, ())
            d_query, *d_bias = self._query_gradients(params.query, given)
            return d_query, d_key, d_value, *d_bias
        shape = batch, problem.heads, problem.head_dim, _whole_length(problem.q_length)
        given["d_query"] = jnp.zeros(shape, np.float32)
        updated = ("d_query", "d_bias") if "bias" in given else ("d_query",)
        d_key, d_value, total, *d_bias = self._key_value_gradients(params.key_value, given, updated)
        d_query = (total * problem.options.softmax_scale).astype(problem.dtype)[..., : problem.q_length]
        return d_query.transpose(0, 3, 1, 2), d_key, d_value, *d_bias

    def _key_value_gradients(
        self, tiles: Tiles, arrays: Mapping[str, Any], updated: tuple[str, ...]
    ) -> tuple[Any, ...]:
        """``(d_key, d_value)`` and the arrays of the names ``updated``: those of dQ's products with them."""
        from tilewright.kernels.flash_attention.triton.backward import attention_key_value_gradients

        problem = self.problem
        outputs = [jax.ShapeDtypeStruct(arrays[name].shape, problem.dtype) for name in ("key", "value")]
        constants = self._constants(arrays, "query_ranges", tiles, arrays["query"].shape[0] * problem.kv_heads, 1)
        constants |= self._by_keys(arrays, tiles, fused=bool(updated))
        return self._launch(
            attention_key_value_gradients, arrays,
            (*_BACKWARD_INPUTS, "query_ranges", "dropout_keys", "d_query", "d_bias"), outputs,
            _cdiv(problem.kv_length, tiles.block_k), constants, tiles, problem.kv_heads, updated,
        )  # fmt: skip

    def _query_gradients(self, tiles: Tiles, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        """``d_query``, and ``d_bias`` where there is a bias."""
        from tilewright.kernels.flash_attention.triton.backward import attention_query_gradients

        problem = self.problem
        constants = self._constants(
            arrays, "key_ranges", tiles, arrays["query"].shape[0] * problem.heads, problem.groups
        ) | self._by_queries(arrays, tiles)
        return self._launch(
            attention_query_gradients, arrays, (*_BACKWARD_INPUTS, "key_ranges", "dropout_keys", "d_bias"),
            [jax.ShapeDtypeStruct(arrays["query"].shape, problem.dtype)], _cdiv(problem.q_length, tiles.block_q),
            constants, tiles, updated=("d_bias",) if "bias" in arrays else (),
        )  # fmt: skip

    def _row_terms(self, arrays: Mapping[str, Any], batch: int) -> tuple[Any, ...]:
        from tilewright.kernels.flash_attention.triton.backward import attention_row_terms

        heads, q_length, value_dim = self.problem.heads, self.problem.q_length, self.problem.value_dim
        d_lse = arrays.get("d_lse", jnp.zeros((0,), np.float32))
        return launch(
            attention_row_terms,
            [arrays["out"], arrays["d_out"], arrays["lse"], d_lse],
            [jax.ShapeDtypeStruct((batch, heads, _whole_length(q_length)), np.float32)] * 2,
            grid=[_cdiv(q_length, ROW_TERMS_BLOCK) * batch * heads],
            scalars={"q_length": q_length},
            constants={
                "HEADS": heads, "HEAD_VALUE_DIM": value_dim, "VALUE_DIM": padded_dim(value_dim),
                "BLOCK": ROW_TERMS_BLOCK, "HAS_D_LSE": "d_lse" in arrays,
            },
        )  # fmt: skip

    def _launch(
        self, kernel: Any, arrays: Mapping[str, Any], names: tuple[str, ...], outputs: list[jax.ShapeDtypeStruct],
        tiles_of_a_head: int, constants: Mapping[str, Any], tiles: Tiles, heads: int = 0,
        updated: tuple[str, ...] = (),
    ) -> tuple[Any, ...]:  # fmt: skip
        """The outputs, then the arrays of the names ``updated``, which the kernel adds to or writes in part."""
        problem, batch = self.problem, arrays["query"].shape[0]
        absent = {name: jnp.zeros((0,), _ABSENT[name]) for name in names if name not in arrays}
        return launch(
            kernel,
            [arrays.get(name, absent.get(name)) for name in names],
            [*outputs, *(jax.ShapeDtypeStruct(arrays[name].shape, arrays[name].dtype) for name in updated)],
            grid=[tiles_of_a_head * batch * (heads or problem.heads)],
            scalars={"q_length": problem.q_length, "kv_length": problem.kv_length},
            constants=constants,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            in_place={len(outputs) + i: names.index(name) for i, name in enumerate(updated)},
        )

    def _by_queries(self, arrays: Mapping[str, Any], tiles: Tiles) -> dict[str, Any]:
        """What kernels are told whose programs have a tile of queries and go through keys."""
        return self._walk("key_ranges" in arrays, self.parts.band, self.problem.kv_length % tiles.block_k != 0)

    def _by_keys(self, arrays: Mapping[str, Any], tiles: Tiles, fused: bool) -> dict[str, Any]:
        """What the kernel is told whose programs have a tile of keys and go through queries."""
        problem, band = self.problem, self.parts.band
        uneven = problem.q_length % tiles.block_q != 0 or (fused and problem.kv_length % tiles.block_k != 0)
        walk = self._walk("query_ranges" in arrays, band.transposed, uneven)
        return walk | {"GROUPS": problem.groups, "FUSED": fused}

    def _walk(self, ranged: bool, band: Band, uneven: bool) -> dict[str, Any]:
        """Which of the parts of ``visible_span`` there are, by bits, and whether the last programs have most to do.

        Those begin, so that they do not end last. ``band`` is where others are seen from a program's own.
        """
        ends = {"LAST_FIRST": band.lowest <= -FAR and band.highest < FAR}
        if ranged:
            return ends | {"PARTS": 0b100}
        return ends | {"PARTS": (band.lowest > -FAR) | 0b010 | (band.highest < FAR or uneven) << 2}

    def _constants(
        self, arrays: Mapping[str, Any], ranges: str, tiles: Tiles, places: int, sharing: int
    ) -> dict[str, Any]:
        """What all three kernels are compiled for; ``sharing`` programs of neighbouring heads have the same keys."""
        problem, options, parts, band = self.problem, self.problem.options, self.parts, self.parts.band
        worked_on = problem.kv_length * (problem.head_dim + problem.value_dim) * problem.dtype.itemsize
        at_once = max(CACHED_BYTES // max(worked_on, 1), 1) * sharing
        exact = wants_exact_products(options, problem.dtype)
        return {
            "HEADS": problem.heads,
            "GROUPS": problem.groups,
            "HEAD_DIM": problem.head_dim,
            "HEAD_VALUE_DIM": problem.value_dim,
            "DIM": padded_dim(problem.head_dim),
            "VALUE_DIM": padded_dim(problem.value_dim),
            "BLOCK_Q": tiles.block_q,
            "BLOCK_K": tiles.block_k,
            "AT_ONCE": max(count for count in range(1, min(at_once, places) + 1) if places % count == 0),
            "SCALE": float(options.softmax_scale),
            "SOFT_CAP": float(options.logits_soft_cap or 0.0),
            "LOWEST": band.lowest,
            "HIGHEST": band.highest,
            "BANDED": parts.positions is None and band != Band(),
            "ROWS": parts.has_rows,
            "ROWS_BATCH": int("q_rows" in arrays and arrays["q_rows"].shape[0] > 1),
            "COLUMNS_BATCH": int("kv_rows" in arrays and arrays["kv_rows"].shape[0] > 1),
            "MASK": _shape_bits(arrays.get("mask")),
            "RANGES": _shape_bits(arrays.get(ranges)),
            "BIAS": _shape_bits(arrays.get("bias")),
            "THRESHOLD": keep_threshold(options.dropout_prob) if problem.dropout else 0,
            "KEEP_SCALE": 1.0 / (1.0 - options.dropout_prob),
            "PRECISION": "tf32x3" if exact else "tf32",
            "TMA": tiles.tma and _has_tma(problem, current_device()),
        }


_BACKWARD_INPUTS = (
    "query", "key", "value", "d_out", "exponents", "deltas", "bias", "q_rows", "kv_rows", "mask",
)  # fmt: skip


def _shape_bits(array: Any) -> int:
    """Which dimensions of an array of scores are more than one, the batch the highest of four bits; -1 for no array."""
    if array is None:
        return -1
    return sum(bit for bit, size in zip((8, 4, 2, 1), array.shape, strict=True) if size > 1)


def _whole_length(length: int) -> int:
    """As the kernels' ``whole_length``."""
    return _cdiv(length, 4) * 4


def _cdiv(length: int, block: int) -> int:
    return -(-length // block)
