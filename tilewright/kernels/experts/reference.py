"""The oracle of the layer of experts: every expert for every token, and weights of zero."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.experts.inputs import ExpertsInputs
from tilewright.kernels.numerics.activations import gated
from tilewright.kernels.op.sharding import vary_over, varying_axes


def experts_reference(inputs: ExpertsInputs) -> jax.Array:
    """The result by definition, rows rounded to the dtype of the operands; differentiable.

    It needs memory of one expert for all tokens.
    """
    flat = inputs.flat
    dtype = jnp.result_type(flat.x, flat.gate, flat.up, flat.down)
    wide = jnp.promote_types(dtype, jnp.float32)
    x, weights = flat.x.astype(wide), flat.weights.astype(wide)
    arrays = [flat.gate, flat.up, flat.down, flat.gate_bias, flat.up_bias, flat.down_bias]

    def rounded(x: jax.Array) -> jax.Array:
        return x.astype(dtype).astype(wide)

    def add(out: jax.Array, each: Any) -> tuple[jax.Array, None]:
        expert, matrices = each
        widened: list[Any] = [None if array is None else array.astype(wide) for array in matrices]
        gate, up, down, gate_bias, up_bias, down_bias = widened

        def product(rows: jax.Array, matrix: jax.Array, bias: Any) -> jax.Array:
            found = jnp.matmul(rows, matrix)
            return rounded(found if bias is None else found + bias)

        is_kept = _kept(flat.experts, expert, inputs.capacity)
        weight = jnp.where(is_kept, weights, 0).sum(-1, keepdims=True)
        # Selected on both sides: a token of others, and its cotangent, may be NaN.
        own = is_kept.any(-1, keepdims=True)
        rows = jnp.where(own, x, 0)
        hidden = rounded(gated(inputs.activation, product(rows, gate, gate_bias), product(rows, up, up_bias)))
        return out + jnp.where(own, weight * product(hidden, down, down_bias), 0), None

    count = jnp.arange(inputs.num_experts)
    out, _ = lax.scan(add, vary_over(varying_axes(inputs), jnp.zeros_like(x)), (count, arrays))
    return out.astype(dtype).reshape(*inputs.leading, inputs.d)


def _kept(experts: jax.Array, expert: jax.Array, capacity: int | None) -> jax.Array:
    """True for the choices of an expert that it has rows for."""
    chosen = experts == expert
    if capacity is None:
        return chosen
    before = jnp.cumsum(chosen.reshape(-1)).reshape(chosen.shape)
    return chosen & (before <= capacity)
