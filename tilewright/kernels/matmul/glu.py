"""The gated linear unit: its argument list, and the parts that all its backends share."""

from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tilewright.kernels.matmul.cases import GLU_CASES
from tilewright.kernels.matmul.inputs import GluInputs
from tilewright.kernels.matmul.partitioning import glu_partitioning
from tilewright.kernels.numerics.activations import Activation, activation_name, gated
from tilewright.kernels.numerics.dots import result_dtype
from tilewright.kernels.op import arguments
from tilewright.kernels.op.arguments import PlatformOption
from tilewright.kernels.op.backend import lazy
from tilewright.kernels.op.choice import Choice
from tilewright.kernels.op.portfolio import PortfolioKernel
from tilewright.kernels.op.public import public_function
from tilewright.kernels.op.roofline import Cost, array_bytes
from tilewright.kernels.op.sharding import Partitioning
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.utils.stable_ids import stable_id


@stable_id("tilewright/matmul.Glu")
class Glu(PortfolioKernel[GluInputs, Any]):
    """A gated linear unit; see ``glu`` for the arguments."""

    cases = GLU_CASES
    run_is_forward: ClassVar[bool] = False  # it keeps no pre-activations

    def __init__(self) -> None:
        backends = (
            "tilewright.kernels.matmul.hopper:HopperGlu",
            "tilewright.kernels.matmul.xla:XlaGlu",
            "tilewright.kernels.grouped_matmul.triton.glu:TritonGlu",
        )
        super().__init__("glu", version="1", implementations=[lazy(each) for each in backends])

    def prepare(
        self,
        x: ArrayLike,
        gate: ArrayLike,
        up: ArrayLike,
        *,
        activation: Activation = "silu",
        platform: PlatformOption = None,
        cfg: object = None,
    ) -> GluInputs:
        """Checks a call; reads only types, shapes and dtypes."""
        rows, gates, ups = (arguments.as_array(*each) for each in (("x", x), ("gate", gate), ("up", up)))
        if not rows.shape or not arguments.is_floating(rows.dtype):
            raise ValueError(f"x must be a floating-point array [..., k], got {rows.shape=}, {rows.dtype=}")
        for name, matrix in (("gate", gates), ("up", ups)):
            if matrix.shape != (rows.shape[-1], *gates.shape[1:2]) or not arguments.is_floating(matrix.dtype):
                raise ValueError(
                    f"{name} must be a floating-point array [k, n] with k={rows.shape[-1]}, and gate and up alike, "
                    f"got {gates.shape=}, {ups.shape=}, {matrix.dtype=}"
                )
        return GluInputs(
            rows,
            gates,
            ups,
            out_dtype=result_dtype(None, rows.dtype, gates.dtype, ups.dtype).name,
            activation=activation_name(activation),
            platform=arguments.platforms(platform),
        )

    def reference(self, inputs: GluInputs) -> jax.Array:
        """The oracle: promote narrow arrays for exact results."""
        wide = jnp.promote_types(inputs.out_dtype, jnp.float32)
        x, gate, up = (each.astype(wide) for each in (inputs.x, inputs.gate, inputs.up))
        out = gated(inputs.activation, jnp.matmul(x, gate), jnp.matmul(x, up))
        return out.astype(inputs.out_dtype)

    def results(self, inputs: GluInputs) -> Any:
        """The output, and both pre-activations if they are kept."""
        out = jax.ShapeDtypeStruct(inputs.out_shape, inputs.out_dtype)
        return (out, out, out) if inputs.keeps else (out, None, None)

    def outputs(self, inputs: GluInputs, results: Any) -> jax.Array:
        return cast(jax.Array, results[0])

    def run(self, inputs: GluInputs, *, cfg: Choice) -> Any:  # type: ignore[override]
        """The result, without pre-activations in memory where the backend can do without."""
        return super().run(inputs.replace(keeps=False), cfg=cfg)

    def residuals(self, results: Any) -> Any:
        """Both pre-activations."""
        return results[1:]

    def cotangents(self, inputs: GluInputs, residuals: Any, cotangents: tuple[Any, ...]) -> jax.Array:
        return cast(jax.Array, cotangents[0])

    def partitioning(self, inputs: GluInputs) -> Partitioning | None:
        """Splits by rows and n, as in the types of x, gate and up."""
        return glu_partitioning(inputs)

    def cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """FLOPs of two matmuls forward and four backward, and bytes of every array once."""
        inputs = self.inputs_of(inv)
        flops = 4.0 * inputs.rows * inputs.k * inputs.n
        out = inputs.rows * inputs.n * jnp.dtype(inputs.out_dtype).itemsize
        operands = array_bytes(inputs)
        if inv.direction == "forward":
            return Cost(flops, float(operands + out))
        return Cost(2 * flops, float(2 * operands + 3 * out))

    def min_cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """The same forward; backward a caller may use the gradient of one matrix alone."""
        cost = self.cost(inv)
        return cost if inv.direction == "forward" else Cost(cost.flops / 4, 0.0)


_GLU = Glu()


@public_function(Glu.prepare)
def glu(*args: Any, **kwargs: Any) -> jax.Array:
    """The first half of a gated MLP, ``act(x · gate) * (x · up)``, with sums and the activation in float32.

    The pre-activations are kept for the backward pass, in the dtype of the result; a config of the backward pass may
    recompute them instead, and under ``jax.jit`` they are then not kept.

    Args:
      x: ``[..., k]``, floating-point.
      gate, up: ``[k, n]``.
      activation: "silu", "gelu" (exact), "gelu_tanh" (the default of ``jax.nn.gelu``), "relu" or "identity".
      platform: None or "auto" takes the best that can serve the call; a name is strict, several are tried in order.
      cfg: a config to use instead of the selected one.

    Returns:
      ``[..., n]``, in the dtype of the operands.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    return _GLU(*args, **kwargs)
