"""The router in plain XLA: the backend for every device."""

from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.router.inputs import EPSILON, RouterInputs, entries, routed, softmax, without_nan
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams


class XlaRouter(Backend[RouterInputs, tuple[Any, Any], FwdParams, BwdParams]):
    """Supports every floating-point dtype and shape; has no params."""

    name: ClassVar[str] = "xla"
    platform: ClassVar[Platform] = Platform.XLA
    forward_mode: ClassVar[bool] = True
    symbolic_dimensions: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset({"bias", "scoring", "normalize", "num_groups", "top_groups", "scale"})

    def reasons(self, inputs: RouterInputs, device: Device, direction: Direction) -> list[str]:
        return []

    def candidates(self, inputs: RouterInputs, device: Device, direction: Direction) -> Iterable[FwdParams | BwdParams]:
        return [FwdParams() if direction == "forward" else BwdParams()]

    def forward(self, inputs: RouterInputs, params: FwdParams) -> tuple[Any, Any]:
        return routed(inputs)

    def backward(self, inputs: RouterInputs, results: Any, cotangents: Any, params: BwdParams) -> dict[str, jax.Array]:
        """Computes the gradient of the logits, which only those of the chosen experts have unless all were summed."""
        logits, experts, slope = without_nan(inputs), results, inputs.scale * cotangents[0]
        if inputs.scoring == "softmax" and not inputs.normalize:
            probabilities = softmax(logits)
            flow = slope * entries(probabilities, experts)
            gradient = _in_place(flow, experts, logits.shape[-1]) - probabilities * flow.sum(-1, keepdims=True)
        else:
            of_chosen = _of_sigmoid if inputs.scoring == "sigmoid" else _of_softmax
            flow = of_chosen(inputs, entries(logits, experts), slope)
            gradient = _in_place(flow, experts, logits.shape[-1])
        return {"logits": gradient.astype(inputs.logits.dtype)}


def _of_softmax(inputs: RouterInputs, chosen: jax.Array, slope: jax.Array) -> jax.Array:
    weights = softmax(chosen)
    return weights * (slope - (weights * slope).sum(-1, keepdims=True))


def _of_sigmoid(inputs: RouterInputs, chosen: jax.Array, slope: jax.Array) -> jax.Array:
    scores = jax.nn.sigmoid(chosen)
    if inputs.normalize:
        total = scores.sum(-1, keepdims=True) + EPSILON
        slope = (slope - (slope * scores / total).sum(-1, keepdims=True)) / total
    return slope * scores * jax.nn.sigmoid(-chosen)  # 1 − score would cancel


def _in_place(values: jax.Array, experts: jax.Array, count: int) -> jax.Array:
    """Zeros ``[..., count]`` with values at the places of their experts, of which a row has each once."""

    def row(values: jax.Array, experts: jax.Array) -> jax.Array:
        zeros = jnp.zeros(count, values.dtype)
        return zeros.at[experts].set(values, mode="promise_in_bounds", unique_indices=True)

    for _ in values.shape[:-1]:
        row = jax.vmap(row)
    return row(values, experts)
