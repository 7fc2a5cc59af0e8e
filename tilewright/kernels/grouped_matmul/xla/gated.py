"""The gated grouped matmul in plain XLA: the backend for every device."""

from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tilewright.kernels.grouped_matmul.gated_inputs import GatedInputs, GatedResults
from tilewright.kernels.grouped_matmul.xla.blocks import Block
from tilewright.kernels.grouped_matmul.xla.params import (
    XlaBlockParams,
    XlaGatedBackwardParams,
    block_rows,
    candidate_rows,
)
from tilewright.kernels.grouped_matmul.xla.products import Products
from tilewright.kernels.numerics.activations import gated, gated_gradients, kept_apart
from tilewright.kernels.numerics.dots import accumulator
from tilewright.kernels.op.backend import Implementation
from tilewright.kernels.op.choice import Platform
from tilewright.ops.types import Device, Direction

type Params = XlaBlockParams | XlaGatedBackwardParams


class XlaGatedGroupedMatmul(Implementation[GatedInputs, Any, XlaBlockParams, XlaGatedBackwardParams]):
    """Serves every call, in loops over blocks of rows of one group each."""

    platform: ClassVar[Platform] = Platform.XLA
    forward_params: ClassVar[type] = XlaBlockParams
    backward_params: ClassVar[type] = XlaGatedBackwardParams
    forward_mode: ClassVar[bool] = True
    symbolic_dimensions: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset({"group_offset"})

    def reasons(self, inputs: GatedInputs, device: Device, direction: Direction) -> list[str]:
        return []

    def heuristic(self, inputs: GatedInputs, device: Device, direction: Direction) -> Params:
        return _params(direction, block_rows(inputs.rows, inputs.groups, device))

    def candidates(self, inputs: GatedInputs, device: Device, direction: Direction) -> Iterable[Params]:
        # Recomputing is never faster: it is for callers who want the memory.
        return [_params(direction, rows) for rows in candidate_rows(inputs.rows, inputs.groups, device)]

    def forward(self, inputs: GatedInputs, params: XlaBlockParams) -> GatedResults:
        if inputs.is_empty:
            zeros = jnp.zeros(inputs.out_shape, inputs.out_dtype)
            return zeros, zeros, zeros
        gate, up = (Products(inputs.product(x), params.block_rows) for x in (inputs.gate, inputs.up))

        def step(block: Block, results: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            both = gate.forward_block(block), up.forward_block(block)
            rows = gated(inputs.activation, *both), *both
            return tuple(block.written(array, x) for array, x in zip(results, rows, strict=True))

        # Both products of a block before the next block: its rows are read once, and are still in the cache.
        out, gates, ups = gate.over_rows(step, [inputs.n] * 3, inputs.out_dtype)
        return out, gates, ups

    def backward(
        self, inputs: GatedInputs, results: Any, cotangents: jax.Array, params: XlaGatedBackwardParams
    ) -> dict[str, Any]:
        """Gradients of lhs, gate and up, of those that are used, from both pre-activations."""
        if inputs.is_empty:
            return {name: jnp.zeros_like(getattr(inputs, name)) for name in ("lhs", "gate", "up")}
        if params.recompute:
            results = self.forward(kept_apart(inputs, cotangents), XlaBlockParams(params.block_rows))[1:]
        wide = accumulator(*(x.dtype for x in (inputs.lhs, inputs.gate, inputs.up)))
        of_gate, of_up = gated_gradients(inputs.activation, results[0], results[1], cotangents, wide)
        gate, up = (Products(inputs.product(x), params.block_rows) for x in (inputs.gate, inputs.up))
        gradients = {}
        if inputs.wants("lhs"):
            gradients["lhs"] = _d_lhs(gate, up, of_gate, of_up)
        if "gate" in inputs.gradients:
            gradients["gate"] = gate.d_rhs(of_gate)
        if "up" in inputs.gradients:
            gradients["up"] = up.d_rhs(of_up)
        return gradients


def _d_lhs(gate: Products, up: Products, of_gate: jax.Array, of_up: jax.Array) -> jax.Array:
    """The sum of both products' gradients, rounded once."""
    lhs, of_gate, of_up = gate.inputs.lhs, gate.padded(of_gate), up.padded(of_up)

    def step(block: Block, gradients: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        # In the dtype of the accumulator: rounded one by one, the two would lose what they cancel.
        total = gate.d_lhs_block(block, of_gate) + up.d_lhs_block(block, of_up)
        return (block.written(gradients[0], total),)

    return gate.over_rows(step, [lhs.shape[1]], lhs.dtype)[0]


def _params(direction: Direction, rows: int) -> Params:
    return XlaBlockParams(rows) if direction == "forward" else XlaGatedBackwardParams(rows)
