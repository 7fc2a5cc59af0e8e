"""Launches a variant in CUDA C++ with the arrays of a call."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.typing import DTypeLike

from tilewright.kernels.flash_attention.cuda.selection import (
    problem_fields,
    select,
)
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.operands import (
    into_batch,
    pad_last_dim,
)
from tilewright.kernels.numerics.dropout import keep_threshold
from tilewright.ops.kernel.arrays import struct_like
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.device import current_device

_FORWARD_INPUTS = (
    "query", "key", "value", "bias", "q_rows", "kv_rows", "mask", "key_ranges", "sinks", "dropout_keys",
)  # fmt: skip

_BACKWARD_INPUTS = (
    "query", "key", "value", "out", "lse", "d_out", "d_lse", "bias", "q_rows", "kv_rows", "mask",
    "query_ranges", "dropout_keys", "key_ranges",
)  # fmt: skip

_ABSENT = {
    "d_lse": np.float32, "bias": np.float32, "mask": np.uint8, "sinks": np.float32, "dropout_keys": np.uint32,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class CudaCall:
    """The parameters of a launch besides its arrays."""

    direction: Direction
    inputs: AttentionInputs
    variant: str | None
    deterministic: bool
    device: Device

    @classmethod
    def of(cls, inputs: AttentionInputs, direction: Direction, variant: str | None, deterministic: bool) -> "CudaCall":
        return cls(direction, inputs.structs, variant, deterministic, current_device())

    def run(self, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        """Runs a call on named arrays, each with the batch, or 1, as first dimension, except ``sinks``."""
        names = [name for name, array in arrays.items() if array is not None]

        @custom_vmap
        def launch(*operands: jax.Array) -> tuple[Any, ...]:
            return self.launch(dict(zip(names, operands, strict=True)))

        @launch.def_vmap
        def _(size: int, mapped: Sequence[bool], *operands: jax.Array) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
            results = self._run_mapped(size, dict(zip(names, zip(operands, mapped, strict=True), strict=True)))
            return results, (True,) * len(results)

        return launch(*(arrays[name] for name in names))

    def _run_mapped(self, size: int, arrays: Mapping[str, tuple[Any, bool]]) -> tuple[Any, ...]:
        """Folds a mapped axis into the batch."""
        # sinks have no batch dimension into which the axis could be folded
        if "sinks" in arrays and arrays["sinks"][1]:
            mapped = {name: array for name, (array, is_mapped) in arrays.items() if is_mapped}
            fixed = {name: array for name, (array, is_mapped) in arrays.items() if not is_mapped}
            return jax.lax.map(lambda part: self.run({**fixed, **part}), mapped)
        batch = self.inputs.batch
        folded = {}
        for name, (array, is_mapped) in arrays.items():
            if name == "sinks":
                folded[name] = array
                continue
            element_shape = array.shape[1:] if is_mapped else array.shape
            # The gradient of a bias is summed over the dimensions that share the bias, which elements of a mapped axis
            # do not.
            per_element = name == "bias" and self.direction == "backward"
            if not is_mapped and element_shape[0] == 1 and not per_element:
                folded[name] = array
                continue
            folded[name] = into_batch(array, is_mapped, size, batch)
        # Not from the shapes of the arrays: one whose first dimension is 1 may be broadcast to all elements.
        operands = {name: getattr(self.inputs, name) for name in ("query", "key", "value")}
        structs = {name: jax.ShapeDtypeStruct((size * batch, *x.shape[1:]), x.dtype) for name, x in operands.items()}
        bias = struct_like(folded["bias"]) if "bias" in folded else None
        inputs = self.inputs.replace(**structs, bias=bias)
        results = dataclasses.replace(self, inputs=inputs).run(folded)
        # Without a bias its gradient is an array without elements.
        return tuple(x.reshape(size, batch, *x.shape[1:]) if x.size else jnp.zeros((size, 0), x.dtype) for x in results)

    def launch(self, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        """Launches the kernel once."""
        inputs = self.inputs
        fields = problem_fields(inputs, self.deterministic)
        chosen = select(self.direction, fields, inputs.dtype.itemsize, self.device, self.variant)
        head_dim, value_dim = chosen.fields["head_dim"], chosen.fields["value_dim"]
        names = _FORWARD_INPUTS if self.direction == "forward" else _BACKWARD_INPUTS
        widths = {"query": head_dim, "key": head_dim, "value": value_dim, "out": value_dim, "d_out": value_dim}
        operands = [_padded(arrays.get(name), widths.get(name), _ABSENT.get(name, np.int32)) for name in names]
        attributes = {
            "scale": np.float32(inputs.softmax_scale),
            "soft_cap": np.float32(inputs.logits_soft_cap or 0.0),
            "keep_threshold": np.int64(keep_threshold(inputs.drawn_dropout)),
            "keep_scale": np.float32(1.0 / (1.0 - inputs.drawn_dropout)),
        }
        results = chosen.kernel.call(
            chosen.variant, chosen.fields, self.device, operands, self._outputs(head_dim, value_dim), attributes
        )
        if self.direction == "forward":
            return results[0][..., : inputs.value_dim], results[1]
        return (
            results[0][..., : inputs.head_dim],
            results[1][..., : inputs.head_dim],
            results[2][..., : inputs.value_dim],
            results[3],
        )

    def _outputs(self, head_dim: int, value_dim: int) -> list[jax.ShapeDtypeStruct]:
        inputs = self.inputs
        batch, heads, q_length, kv_length = inputs.score_shape
        if self.direction == "forward":
            return [
                jax.ShapeDtypeStruct((batch, q_length, heads, value_dim), inputs.dtype),
                jax.ShapeDtypeStruct((batch, heads, q_length), np.float32),
            ]
        bias: tuple[int, ...] = (0,)
        if inputs.bias is not None:
            bias = inputs.score_shape if self.deterministic else inputs.bias.shape
        return [
            jax.ShapeDtypeStruct((batch, q_length, heads, head_dim), inputs.dtype),
            jax.ShapeDtypeStruct((batch, kv_length, inputs.kv_heads, head_dim), inputs.dtype),
            jax.ShapeDtypeStruct((batch, kv_length, inputs.kv_heads, value_dim), inputs.dtype),
            jax.ShapeDtypeStruct(bias, np.float32),
        ]


def _padded(array: jax.Array | None, dim: int | None, absent: DTypeLike) -> Any:
    """Pads the last axis with zeros to ``dim``; an absent array becomes one without elements."""
    if array is None:
        return jnp.zeros((0,), absent)
    return array if dim is None else pad_last_dim(array, dim)
