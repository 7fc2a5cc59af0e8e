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
from tilewright.kernels.flash_attention.problem import AttentionProblem
from tilewright.kernels.numerics.dropout import keep_threshold
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
    problem: AttentionProblem
    variant: str | None
    deterministic: bool
    device: Device

    @classmethod
    def of(cls, inputs: AttentionInputs, direction: Direction, variant: str | None, deterministic: bool) -> "CudaCall":
        return cls(direction, AttentionProblem.of(inputs), variant, deterministic, current_device())

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
        batch = self.problem.batch
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
        bias = folded.get("bias")
        problem = dataclasses.replace(
            self.problem,
            batch=size * batch,
            bias=None if bias is None else jax.ShapeDtypeStruct(bias.shape, bias.dtype),
        )
        results = dataclasses.replace(self, problem=problem).run(folded)
        # Without a bias its gradient is an array without elements.
        return tuple(x.reshape(size, batch, *x.shape[1:]) if x.size else jnp.zeros((size, 0), x.dtype) for x in results)

    def launch(self, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        """Launches the kernel once."""
        problem, options = self.problem, self.problem.options
        fields = problem_fields(problem, self.deterministic)
        chosen = select(self.direction, fields, problem.dtype.itemsize, self.device, self.variant)
        head_dim, value_dim = chosen.fields["head_dim"], chosen.fields["value_dim"]
        names = _FORWARD_INPUTS if self.direction == "forward" else _BACKWARD_INPUTS
        widths = {"query": head_dim, "key": head_dim, "value": value_dim, "out": value_dim, "d_out": value_dim}
        operands = [_padded(arrays.get(name), widths.get(name), _ABSENT.get(name, np.int32)) for name in names]
        attributes = {
            "scale": np.float32(options.softmax_scale),
            "soft_cap": np.float32(options.logits_soft_cap or 0.0),
            "keep_threshold": np.int64(keep_threshold(options.dropout_prob)),
            "keep_scale": np.float32(1.0 / (1.0 - options.dropout_prob)),
        }
        results = chosen.kernel.call(
            chosen.variant, chosen.fields, self.device, operands, self._outputs(head_dim, value_dim), attributes
        )
        if self.direction == "forward":
            return results[0][..., : problem.value_dim], results[1]
        return (
            results[0][..., : problem.head_dim],
            results[1][..., : problem.head_dim],
            results[2][..., : problem.value_dim],
            results[3],
        )

    def _outputs(self, head_dim: int, value_dim: int) -> list[jax.ShapeDtypeStruct]:
        problem = self.problem
        batch, heads, q_length, kv_length = problem.score_shape
        if self.direction == "forward":
            return [
                jax.ShapeDtypeStruct((batch, q_length, heads, value_dim), problem.dtype),
                jax.ShapeDtypeStruct((batch, heads, q_length), np.float32),
            ]
        bias: tuple[int, ...] = (0,)
        if problem.bias is not None:
            bias = problem.score_shape if self.deterministic else problem.bias.shape
        return [
            jax.ShapeDtypeStruct((batch, q_length, heads, head_dim), problem.dtype),
            jax.ShapeDtypeStruct((batch, kv_length, problem.kv_heads, head_dim), problem.dtype),
            jax.ShapeDtypeStruct((batch, kv_length, problem.kv_heads, value_dim), problem.dtype),
            jax.ShapeDtypeStruct(bias, np.float32),
        ]


def _padded(array: jax.Array | None, dim: int | None, absent: DTypeLike) -> Any:
    """Pads the last axis with zeros to ``dim``; an absent array becomes one without elements."""
    if array is None:
        return jnp.zeros((0,), absent)
    return array if dim is None else pad_last_dim(array, dim)
