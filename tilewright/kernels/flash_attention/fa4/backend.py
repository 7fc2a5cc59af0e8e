"""Flash attention by FlashAttention-4's kernels: support reasons, and conversion of layouts and masks."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tilewright.errors import UnsupportedError
from tilewright.kernels.flash_attention.fa4 import cute
from tilewright.kernels.flash_attention.fa4.architecture import Architecture, Params, Scores
from tilewright.kernels.flash_attention.fa4.params import DTYPES, Fa4BackwardParams, Fa4ForwardParams, Fa4Mask
from tilewright.kernels.flash_attention.fa4.sm90 import Sm90
from tilewright.kernels.flash_attention.fa4.sm100 import Sm100
from tilewright.kernels.flash_attention.fa4.sm120 import Sm120
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.operands import (
    backward_rows,
    over_batch,
    pad_last_dim,
    with_cleared_rows,
    with_cleared_values,
    with_fully_masked_rows,
    with_positive_scale,
    without_masked,
)
from tilewright.kernels.flash_attention.results import Results, empty_backward, empty_forward
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import Platform
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.device import current_device

ARCHITECTURES: Mapping[int, Architecture] = MappingProxyType(
    {9: Sm90(), 10: (of_10 := Sm100()), 11: of_10, 12: Sm120()}
)
"""By the major number of the compute capability."""


def architecture_of(device: Device) -> Architecture | None:
    """The generation of kernels that runs on a device; None if there is none for it."""
    if device.kind != "gpu" or device.capability is None:
        return None
    return ARCHITECTURES.get(device.capability[0])


class Fa4FlashAttention(Backend[AttentionInputs, Results, Fa4ForwardParams, Fa4BackwardParams]):
    """Supports float16 and bfloat16 with causal masks, windows, a soft cap and lengths, on Hopper and Blackwell."""

    name: ClassVar[str] = "fa4"
    platform: ClassVar[Platform] = Platform.CUDA
    forward_params: ClassVar[type] = Fa4ForwardParams
    backward_params: ClassVar[type] = Fa4BackwardParams
    serves: ClassVar[frozenset[str]] = frozenset({"mask", "logits_soft_cap", "precision"})
    late_import: ClassVar[str] = "tilewright.kernels.flash_attention.fa4.cute:kernels"

    def reasons(self, inputs: AttentionInputs, device: Device, direction: Direction) -> list[str]:
        architecture = architecture_of(device)
        if architecture is None:
            return [f"needs a GPU of compute capability 9.x, 10.x, 11.x or 12.x, got {device.described}"]
        reasons = cute.package_reasons()
        if inputs.dtype not in DTYPES:
            reasons.append(f"computes in float16 or bfloat16, got dtype={inputs.dtype}")
        if inputs.softmax_scale == 0:
            reasons.append("a scale of 0 leaves no logit to be masked")
        if is_empty(inputs):
            return reasons
        mask = mask_of(inputs)
        return [*reasons, *architecture.reasons(inputs, mask, direction), *mask.reasons()]

    def heuristic(
        self, inputs: AttentionInputs, device: Device, direction: Direction
    ) -> Fa4ForwardParams | Fa4BackwardParams:
        return _defaults(_architecture(device), inputs, mask_of(inputs), direction)

    def candidates(
        self, inputs: AttentionInputs, device: Device, direction: Direction
    ) -> list[Fa4ForwardParams | Fa4BackwardParams]:
        """The package's own choice, and nearby tiles that fit."""
        found = _architecture(device).candidates(inputs, mask_of(inputs), direction)
        fitting = (each for each in found if not self.config_reasons(inputs, device, direction, each))
        return list(dict.fromkeys(fitting))

    def config_reasons(
        self,
        inputs: AttentionInputs,
        device: Device,
        direction: Direction,
        params: Fa4ForwardParams | Fa4BackwardParams,
    ) -> list[str]:
        if is_empty(inputs):
            return []
        mask, architecture = mask_of(inputs), _architecture(device)
        complete: Params = params.completed(_defaults(architecture, inputs, mask, direction))
        return architecture.params_reasons(inputs, mask, complete)

    def forward(self, inputs: AttentionInputs, params: Fa4ForwardParams) -> Results:
        """``(out, lse)``."""
        if inputs.is_empty:
            return empty_forward(inputs)
        call = _Call.of(with_positive_scale(with_cleared_values(inputs, keys=True)))
        if call.is_fully_masked:
            return empty_forward(inputs)
        out, lse = call.run("forward", call.operands("forward"), params)
        out = out[..., : call.inputs.value_dim]
        return with_fully_masked_rows(out, lse, call.visible_rows())

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
        negated = inputs.softmax_scale < 0
        inputs, d_out = with_cleared_rows(inputs, cotangents[0])
        cotangents = d_out, cotangents[1]
        call = _Call.of(with_positive_scale(inputs))
        if call.is_fully_masked:
            return empty_backward(inputs, *results, *cotangents)
        rows = backward_rows(inputs.query.dtype, results, cotangents, call.visible_rows() is not None)
        out, d_out, lse, d_lse, fully_masked = rows
        _, value_dim = call.architecture.computed_dims(call.inputs, "backward")
        arrays = {**call.operands("backward"), "lse": lse, "d_lse": d_lse}
        arrays |= {"out": pad_last_dim(out, value_dim), "d_out": pad_last_dim(d_out, value_dim)}
        d_query, d_key, d_value = call.run("backward", arrays, params)
        d_query, d_key, d_value = without_masked(d_query, d_key, d_value, fully_masked, call.lengths[1])
        head_dim, value_dim = call.inputs.head_dim, call.inputs.value_dim
        return {
            "query": (-d_query if negated else d_query)[..., :head_dim],
            "key": d_key[..., :head_dim],
            "value": d_value[..., :value_dim],
            "bias": None,
            "softmax_aux": None,
        }


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call, its sizes and its mask in FlashAttention-4's terms, on the device that it is lowered for."""

    inputs: AttentionInputs
    mask: Fa4Mask
    lengths: tuple[Any | None, Any | None]
    architecture: Architecture

    @classmethod
    def of(cls, inputs: AttentionInputs) -> "_Call":
        mask = mask_of(inputs)
        lengths = mask.lengths(inputs.batch, inputs.q_length, inputs.kv_length)
        return cls(inputs, mask, lengths, _architecture(current_device()))

    def operands(self, direction: Direction) -> dict[str, Any]:
        """The operands of both directions."""
        head_dim, value_dim = self.architecture.computed_dims(self.inputs, direction)
        arrays = {name: pad_last_dim(getattr(self.inputs, name), head_dim) for name in ("query", "key")}
        arrays["value"] = pad_last_dim(self.inputs.value, value_dim)
        if not self.mask.is_band:  # a band is aligned at the ends of the whole arrays
            lengths = zip(("q_lengths", "kv_lengths"), self.lengths, strict=True)
            # Clamp lengths to at least 1, since the kernels are not relied on for empty sequences; their rows are
            # masked later.
            arrays |= {name: None if x is None else jnp.maximum(x, 1) for name, x in lengths}
        return arrays

    def visible_keys(self) -> tuple[np.ndarray, np.ndarray]:
        """The first and last key of the band for each query; last < first if there is none."""
        band, rows = self.mask.parts.band, np.arange(self.inputs.q_length)
        return np.maximum(rows + band.lowest, 0), np.minimum(rows + band.highest, self.inputs.kv_length - 1)

    @property
    def is_fully_masked(self) -> bool:
        """True if no query has a visible key, whatever the lengths are."""
        first, last = self.visible_keys()
        return bool((first > last).all())

    def visible_rows(self) -> Any:
        """``[batch|1, 1, q_length]``, True for queries with a visible key; None if every query has one."""
        q_length, kv_length = self.inputs.q_length, self.inputs.kv_length
        (first, last), (q_lengths, kv_lengths) = self.visible_keys(), self.lengths
        # By NumPy while tracing: a static band then adds nothing to the program where every query has a key.
        if q_lengths is None and kv_lengths is None:
            return None if (first <= last).all() else jnp.asarray(first <= last)[None, None, :]
        visible = jnp.asarray(first <= last)[None]
        if kv_lengths is not None:
            # The first key of the band decides: keys are cut off at their end.
            visible = visible & (jnp.asarray(np.minimum(first, kv_length), jnp.int32) < kv_lengths[:, None])
        if q_lengths is not None:
            visible = visible & (jnp.arange(q_length, dtype=jnp.int32) < q_lengths[:, None])
        return visible[:, None, :]

    def run(self, direction: Direction, arrays: dict[str, Any], params: Params) -> tuple[Any, ...]:
        """Calls the kernels of a direction on arrays that lead with the batch."""
        cap = self.inputs.logits_soft_cap
        soft_cap = None if cap is None else float(cap)
        scores = Scores(float(self.inputs.softmax_scale), soft_cap, self.mask.left, self.mask.right)
        defaults = _defaults(self.architecture, self.inputs, self.mask, direction)
        options = {"params": params.completed(defaults), "scores": scores, "architecture": self.architecture}
        function: Callable[..., Any] = cute.forward if direction == "forward" else cute.backward

        def call(given: dict[str, Any]) -> tuple[Any, ...]:
            lengths = given.get("q_lengths"), given.get("kv_lengths")
            others = {name: array for name, array in given.items() if name not in ("q_lengths", "kv_lengths")}
            return tuple(function(**others, lengths=lengths, **options))

        given = {name: array for name, array in arrays.items() if array is not None}
        return over_batch(call, self.inputs.batch, given, frozenset())


def is_empty(inputs: AttentionInputs) -> bool:
    """True if a call has no elements, for which no kernel runs."""
    return 0 in (*inputs.score_shape, inputs.head_dim, inputs.value_dim)


def mask_of(inputs: AttentionInputs) -> Fa4Mask:
    """A call's mask in FlashAttention-4's terms."""
    return Fa4Mask.of(inputs.mask, inputs.q_length, inputs.kv_length)


def _architecture(device: Device) -> Architecture:
    """The generation of kernels of a device that has one.

    Raises:
      UnsupportedError: it has none, as where params are given for a device that ``reasons`` declines.
    """
    found = architecture_of(device)
    if found is None:
        raise UnsupportedError("flash_attention", {"fa4": [f"has no kernels for {device.described}"]})
    return found


def _defaults(architecture: Architecture, inputs: AttentionInputs, mask: Fa4Mask, direction: Direction) -> Any:
    forward = direction == "forward"
    return architecture.forward_defaults(inputs, mask) if forward else architecture.backward_defaults(inputs, mask)
