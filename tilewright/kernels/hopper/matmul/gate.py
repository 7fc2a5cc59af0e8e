"""The epilogue of a gated linear unit: its activation on the accumulators of both pre-activations."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from tilewright.kernels.hopper.matmul.epilogue import Columns, Place
from tilewright.kernels.numerics.activations import gated

_ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
_ERF_SCALE = 0.3275911


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class GateEpilogue:
    """``act(gate) * up``, and both accumulators where they are kept."""

    activation: str = dataclasses.field(metadata={"static": True})
    keeps_pre_activations: bool = dataclasses.field(metadata={"static": True})

    def __call__(self, sums: Sequence[Columns], place: Place) -> Sequence[Columns]:
        """The tiles of the results."""
        (gate,), (up,) = sums
        match self.activation:
            case "gelu":
                out = _gelu(gate) * up
            case "relu":  # jax.nn's is a custom_jvp_call, which Pallas of JAX 0.11 does not take
                out = jnp.maximum(gate, 0) * up
            case _:
                out = gated(self.activation, gate, up)
        return [(out,), *sums] if self.keeps_pre_activations else [(out,)]


def _gelu(x: jax.Array) -> jax.Array:
    """The exact GELU, for which Pallas has no erf: by Abramowitz and Stegun's 7.1.26, within 1.5e-7 of it."""
    size = jnp.abs(x) * 0.7071067811865476
    # The approximation holds for x >= 0: the sign is applied at the end.
    t = 1 / (1 + _ERF_SCALE * size)
    polynomial = jnp.zeros_like(x)
    for coefficient in reversed(_ERF):
        polynomial = (polynomial + coefficient) * t
    tail = 0.5 * polynomial * jnp.exp(-size * size)  # of the normal distribution, beyond |x|
    return x * jnp.where(x < 0, tail, 1 - tail)
