"""Flash attention by cuDNN, as JAX calls it: support reasons, and conversion of residuals and masks."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from tilewright.kernels.flash_attention.cudnn import jax_calls
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.mask_terms import MaskParts
from tilewright.kernels.flash_attention.operands import (
    backward_rows,
    bias_gradient,
    by_row,
    min_lengths,
    over_batch,
    pad_last_dim,
    with_cleared_rows,
    with_cleared_values,
    with_fully_masked_rows,
    with_positive_scale,
    without_masked,
)
from tilewright.kernels.flash_attention.results import Results, empty_backward, empty_forward, hides
from tilewright.kernels.masks import Mask
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.op.xla_flags import wants_repeatable
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.stable_ids import stable_id
from tilewright.ops.utils.target import is_assumed

MIN_VERSION = 91002
"""cuDNN 9.10.2: the two previous releases are known to be wrong, and older ones support varying subsets."""

MIN_VERSIONS = {(10, 3): 91100}
"""Later minimum versions for some compute capabilities, as in JAX."""

MIN_LOGIT = {np.dtype(jnp.bfloat16): -float(1 << 41), np.dtype(np.float16): -float(1 << 15)}
"""Replacement for a bias that masks, as in JAX for −∞: in a row with nothing else cuDNN would compute −∞ − (−∞)."""

VECTOR = 8
"""Head dims are padded with zeros to a multiple of this."""

WIDEST = 128
"""Maximum head dim, where nothing else is said."""

WIDER: Mapping[tuple[int, Direction], int] = MappingProxyType(
    {(9, "forward"): 256, (9, "backward"): 256, (10, "forward"): 256, (12, "forward"): 256}
)
"""Maximum head dims by the major number of the compute capability and the direction, of cuDNN 9.10.2 and later.

From NVIDIA's support matrix and `sdpa_support_surface.h` of cudnn-frontend. On Blackwell that of the forward pass is of
several queries; one has `WIDEST`. From cuDNN 9.23 on, 10.x has a backward pass of heads of 256 too, by an engine that
the frontend in XLA must know, of which JAX does not tell the version.
"""

PART_SCALES = (1024.0, 1.0, 2.0**-10)
"""Scales of the columns that carry the gradient to lse, so that float16 can represent it: up to 6e7, down to 3e-11."""


@stable_id(
    "tilewright/flash_attention.CudnnForwardParams",
    formerly=("tilewright.kernels.flash_attention.cudnn:CudnnForwardParams",),
)
@dataclasses.dataclass(frozen=True, slots=True)
class CudnnForwardParams:
    """Empty: cuDNN chooses its own configuration."""


@stable_id(
    "tilewright/flash_attention.CudnnBackwardParams",
    formerly=("tilewright.kernels.flash_attention.cudnn:CudnnBackwardParams",),
)
@dataclasses.dataclass(frozen=True, slots=True)
class CudnnBackwardParams:
    """Empty: cuDNN chooses its own configuration.

    Bitwise repeatability is not an option of a call: it needs ``XLA_FLAGS=--xla_gpu_deterministic_ops=true``.
    """

    deterministic: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True, slots=True)
class CudnnMask:
    """A mask in cuDNN's terms.

    Attributes:
      window: number of visible keys, ending with the query's own; None for all.
    """

    causal: bool
    window: int | None
    parts: MaskParts

    @classmethod
    def of(cls, mask: Mask | None, q_length: int, kv_length: int) -> "CudnnMask":
        """Converts a mask to which ``reasons`` has no objection."""
        parts = MaskParts.of(mask)
        lowest, highest = parts.band.lowest, parts.band.highest
        # Drop a bound that no pair of a query and a key reaches.
        return cls(highest < kv_length - 1, None if lowest <= 1 - q_length else 1 - lowest, parts)

    def reasons(self, q_length: int, kv_length: int) -> list[str]:
        """Reasons why the mask cannot be expressed in these terms."""
        parts = self.parts
        reasons = parts.unsupported_terms()
        if parts.positions is not None:
            return reasons
        if self.causal and parts.band.highest != 0:
            reasons.append(f"is causal from the top left, got keys up to {parts.band.highest} after a query's index")
        if self.window is not None and (not self.causal or parts.band.lowest > 0):
            reasons.append(f"has only windows that end at the query's own key, got {parts.band}")
        if self.window is not None and q_length > kv_length:
            reasons.append(
                f"has windows only where keys are at least as many as queries, got {q_length=}, {kv_length=}"
            )
        return reasons

    def lengths(self, batch: int, q_length: int, kv_length: int) -> tuple[Any, Any] | None:
        """The lengths of queries and of keys, int32 ``[batch]`` each, clipped to the arrays; None without lengths."""
        if not self.parts.lengths:
            return None
        queries = min_lengths([part.q_lengths for part in self.parts.lengths], batch, q_length)
        return queries, min_lengths([part.kv_lengths for part in self.parts.lengths], batch, kv_length)


def computed_dim(inputs: AttentionInputs, carries_d_lse: bool) -> int:
    """The head dim that cuDNN computes with, the same for keys and values."""
    values = inputs.value_dim + (len(PART_SCALES) if carries_d_lse else 0)
    return math.ceil(max(inputs.head_dim, values) / VECTOR) * VECTOR


def widest_head(inputs: AttentionInputs, major: int, direction: Direction) -> int:
    """The maximum head dim of a call on a compute capability with this major number."""
    if major > 9 and inputs.q_length == 1:
        return WIDEST
    return WIDER.get((major, direction), WIDEST)


class CudnnFlashAttention(Backend[AttentionInputs, Results, CudnnForwardParams, CudnnBackwardParams]):
    """Supports float16 and bfloat16 with causal masks, windows, lengths and a bias, from compute capability 8.0 on."""

    name: ClassVar[str] = "cudnn"
    platform: ClassVar[Platform] = Platform.CUDA
    forward_params: ClassVar[type] = CudnnForwardParams
    backward_params: ClassVar[type] = CudnnBackwardParams
    # Its dropout is by a generator of its own, not by that of ``dropout_seed``.
    serves: ClassVar[frozenset[str]] = frozenset({"bias", "mask", "precision"})

    def reasons(self, inputs: AttentionInputs, device: Device, direction: Direction) -> list[str]:
        if device.kind != "gpu" or device.capability is None or device.capability < (8, 0):
            return [f"needs a CUDA GPU of compute capability 8.0 or up, got {device.described}"]
        reasons = [] if is_assumed("cudnn") else _version_reasons(device.capability)
        if inputs.dtype not in MIN_LOGIT:
            reasons.append(f"computes in float16 or bfloat16, got dtype={inputs.dtype}")
        if inputs.softmax_scale == 0:
            reasons.append("a scale of 0 leaves no logit to be masked")
        if 0 in (*inputs.score_shape, inputs.head_dim, inputs.value_dim):
            return reasons
        carries_d_lse = direction == "backward" and inputs.return_lse
        dim, widest = computed_dim(inputs, carries_d_lse), widest_head(inputs, device.capability[0], direction)
        if dim > widest:
            more = f", {len(PART_SCALES)} of it for the gradient to lse" if carries_d_lse else ""
            reasons.append(f"a head has up to {widest} elements on {device.name}, got {dim} after padding{more}")
        if direction == "backward" and inputs.kv_length == 1:
            reasons.append("its backward pass wants more than one key, a known limitation of cuDNN 9.18")
        mask = CudnnMask.of(inputs.mask, inputs.q_length, inputs.kv_length)
        return reasons + mask.reasons(inputs.q_length, inputs.kv_length) + _bias_reasons(inputs)

    def candidates(
        self, inputs: AttentionInputs, device: Device, direction: Direction
    ) -> list[CudnnForwardParams | CudnnBackwardParams]:
        return [CudnnForwardParams() if direction == "forward" else CudnnBackwardParams()]

    def repeats(self, params: CudnnForwardParams | CudnnBackwardParams) -> bool:
        return isinstance(params, CudnnForwardParams) or wants_repeatable()

    def forward(self, inputs: AttentionInputs, params: CudnnForwardParams) -> Results:
        """``(out, lse)``."""
        if inputs.is_empty:
            return empty_forward(inputs)
        call = _Call.of(with_positive_scale(with_cleared_values(inputs, keys=True)))
        dim, bias = computed_dim(call.inputs, False), call.bias(per_head=False)
        out, lse = call.run(jax_calls.forward, {**call.operands(dim), "bias": bias}, shared=("bias",))
        out = out[..., : call.inputs.value_dim]
        return with_fully_masked_rows(out, lse, call.visible_rows())

    def backward(
        self,
        inputs: AttentionInputs,
        results: Results,
        cotangents: tuple[Array, Array | None],
        params: CudnnBackwardParams,
    ) -> dict[str, Any]:
        """Gradients for query, key, value and bias, from any backend's ``(out, lse)``."""
        if inputs.is_empty:
            return empty_backward(inputs, *results, *cotangents)
        negated = inputs.softmax_scale < 0
        inputs, d_out = with_cleared_rows(inputs, cotangents[0])
        cotangents = d_out, cotangents[1]
        call = _Call.of(with_positive_scale(inputs))
        rows = backward_rows(inputs.query.dtype, results, cotangents, call.may_mask_rows)
        out, d_out, lse, d_lse, fully_masked = rows
        dim = computed_dim(call.inputs, d_lse is not None)
        if d_lse is not None:
            out, d_out = with_d_lse_columns(out, d_out, d_lse)
        arrays = {**call.operands(dim), "bias": call.bias(per_head=True), "lse": lse}
        arrays |= {"out": pad_last_dim(out, dim), "d_out": pad_last_dim(d_out, dim)}
        d_query, d_key, d_value, *d_bias = call.run(jax_calls.backward, arrays)
        kv_lengths = None if call.lengths is None else call.lengths[1]
        d_query, d_key, d_value = without_masked(d_query, d_key, d_value, fully_masked, kv_lengths)
        head_dim, value_dim = call.inputs.head_dim, call.inputs.value_dim
        return {
            "query": (-d_query if negated else d_query)[..., :head_dim],
            "key": d_key[..., :head_dim],
            "value": d_value[..., :value_dim],
            "bias": call.bias_gradient(d_bias[0]) if d_bias else None,
            "softmax_aux": None,
        }


def _version_reasons(capability: tuple[int, int]) -> list[str]:
    version, min_version = jax_calls.cudnn_version(), MIN_VERSIONS.get(capability, MIN_VERSION)
    if version is None:
        return ["JAX finds no cuDNN here, which pip install 'tilewright[cuda13]' brings"]
    if version < min_version:
        return [f"needs cuDNN {_dotted(min_version)} or later, got {_dotted(version)}"]
    return []


def _dotted(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _bias_reasons(inputs: AttentionInputs) -> list[str]:
    if inputs.bias is None:
        return []
    reasons = []
    if inputs.bias.dtype != inputs.dtype:
        reasons.append(
            f"adds a bias only of the query's dtype, got bias.dtype={inputs.bias.dtype}, dtype={inputs.dtype}"
        )
    if inputs.q_length % 2 or inputs.kv_length % 2:
        lengths = f"q_length={inputs.q_length}, kv_length={inputs.kv_length}"
        reasons.append(f"adds a bias only where both lengths are even, got {lengths}")
    return reasons


def with_d_lse_columns(out: jax.Array, d_out: jax.Array, d_lse: jax.Array) -> tuple[Any, Any]:
    """Appends columns to ``out`` and ``d_out`` by which cuDNN's rowsum(dO ∘ O) becomes delta − ``d_lse``.

    The gradient to lse only enters delta. The values have zeros in these columns, so nothing else changes.
    """
    info, dtype = jnp.finfo(out.dtype), out.dtype
    # −d_lse as a sum of three numbers of 16 bits, from the largest scale to the smallest: each rounds what is left of
    # it.
    rest, columns = -d_lse.astype(jnp.float32), []
    for scale in PART_SCALES:
        # XLA may drop a conversion there and back, so the rounding must be explicit.
        part = lax.reduce_precision(rest / scale, info.nexp, info.nmant)
        rest = rest - part * scale
        columns.append(by_row(part))
    ones = jnp.broadcast_to(jnp.asarray(PART_SCALES, dtype), (*d_out.shape[:-1], len(PART_SCALES)))
    return jnp.concatenate([out, *(each.astype(dtype) for each in columns)], -1), jnp.concatenate([d_out, ones], -1)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call, its sizes and its mask in cuDNN's terms."""

    inputs: AttentionInputs
    mask: CudnnMask
    lengths: tuple[Any, Any] | None

    @classmethod
    def of(cls, inputs: AttentionInputs) -> "_Call":
        sizes = inputs.q_length, inputs.kv_length
        mask = CudnnMask.of(inputs.mask, *sizes)
        return cls(inputs, mask, mask.lengths(inputs.batch, *sizes))

    @property
    def may_mask_rows(self) -> bool:
        """True if a query may be fully masked, which only lengths and a bias can do."""
        return self.lengths is not None or self.inputs.bias is not None

    def operands(self, dim: int) -> dict[str, Any]:
        """The operands of both directions, except the bias."""
        arrays = {name: pad_last_dim(getattr(self.inputs, name), dim) for name in ("query", "key", "value")}
        if self.lengths is not None:
            # Some cuDNN versions mishandle empty sequences: clamp lengths to at least 1 and mask the rows afterwards.
            arrays |= {name: jnp.maximum(x, 1) for name, x in zip(_LENGTHS, self.lengths, strict=True)}
        return arrays

    def bias(self, per_head: bool) -> Any:
        """The bias over all queries and keys; ``per_head`` also over batch and heads, as its dBias sum is narrow."""
        bias = self.inputs.bias
        if bias is None:
            return None
        min_logit = jnp.asarray(MIN_LOGIT[self.inputs.dtype], bias.dtype)
        lead = self.inputs.score_shape[:2] if per_head else bias.shape[:2]
        return jnp.broadcast_to(jnp.where(hides(bias), min_logit, bias), (*lead, *self.inputs.score_shape[2:]))

    def bias_gradient(self, d_bias: jax.Array) -> Any:
        """Reduces cuDNN's gradient to the bias's shape; masked positions, which cuDNN may not write, are 0."""
        bias, (_, _, q_length, kv_length) = self.inputs.bias, self.inputs.score_shape
        assert bias is not None
        if self.inputs.mask is not None:
            d_bias = jnp.where(self.inputs.mask.tile(0, q_length, 0, kv_length), d_bias, jnp.zeros((), d_bias.dtype))
        return bias_gradient(d_bias, bias)

    def visible_rows(self) -> Any:
        """``[batch|1, heads|1, q_length]``, True for queries with a visible key; None if every query has one."""
        _, _, q_length, kv_length = self.inputs.score_shape
        if self.inputs.bias is not None:
            visible = ~hides(self.inputs.bias)
            if self.inputs.mask is not None:
                visible = visible & self.inputs.mask.tile(0, q_length, 0, kv_length)
            any_visible = jnp.any(visible, axis=-1)
            return jnp.broadcast_to(any_visible, (*any_visible.shape[:2], q_length))
        if self.lengths is None:
            return None
        rows, (q_lengths, kv_lengths) = jnp.arange(q_length, dtype=jnp.int32), self.lengths
        # The first key in a query's window: keys end at their length, so a query sees one if it sees this one.
        first = jnp.maximum(rows + 1 - (self.mask.window or q_length), 0)
        return ((rows < q_lengths[:, None]) & (first < kv_lengths[:, None]))[:, None, :]

    def run(
        self, function: Callable[..., tuple[Any, ...]], arrays: dict[str, Any], shared: Sequence[str] = ()
    ) -> tuple[Any, ...]:
        """Calls ``function`` on arrays that lead with the batch; those in ``shared`` may lead with 1."""
        options = {
            "scale": float(self.inputs.softmax_scale), "causal": self.mask.causal, "window": self.mask.window,
        }  # fmt: skip

        def call(given: dict[str, Any]) -> tuple[Any, ...]:
            lengths = tuple(given[name] for name in _LENGTHS) if _LENGTHS[0] in given else None
            others = {name: array for name, array in given.items() if name not in _LENGTHS}
            return tuple(function(**{"bias": None, **others}, lengths=lengths, **options))

        given = {name: array for name, array in arrays.items() if array is not None}
        return over_batch(call, self.inputs.batch, given, frozenset(shared))


_LENGTHS = ("q_lengths", "kv_lengths")
