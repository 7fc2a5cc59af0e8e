"""The Triton backends of the causal convolution and of its step, on NVIDIA GPUs."""

import functools
from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tilewright.kernels.causal_conv1d.inputs import (
    ConvInputs,
    ConvResults,
    StepInputs,
    final_state,
    shifted_state_gradient,
)
from tilewright.kernels.causal_conv1d.triton.params import (
    ConvBackwardParams,
    ConvForwardParams,
    ConvStepParams,
    Params,
    candidates,
    default_params,
    params_reasons,
    span,
    step_params,
)
from tilewright.kernels.op.backend import Backend, InferenceBackend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.sequential import run_with_sequential_vmap
from tilewright.kernels.triton import launch, unavailable
from tilewright.kernels.triton.batching import over_batch
from tilewright.ops.types import Device, Direction

MAX_WIDTH = 8
"""Largest width: a kernel is unrolled over it."""

MAX_TOKENS = 1 << 30
"""Largest length: kernels count tokens of a row in 32 bits."""

_DTYPES = ("float16", "bfloat16", "float32")


def _dtype_reasons(arrays: dict[str, Any]) -> list[str]:
    floating = {name: x for name, x in arrays.items() if x is not None and jnp.issubdtype(x.dtype, jnp.floating)}
    return [
        f"{name} must be float16, bfloat16 or float32, not {x.dtype}"
        for name, x in floating.items()
        if x.dtype.name not in _DTYPES
    ]


def _width_reasons(width: int) -> list[str]:
    return [] if 2 <= width <= MAX_WIDTH else [f"the width must be from 2 to {MAX_WIDTH}, got {width}"]


class TritonConv(Backend[ConvInputs, ConvResults, ConvForwardParams, ConvBackwardParams]):
    """Serves float16, bfloat16 and float32, and widths from 2 to 8; sums are in float32, in one order."""

    name: ClassVar[str] = "triton"
    platform: ClassVar[Platform] = Platform.TRITON
    forward_params: ClassVar[type] = ConvForwardParams
    backward_params: ClassVar[type] = ConvBackwardParams
    late_import: ClassVar[str] = "triton"
    keeps_lowering: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset(
        {"bias", "initial_state", "cum_seqlens", "segment_ids", "seq_lengths", "activation"}
    )

    def reasons(self, inputs: ConvInputs, device: Device, direction: Direction) -> list[str]:
        reasons = [*unavailable(device), *_dtype_reasons(inputs.arrays), *_width_reasons(inputs.width)]
        if 0 in inputs.x.shape:
            reasons.append(f"its kernels need elements, got x of the shape {inputs.x.shape}")
        elif inputs.x.shape[1] > MAX_TOKENS:
            reasons.append(f"the length must be at most {MAX_TOKENS}, got {inputs.x.shape[1]}")
        return reasons

    def heuristic(self, inputs: ConvInputs, device: Device, direction: Direction) -> Any:
        return default_params(inputs, device, direction)

    def candidates(self, inputs: ConvInputs, device: Device, direction: Direction) -> Iterable[Any]:
        return candidates(inputs, device, direction)

    def config_reasons(self, inputs: ConvInputs, device: Device, direction: Direction, params: Params) -> list[str]:
        return params_reasons(inputs, params)

    def forward(self, inputs: ConvInputs, params: ConvForwardParams) -> ConvResults:
        mapped = [inputs.x, _by_column(inputs.initial_state), _numbers(inputs, inputs.initial_state)]
        call = functools.partial(_forward, inputs=inputs.structs, params=params)
        out = over_batch(call, *_grouped(inputs, mapped))
        return ConvResults(out[0], final_state(inputs) if inputs.return_state else None)

    def backward(
        self, inputs: ConvInputs, results: ConvResults, cotangents: ConvResults, params: ConvBackwardParams
    ) -> dict[str, Any]:
        """Gradients by name; what a short sequence passes from its final to its initial state is added by XLA."""
        d_state = cotangents.state
        numbers = _numbers(inputs, inputs.initial_state, d_state)
        mapped = [inputs.x, cotangents.out, _by_column(inputs.initial_state), _by_column(d_state), numbers]
        call = functools.partial(_backward, inputs=inputs.structs, params=params)
        d_x, d_weight, d_bias, d_initial = over_batch(call, *_grouped(inputs, mapped))
        gradients = {"x": d_x[0], "weight": d_weight[0].T.astype(inputs.weight.dtype)}
        if inputs.bias is not None:
            gradients["bias"] = d_bias[0].astype(inputs.bias.dtype)
        if inputs.initial_state is not None:
            _, _, lengths = inputs.bounds()
            # The kernel writes where a sequence begins, and an empty one does not.
            found = jnp.where((lengths > 0)[:, None, None], d_initial[0].swapaxes(1, 2), 0)
            if d_state is not None:
                found = found + shifted_state_gradient(inputs, d_state.astype(found.dtype))
            gradients["initial_state"] = found.astype(inputs.initial_state.dtype)
        return gradients


def _by_column(states: jax.Array | None) -> Any:
    """States as [sequences, width - 1, channels]: vectors of channels, as tokens are."""
    return None if states is None else states.swapaxes(1, 2)


def _numbers(inputs: ConvInputs, *states: jax.Array | None) -> Any:
    """The sequences of tokens; with states also where each row is one, so that kernels find its ends alike."""
    ids = inputs.ids()
    if ids is None and any(each is not None for each in states):
        return jnp.zeros(inputs.x.shape[:2], jnp.int32)
    return ids


def _grouped(inputs: ConvInputs, mapped: list[Any]) -> tuple[list[Any], list[Any]]:
    """Arrays with a group as their first axis, which vmap multiplies: those of tokens, and weight and bias."""
    shared = [inputs.weight.T, inputs.bias]
    grouped = [[None if x is None else x[None] for x in each] for each in (mapped, shared)]
    return grouped[0], grouped[1]


def _constants(shared: Any, inputs: ConvInputs, params: Params) -> dict[str, Any]:
    weight, bias = shared
    channels, width = inputs.weight.shape
    return {
        "channels": channels,
        "width": width,
        "block_tokens": params.block_tokens,
        "block_channels": params.block_channels,
        "steps": params.steps,
        "silu": inputs.activation is not None,
        "has_bias": bias is not None,
        "weight_stride": channels * width if weight.shape[0] > 1 else 0,
        "bias_stride": channels if bias is not None and bias.shape[0] > 1 else 0,
    }


def _scalars(x: jax.Array, states: jax.Array | None, tiles: int) -> dict[str, int]:
    _, batch, length, _ = x.shape
    row_states = 1 if states is None else states.shape[1] // batch
    return {"length": length, "tiles": tiles, "batch": batch, "row_states": row_states}


def _present(array: jax.Array | None) -> Any:
    return jnp.zeros((0,), jnp.float32) if array is None else array


def _forward(mapped: Any, shared: Any, inputs: ConvInputs, params: ConvForwardParams) -> Any:
    """The results, [groups, batch, length, channels]."""
    from tilewright.kernels.causal_conv1d.triton import kernels

    x, states, ids = mapped
    groups, batch, length, channels = x.shape
    tiles = -(-length // span(inputs, params))
    (out,) = launch(
        kernels.forward,
        [x, *map(_present, (*shared, states)), jnp.zeros((0,), jnp.int32) if ids is None else ids],
        [jax.ShapeDtypeStruct(x.shape, x.dtype)],
        grid=[groups * batch * tiles * -(-channels // params.block_channels)],
        scalars=_scalars(x, states, tiles),
        constants=_constants(shared, inputs, params) | {"has_ids": ids is not None, "has_state": states is not None},
        num_warps=params.num_warps,
    )
    return out


def _backward(mapped: Any, shared: Any, inputs: ConvInputs, params: ConvBackwardParams) -> Any:
    """Gradients of x, weight, bias and initial states, each with groups as its first axis; None for absent ones."""
    from tilewright.kernels.causal_conv1d.triton import kernels

    x, d_out, states, d_states, ids = mapped
    groups, batch, length, channels = x.shape
    tiles, f32 = -(-length // span(inputs, params)), jnp.float32
    partial = (groups, batch * tiles, inputs.width, channels)
    has_bias = shared[1] is not None
    d_x, d_weight, d_bias, d_initial = launch(
        kernels.backward,
        [
            x,
            *map(_present, (*shared, d_out, states, d_states)),
            jnp.zeros((0,), jnp.int32) if ids is None else ids,
        ],
        [
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct(partial, f32),
            jax.ShapeDtypeStruct((groups, batch * tiles, channels) if has_bias else (0,), f32),
            jax.ShapeDtypeStruct((0,) if states is None else states.shape, f32),
        ],
        grid=[groups * batch * tiles * -(-channels // params.block_channels)],
        scalars=_scalars(x, d_states if states is None else states, tiles),
        constants=_constants(shared, inputs, params)
        | {"has_ids": ids is not None, "has_state": states is not None, "has_d_state": d_states is not None},
        num_warps=params.num_warps,
    )
    return (
        d_x,
        jnp.sum(d_weight, axis=1),
        jnp.sum(d_bias, axis=1) if has_bias else None,
        None if states is None else d_initial,
    )


class TritonConvStep(InferenceBackend[StepInputs, tuple[Any, Any], ConvStepParams]):
    """Serves float16, bfloat16 and float32, and widths from 2 to 8; the pool is updated in place."""

    name: ClassVar[str] = "triton"
    platform: ClassVar[Platform] = Platform.TRITON
    forward_params: ClassVar[type] = ConvStepParams
    late_import: ClassVar[str] = "triton"
    keeps_lowering: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset({"bias", "state_indices", "write_indices", "activation"})

    def forward_reasons(self, inputs: StepInputs, device: Device) -> list[str]:
        reasons = [*unavailable(device), *_dtype_reasons(inputs.arrays), *_width_reasons(inputs.width)]
        if 0 in inputs.x.shape or 0 in inputs.conv_pool.shape:
            reasons.append(f"its kernel needs elements, got {inputs.x.shape=} and {inputs.conv_pool.shape=}")
        return reasons

    def candidates(self, inputs: StepInputs, device: Device, direction: Direction) -> Iterable[ConvStepParams]:
        return step_params(inputs)

    def forward(self, inputs: StepInputs, params: ConvStepParams) -> tuple[Any, Any]:
        # One after another: each call of a vmap has a pool of its own.
        return run_with_sequential_vmap(lambda inputs: _step(inputs, params), inputs)


def _step(inputs: StepInputs, params: ConvStepParams) -> tuple[Any, Any]:
    from tilewright.kernels.causal_conv1d.triton import kernels

    x, pool = inputs.x, inputs.conv_pool
    batch, tokens, channels = x.shape
    read = jnp.arange(batch, dtype=jnp.int32) if inputs.state_indices is None else inputs.state_indices
    write = read if inputs.write_indices is None else inputs.write_indices
    y, pool = launch(
        kernels.step,
        [x, inputs.weight, _present(inputs.bias), pool, read, write],
        [jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(pool.shape, pool.dtype)],
        grid=[batch, -(-channels // params.block_channels)],
        scalars={"slots": pool.shape[0]},
        constants={
            "channels": channels,
            "width": inputs.width,
            "tokens": tokens,
            "block_channels": params.block_channels,
            "silu": inputs.activation is not None,
            "has_bias": inputs.bias is not None,
        },
        in_place={1: 3},
        num_warps=params.num_warps,
    )
    return y, pool
