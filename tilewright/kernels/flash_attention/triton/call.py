"""Launches of the attention kernels in Triton: their arrays, grids and constexpr parameters."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.mask_terms import MaskParts
from tilewright.kernels.flash_attention.masking import FAR, Band
from tilewright.kernels.flash_attention.operands import needs_exact_matmuls, over_batch
from tilewright.kernels.flash_attention.triton.configs import has_tma, padded_dim
from tilewright.kernels.flash_attention.triton.params import Tiles, TritonBackwardParams, TritonForwardParams
from tilewright.kernels.numerics.dropout import keep_threshold
from tilewright.kernels.triton import launch
from tilewright.kernels.triton.description import JitKernel
from tilewright.ops.utils.device import current_device

CACHED_BYTES = 16 << 20
"""Bytes of K and V that concurrent programs may read together: they stay in the L2 cache between a head's programs."""

ROW_TERMS_BLOCK = 32
"""Rows per program of ``attention_row_terms``."""

_SHARED = frozenset({"bias", "mask", "q_rows", "kv_rows", "key_ranges", "query_ranges", "inside", "sinks"})
"""Arrays whose batch dimension may be 1, for all batch elements."""

_ABSENT_DTYPES = {
    "bias": np.float32, "q_rows": np.int32, "kv_rows": np.int32, "mask": np.uint8, "key_ranges": np.int32,
    "query_ranges": np.int32, "inside": np.int32, "sinks": np.float32, "dropout_keys": np.uint32, "d_lse": np.float32,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TritonCall:
    """The sizes, options and mask of a call: all that kernels are compiled for but the shapes of optional arrays.

    Attributes:
      inputs: with ``ShapeDtypeStruct`` in place of arrays.
    """

    inputs: AttentionInputs
    parts: MaskParts

    @classmethod
    def of(cls, inputs: AttentionInputs) -> "TritonCall":
        structs = inputs.structs
        return cls(structs, MaskParts.of(structs.mask))

    def run(self, function: Callable[[dict[str, Any]], tuple[Any, ...]], arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        """``function`` of the arrays that are not None; ``vmap`` enlarges their batch."""
        given = {name: array for name, array in arrays.items() if array is not None}
        return over_batch(function, self.inputs.batch, given, _SHARED)

    def forward(self, params: TritonForwardParams, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        """``(out, lse)`` of arrays whose batch may be larger than the call's."""
        from tilewright.kernels.flash_attention.triton.forward import attention_forward

        inputs, tiles = self.inputs, params.tiles
        batch, (heads, q_length) = arrays["query"].shape[0], (inputs.heads, inputs.q_length)
        given = dict(arrays)
        if "sinks" in given:
            # One for each head and batch element: the kernel indexes them by both at once.
            given["sinks"] = jnp.broadcast_to(given["sinks"], (batch, heads))
        names = (
            "query", "key", "value", "bias", "q_rows", "kv_rows", "mask", "key_ranges", "inside", "sinks",
            "dropout_keys",
        )  # fmt: skip
        outputs = [
            jax.ShapeDtypeStruct((batch, q_length, heads, inputs.value_dim), inputs.dtype),
            jax.ShapeDtypeStruct((batch, heads, q_length), np.float32),
        ]
        constants = self._constants(arrays, "key_ranges", tiles, batch * heads, inputs.groups)
        constants |= {"SINKS": "sinks" in given} | self._by_queries(arrays, tiles)
        return self._launch(attention_forward, given, names, outputs, _cdiv(q_length, tiles.block_q), constants, tiles)

    def backward(self, params: TritonBackwardParams, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        """``(d_query, d_key, d_value)``, and float32 dS [batch, heads, q_length, kv_length] if there is a bias."""
        inputs, batch = self.inputs, arrays["query"].shape[0]
        given = dict(arrays)
        given["delta"], given["lse_log2"] = self._row_terms(given, batch)
        # Stand-ins for pointers that a kernel has, and does not follow unless they are replaced below.
        given["d_bias"] = given["d_query"] = jnp.zeros((0,), np.float32)
        if "bias" in given:
            # Zeros: tiles without a visible score are never written.
            given["d_bias"] = jnp.zeros((batch, *inputs.score_shape[1:]), np.float32)
        # Seven matmuls instead of five, but each gradient is summed by one program in one order, and repeats bit for
        # bit.
        if params.deterministic:
            d_key, d_value = self._key_value_gradients(params.key_value, given, ())
            d_query, *d_bias = self._query_gradients(params.query, given)
            return d_query, d_key, d_value, *d_bias
        # Transposed, as the kernel computes dQ, with rows of whole 16 bytes for TMA.
        shape = batch, inputs.heads, inputs.head_dim, _padded_length(inputs.q_length)
        given["d_query"] = jnp.zeros(shape, np.float32)
        updated = ("d_query", "d_bias") if "bias" in given else ("d_query",)
        d_key, d_value, accumulator, *d_bias = self._key_value_gradients(params.key_value, given, updated)
        d_query = (accumulator * inputs.softmax_scale).astype(inputs.dtype)[..., : inputs.q_length]
        return d_query.transpose(0, 3, 1, 2), d_key, d_value, *d_bias

    def _key_value_gradients(
        self, tiles: Tiles, arrays: Mapping[str, Any], updated: tuple[str, ...]
    ) -> tuple[Any, ...]:
        """``(d_key, d_value)``, then the ``updated`` arrays; if there are any, dQ is computed as well (``FUSED``)."""
        from tilewright.kernels.flash_attention.triton.backward import attention_key_value_gradients

        inputs = self.inputs
        outputs = [jax.ShapeDtypeStruct(arrays[name].shape, inputs.dtype) for name in ("key", "value")]
        constants = self._constants(arrays, "query_ranges", tiles, arrays["query"].shape[0] * inputs.kv_heads, 1)
        constants |= self._by_keys(arrays, tiles, fused=bool(updated))
        return self._launch(
            attention_key_value_gradients, arrays,
            (*_BACKWARD_INPUTS, "query_ranges", "inside", "dropout_keys", "d_query", "d_bias"), outputs,
            _cdiv(inputs.kv_length, tiles.block_k), constants, tiles, inputs.kv_heads, updated,
        )  # fmt: skip

    def _query_gradients(self, tiles: Tiles, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        """``d_query``, and ``d_bias`` if there is a bias."""
        from tilewright.kernels.flash_attention.triton.backward import attention_query_gradients

        inputs = self.inputs
        constants = self._constants(
            arrays, "key_ranges", tiles, arrays["query"].shape[0] * inputs.heads, inputs.groups
        ) | self._by_queries(arrays, tiles)
        return self._launch(
            attention_query_gradients, arrays, (*_BACKWARD_INPUTS, "key_ranges", "inside", "dropout_keys", "d_bias"),
            [jax.ShapeDtypeStruct(arrays["query"].shape, inputs.dtype)], _cdiv(inputs.q_length, tiles.block_q),
            constants, tiles, updated=("d_bias",) if "bias" in arrays else (),
        )  # fmt: skip

    def _row_terms(self, arrays: Mapping[str, Any], batch: int) -> tuple[Any, ...]:
        """``(delta, lse_log2)``, float32 [batch, heads, padded q_length]."""
        from tilewright.kernels.flash_attention.triton.backward import attention_row_terms

        heads, q_length, value_dim = self.inputs.heads, self.inputs.q_length, self.inputs.value_dim
        d_lse = arrays.get("d_lse", jnp.zeros((0,), np.float32))
        return launch(
            attention_row_terms,
            [arrays["out"], arrays["d_out"], arrays["lse"], d_lse, arrays.get("inside", jnp.zeros((0,), np.int32))],
            [jax.ShapeDtypeStruct((batch, heads, _padded_length(q_length)), np.float32)] * 2,
            grid=[_cdiv(q_length, ROW_TERMS_BLOCK) * batch * heads],
            scalars={"q_length": q_length},
            constants={
                "HEADS": heads, "HEAD_VALUE_DIM": value_dim, "VALUE_DIM": padded_dim(value_dim),
                "BLOCK": ROW_TERMS_BLOCK, "HAS_D_LSE": "d_lse" in arrays, "INSIDE": _inside_stride(arrays),
            },
        )  # fmt: skip

    def _launch(
        self, kernel: JitKernel, arrays: Mapping[str, Any], names: tuple[str, ...], outputs: list[jax.ShapeDtypeStruct],
        tiles_per_head: int, constants: Mapping[str, Any], tiles: Tiles, heads: int = 0,
        updated: tuple[str, ...] = (),
    ) -> tuple[Any, ...]:  # fmt: skip
        """The outputs, then the ``updated`` arrays, which the kernel adds to or writes in part.

        ``heads`` are those of the grid: the heads of queries if 0.
        """
        inputs, batch = self.inputs, arrays["query"].shape[0]
        absent = {name: jnp.zeros((0,), _ABSENT_DTYPES[name]) for name in names if name not in arrays}
        return launch(
            kernel,
            [arrays.get(name, absent.get(name)) for name in names],
            [*outputs, *(jax.ShapeDtypeStruct(arrays[name].shape, arrays[name].dtype) for name in updated)],
            grid=[tiles_per_head * batch * (heads or inputs.heads)],
            scalars={"q_length": inputs.q_length, "kv_length": inputs.kv_length},
            constants=constants,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            in_place={len(outputs) + i: names.index(name) for i, name in enumerate(updated)},
        )

    def _by_queries(self, arrays: Mapping[str, Any], tiles: Tiles) -> dict[str, Any]:
        """Constants of the tile schedule of kernels whose programs have a tile of queries and go through keys."""
        return self._tile_schedule("key_ranges" in arrays, self.parts.band, self.inputs.kv_length % tiles.block_k != 0)

    def _by_keys(self, arrays: Mapping[str, Any], tiles: Tiles, fused: bool) -> dict[str, Any]:
        """Constants of the tile schedule of the kernel whose programs have a tile of keys and go through queries."""
        inputs, band = self.inputs, self.parts.band
        uneven = inputs.q_length % tiles.block_q != 0 or (fused and inputs.kv_length % tiles.block_k != 0)
        schedule = self._tile_schedule("query_ranges" in arrays, band.transposed, uneven)
        return schedule | {"GROUPS": inputs.groups, "FUSED": fused}

    def _tile_schedule(self, ranged: bool, band: Band, uneven: bool) -> dict[str, Any]:
        """PARTS, a bit for each part of ``visible_span`` that may occur, and LAST_FIRST.

        With LAST_FIRST the last tiles, which have most to do (a causal mask, by queries), are launched first, so that
        they do not end last. ``band`` bounds the other index minus the program's own; ``uneven`` says that the last
        tile of the others needs a mask.
        """
        order = {"LAST_FIRST": band.lowest <= -FAR and band.highest < FAR}
        if ranged:
            return order | {"PARTS": 0b100}
        # The first part is where a band begins; the last one where it ends, or where the last step is not whole.
        return order | {"PARTS": (band.lowest > -FAR) | 0b010 | (band.highest < FAR or uneven) << 2}

    def _constants(
        self, arrays: Mapping[str, Any], ranges: str, tiles: Tiles, head_count: int, sharing: int
    ) -> dict[str, Any]:
        """Constants of all three attention kernels.

        ``head_count`` is batch times heads of the grid; programs of ``sharing`` neighbouring heads read the same keys.
        """
        inputs, parts, band = self.inputs, self.parts, self.parts.band
        kv_bytes = inputs.kv_length * (inputs.head_dim + inputs.value_dim) * inputs.dtype.itemsize
        # Rounded down below to a divisor of all heads, for `decode_program_id` knows no smaller last group.
        at_once = max(CACHED_BYTES // max(kv_bytes, 1), 1) * sharing
        exact = needs_exact_matmuls(inputs)
        return {
            "HEADS": inputs.heads,
            "GROUPS": inputs.groups,
            "HEAD_DIM": inputs.head_dim,
            "HEAD_VALUE_DIM": inputs.value_dim,
            "DIM": padded_dim(inputs.head_dim),
            "VALUE_DIM": padded_dim(inputs.value_dim),
            "BLOCK_Q": tiles.block_q,
            "BLOCK_K": tiles.block_k,
            "AT_ONCE": max(count for count in range(1, min(at_once, head_count) + 1) if head_count % count == 0),
            "SCALE": float(inputs.softmax_scale),
            "SOFT_CAP": float(inputs.logits_soft_cap or 0.0),
            "LOWEST": band.lowest,
            "HIGHEST": band.highest,
            "BANDED": parts.positions is None and band != Band(),
            "HAS_ROWS": parts.has_rows,
            "Q_ROWS_BATCH": int("q_rows" in arrays and arrays["q_rows"].shape[0] > 1),
            "KV_ROWS_BATCH": int("kv_rows" in arrays and arrays["kv_rows"].shape[0] > 1),
            "MASK": _shape_bits(arrays.get("mask")),
            "RANGES": _shape_bits(arrays.get(ranges)),
            "BIAS": _shape_bits(arrays.get("bias")),
            "THRESHOLD": keep_threshold(inputs.drawn_dropout) if inputs.dropout else 0,
            "KEEP_SCALE": 1.0 / (1.0 - inputs.drawn_dropout),
            "PRECISION": "tf32x3" if exact else "tf32",
            "INSIDE": _inside_stride(arrays),
            "TMA": tiles.tma and has_tma(inputs, current_device()),
        }


_BACKWARD_INPUTS = (
    "query", "key", "value", "d_out", "lse_log2", "delta", "bias", "q_rows", "kv_rows", "mask",
)  # fmt: skip


def _shape_bits(array: jax.Array | None) -> int:
    """Shape bits of an array of scores: its dimensions that are not 1, the batch the highest bit; -1 for no array."""
    if array is None:
        return -1
    return sum(bit for bit, size in zip((8, 4, 2, 1), array.shape, strict=True) if size > 1)


def _inside_stride(arrays: Mapping[str, Any]) -> int:
    """Elements from a batch element's ranges of what is inside to the next one's; -1 without such ranges."""
    if "inside" not in arrays:
        return -1
    batch, ends = arrays["inside"].shape
    return ends if batch > 1 else 0


def _padded_length(length: int) -> int:
    """Row stride in memory, as ``scores.padded_length``."""
    return _cdiv(length, 4) * 4


def _cdiv(length: int, block: int) -> int:
    return -(-length // block)
