"""The convolution in plain XLA, as sums of shifted arrays: the backend for every device and for float64."""

from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tilewright.kernels.causal_conv1d.inputs import (
    ConvInputs,
    ConvResults,
    StepInputs,
    add_to_last_inputs,
    final_state,
    shifted_state_gradient,
    tokens_at,
)
from tilewright.kernels.causal_conv1d.reference import activated, step_reference
from tilewright.kernels.numerics.activations import kept_apart
from tilewright.kernels.op.backend import Backend, InferenceBackend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.sequences import PADDING, without_padding
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams


class XlaConv(Backend[ConvInputs, ConvResults, FwdParams, BwdParams]):
    """Serves every floating-point dtype, shape and width; has no params."""

    name: ClassVar[str] = "xla"
    platform: ClassVar[Platform] = Platform.XLA
    forward_mode: ClassVar[bool] = True
    symbolic_dimensions: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset(
        {"bias", "initial_state", "cum_seqlens", "segment_ids", "seq_lengths", "activation"}
    )

    def reasons(self, inputs: ConvInputs, device: Device, direction: Direction) -> list[str]:
        return []

    def candidates(self, inputs: ConvInputs, device: Device, direction: Direction) -> Iterable[FwdParams | BwdParams]:
        return [FwdParams() if direction == "forward" else BwdParams()]

    def forward(self, inputs: ConvInputs, params: FwdParams) -> ConvResults:
        ids = inputs.ids()
        x = without_padding(inputs.x, ids)
        out = activated(_sum_of_taps(inputs, x, ids), inputs.activation).astype(x.dtype)
        if _has_states(inputs):
            window, row, position = _beginnings(inputs, x)
            first = activated(_sum_of_window(inputs, window), inputs.activation)
            out = out.at[row, position].set(first.astype(x.dtype), mode="drop")
        return ConvResults(without_padding(out, ids), final_state(inputs) if inputs.return_state else None)

    def backward(
        self, inputs: ConvInputs, results: ConvResults, cotangents: ConvResults, params: BwdParams
    ) -> dict[str, Any]:
        """Computes the gradients in closed form; those of weight and bias are sums in float32."""
        dtype, width, ids = inputs.compute_dtype, inputs.width, inputs.ids()
        x, weight, bias = kept_apart((inputs.x, inputs.weight, inputs.bias), cotangents.out)
        inputs = inputs.replace(x=x, weight=weight, bias=bias)
        x = without_padding(inputs.x, ids)
        d_sum = without_padding(cotangents.out, ids).astype(dtype)
        window: Any = None
        d_first: Any = None
        row: Any = None
        position: Any = None
        if _has_states(inputs):
            window, row, position = _beginnings(inputs, x)
            d_first = tokens_at(d_sum, row, position)
        if inputs.activation is not None:
            d_sum = d_sum * _slope(_sum_of_taps(inputs, x, ids))
            if d_first is not None:
                d_first = d_first * _slope(_sum_of_window(inputs, window))
                d_sum = d_sum.at[row, position].set(d_first, mode="drop")
        weight = inputs.weight.astype(dtype)
        d_x = sum(weight[:, width - 1 - by] * _shifted(d_sum, ids, -by) for by in range(width))
        d_weight = [jnp.sum(d_sum * _shifted(x, ids, by).astype(dtype), axis=(0, 1)) for by in reversed(range(width))]
        gradients: dict[str, Any] = {}
        if inputs.bias is not None:
            gradients["bias"] = jnp.sum(d_sum, axis=(0, 1)).astype(inputs.bias.dtype)
        if inputs.initial_state is not None:
            d_initial = jnp.zeros(inputs.state.shape, dtype)
            if d_first is not None:
                # Of token p of a sequence tap j reads column p + j of its window, in which the states come first.
                reads = [(p, j) for p in range(width - 1) for j in range(width - 1 - p)]
                columns: list[Any] = [0] * (width - 1)
                for p, j in reads:
                    columns[p + j] += weight[:, j] * d_first[:, p]
                    d_weight[j] += jnp.sum(window[:, p + j] * d_first[:, p], axis=0)
                d_initial = jnp.stack(columns, axis=2)
            if cotangents.state is not None and width > 1:
                d_initial = d_initial + shifted_state_gradient(inputs, cotangents.state.astype(dtype))
            gradients["initial_state"] = d_initial.astype(inputs.initial_state.dtype)
        if cotangents.state is not None:
            d_x = add_to_last_inputs(inputs, d_x, cotangents.state)
        gradients["x"] = d_x.astype(inputs.x.dtype)
        gradients["weight"] = jnp.stack(d_weight, axis=1).astype(inputs.weight.dtype)
        return gradients


class XlaConvStep(InferenceBackend[StepInputs, tuple[Any, Any], FwdParams]):
    """Serves every call; has no params."""

    name: ClassVar[str] = "xla"
    platform: ClassVar[Platform] = Platform.XLA
    symbolic_dimensions: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset({"bias", "state_indices", "write_indices", "activation"})

    def forward_reasons(self, inputs: StepInputs, device: Device) -> list[str]:
        return []

    def candidates(self, inputs: StepInputs, device: Device, direction: Direction) -> Iterable[FwdParams]:
        return [FwdParams()]

    def forward(self, inputs: StepInputs, params: FwdParams) -> tuple[Any, Any]:
        return step_reference(inputs)


def _has_states(inputs: ConvInputs) -> bool:
    """True if a token may read an initial state."""
    return inputs.initial_state is not None and inputs.width > 1 and 0 not in inputs.x.shape


def _shifted(array: jax.Array, ids: jax.Array | None, by: int) -> Any:
    """The array of ``by`` tokens before (after, if negative); zeros where that is not of the same sequence."""
    if by == 0:
        return array

    def moved(x: jax.Array, fill: int) -> jax.Array:
        width = (by, 0) if by > 0 else (0, -by)
        x = jnp.pad(x, ((0, 0), width, *[(0, 0)] * (x.ndim - 2)), constant_values=fill)
        return x[:, : array.shape[1]] if by > 0 else x[:, -by:]

    found = moved(array, 0)
    return found if ids is None else jnp.where((moved(ids, PADDING) == ids)[..., None], found, 0)


def _sum_of_taps(inputs: ConvInputs, x: jax.Array, ids: jax.Array | None) -> Any:
    """The pre-activations, as if every sequence began with zeros."""
    dtype, width = inputs.compute_dtype, inputs.width
    weight = inputs.weight.astype(dtype)
    total = sum(weight[:, j] * _shifted(x, ids, width - 1 - j).astype(dtype) for j in range(width))
    return total if inputs.bias is None else total + inputs.bias.astype(dtype)


def _beginnings(inputs: ConvInputs, x: jax.Array) -> tuple[Any, Any, Any]:
    """The tokens that read initial states: their windows, and their places.

    Returns:
      ``[sequences, 2 · (width - 1), channels]``, the initial state and the first tokens behind it; the rows,
      ``[sequences, 1]``; and the positions, ``[sequences, width - 1]``, the length of a row where a sequence has no
      such token.
    """
    row, begin, length = inputs.bounds()
    offset = jnp.arange(inputs.width - 1, dtype=jnp.int32)
    position = jnp.where(offset < length[:, None], begin[:, None] + offset, x.shape[1])
    first = tokens_at(x, row[:, None], position)
    states = inputs.initial_state.swapaxes(1, 2)  # type: ignore[union-attr]
    both = [array.astype(inputs.compute_dtype) for array in (states, first)]
    return jnp.concatenate(both, axis=1), row[:, None], position


def _sum_of_window(inputs: ConvInputs, window: jax.Array) -> Any:
    """The pre-activations of the tokens of ``_beginnings``, ``[sequences, width - 1, channels]``."""
    kept = inputs.width - 1
    weight = inputs.weight.astype(inputs.compute_dtype)
    total = sum(weight[:, j] * window[:, j : j + kept] for j in range(inputs.width))
    return total if inputs.bias is None else total + inputs.bias.astype(inputs.compute_dtype)


def _slope(x: jax.Array) -> Any:
    """The derivative of silu; the sigmoid of −x, as 1 − sigmoid(x) has no digits for large x."""
    return jax.nn.sigmoid(x) * (1 + x * jax.nn.sigmoid(-x))
