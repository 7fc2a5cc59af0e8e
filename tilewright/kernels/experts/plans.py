"""The plans of the layer of experts over several devices, as backends."""

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.experts.inputs import OPTIONS, ParallelInputs
from tilewright.kernels.numerics.softmax import accumulation_dtype
from tilewright.kernels.op.distributed import PlanParams, TracedPlan
from tilewright.kernels.op.sharding import AxisName
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.promotion import default_promotion


class AllGatherExperts(TracedPlan[ParallelInputs, jax.Array]):
    """The tokens of all devices come to each, and what its experts add to them goes back.

    A token goes to every device: with k choices and fewer devices than that, nearly all of them need it.
    """

    name: ClassVar[str] = "all_gather"
    serves: ClassVar[frozenset[str]] = OPTIONS

    def plan_reasons(self, inputs: ParallelInputs, device: Device, direction: Direction) -> list[str]:
        return []

    def is_best(self, inputs: ParallelInputs, device: Device, direction: Direction) -> bool:
        return True

    def forward(self, inputs: ParallelInputs, params: PlanParams) -> jax.Array:
        part, axis = inputs.flat, inputs.axis
        x, (weights, experts) = _gathered(part.x, axis), _gathered_choices(part.weights, part.experts, axis)
        # Ids of this device's experts begin at 0; all others are dropped here, and are another device's.
        experts = experts - lax.axis_index(axis).astype(jnp.int32) * part.num_experts
        biases = part.gate_bias, part.up_bias, part.down_bias
        shares = inputs.kernel(
            x, weights, experts, part.gate, part.up, part.down,
            activation=inputs.activation, biases=biases, capacity=inputs.capacity, platform=inputs.platform,
            cfg=params.parts,
        )  # fmt: skip
        return _summed(shares, axis).reshape(*inputs.leading, inputs.d)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered(x: jax.Array, axis: AxisName) -> Any:
    """The rows of all devices in their order."""
    return lax.all_gather(x, axis, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _gathered_choices(weights: jax.Array, experts: jax.Array, axis: AxisName) -> Any:
    """Weights and experts of all devices, in one exchange: two take 20 µs more, whatever their size."""
    (tokens, k), words = experts.shape, weights.dtype.itemsize // experts.dtype.itemsize
    bits = lax.bitcast_convert_type(weights, experts.dtype).reshape(tokens, k * words)
    every = lax.all_gather(jnp.concatenate([bits, experts], axis=1), axis, tiled=True)
    bits = every[:, : k * words].reshape(-1, k, *[words] * (words > 1))
    return lax.bitcast_convert_type(bits, weights.dtype), every[:, k * words :]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _summed(shares: jax.Array, axis: AxisName) -> Any:
    """This device's rows of the sum over the devices, in float32 or wider; the shares travel as they are."""
    parts = shares.reshape(lax.axis_size(axis), -1, *shares.shape[1:])
    parts = lax.all_to_all(parts, axis, split_axis=0, concat_axis=0)
    return parts.astype(accumulation_dtype(shares.dtype)).sum(0).astype(shares.dtype)


# Each is the transpose of the other.
_gathered.defvjp(
    lambda x, axis: (_gathered(x, axis), None),
    lambda axis, _, gradient: (default_promotion()(_summed)(gradient, axis),),
)
_gathered_choices.defvjp(
    lambda weights, experts, axis: (_gathered_choices(weights, experts, axis), None),
    lambda axis, _, gradients: (default_promotion()(_summed)(gradients[0], axis), None),
)
_summed.defvjp(lambda x, axis: (_summed(x, axis), None), lambda axis, _, gradient: (_gathered(gradient, axis),))
