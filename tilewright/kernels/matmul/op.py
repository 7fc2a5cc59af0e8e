"""The matmul: its argument list, and the parts that all its backends share."""

from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from tilewright.kernels.matmul.cases import CASES
from tilewright.kernels.matmul.inputs import MatmulInputs
from tilewright.kernels.matmul.partitioning import matmul_partitioning
from tilewright.kernels.numerics.dots import result_dtype
from tilewright.kernels.op import arguments
from tilewright.kernels.op.arguments import PlatformOption, PrecisionLike
from tilewright.kernels.op.backend import lazy
from tilewright.kernels.op.choice import Choice
from tilewright.kernels.op.portfolio import PortfolioKernel
from tilewright.kernels.op.public import public_function
from tilewright.kernels.op.roofline import Cost, array_bytes
from tilewright.kernels.op.sharding import Partitioning
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.utils.stable_ids import stable_id


@stable_id("tilewright/matmul.Matmul")
class Matmul(PortfolioKernel[MatmulInputs, Any]):
    """A matmul; see ``matmul`` for the arguments."""

    cases = CASES

    def __init__(self) -> None:
        backends = ("tilewright.kernels.matmul.xla:XlaMatmul", "tilewright.kernels.matmul.hopper:HopperMatmul")
        super().__init__("matmul", version="1", implementations=[lazy(each) for each in backends])

    def prepare(
        self,
        lhs: ArrayLike,
        rhs: ArrayLike,
        *,
        transpose_lhs: bool = False,
        transpose_rhs: bool = False,
        precision: PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        platform: PlatformOption = None,
        cfg: object = None,
    ) -> MatmulInputs:
        """Checks a call; reads only types, shapes and dtypes."""
        flags = arguments.flag("transpose_lhs", transpose_lhs), arguments.flag("transpose_rhs", transpose_rhs)
        left, right = arguments.as_array("lhs", lhs), arguments.as_array("rhs", rhs)
        is_matrix = len(left.shape) == 2 if flags[0] else len(left.shape) >= 1
        if not is_matrix or not arguments.is_floating(left.dtype):
            form = "[k, m]" if flags[0] else "[..., k]"
            raise ValueError(f"lhs must be a floating-point array {form}, got {left.shape=}, {left.dtype=}")
        if len(right.shape) != 2 or not arguments.is_floating(right.dtype):
            form = "[n, k]" if flags[1] else "[k, n]"
            raise ValueError(f"rhs must be a floating-point array {form}, got {right.shape=}, {right.dtype=}")
        dtype = result_dtype(preferred_element_type, left.dtype, right.dtype)
        inputs = MatmulInputs(
            left,
            right,
            out_dtype=dtype.name,
            transpose_lhs=flags[0],
            transpose_rhs=flags[1],
            precision=arguments.matmul_precision(precision),
            platform=arguments.platforms(platform),
        )
        axes = inputs.k_axes
        if left.shape[axes[0]] != right.shape[axes[1]]:
            raise ValueError(
                f"axis {axes[0]} of lhs and axis {axes[1]} of rhs must be equal, got {left.shape=}, {right.shape=}"
            )
        if dtype.itemsize == 8 and left.dtype.itemsize < 8 and right.dtype.itemsize < 8:
            # Without an operand of 64 bits a backend runs without x64.
            return inputs.replace(lhs=arguments.apply(lambda x: x.astype(dtype), left))
        return inputs

    def reference(self, inputs: MatmulInputs) -> jax.Array:
        """The oracle: promote narrow arrays for exact results."""
        lhs = inputs.lhs.T if inputs.transpose_lhs else inputs.lhs
        rhs = inputs.rhs.T if inputs.transpose_rhs else inputs.rhs
        wide = jnp.promote_types(jnp.promote_types(lhs.dtype, jnp.float32), rhs.dtype)
        product = jnp.matmul(lhs.astype(wide), rhs.astype(wide), precision=inputs.precision)
        return product.astype(inputs.out_dtype)

    def results(self, inputs: MatmulInputs) -> Any:
        """``[..., n]`` or ``[m, n]``, in the dtype that was asked for."""
        return jax.ShapeDtypeStruct((*inputs.leading, inputs.n), inputs.out_dtype)

    def residuals(self, results: jax.Array) -> None:
        """Nothing: the backward pass needs the operands alone."""

    def cotangents(self, inputs: MatmulInputs, residuals: None, cotangents: tuple[Any, ...]) -> jax.Array:
        return cast(jax.Array, cotangents[0])

    def partitioning(self, inputs: MatmulInputs) -> Partitioning | None:
        """Splits by rows, k and n, as in the types of both operands."""
        return matmul_partitioning(inputs)

    def cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """FLOPs of one matmul forward and two backward, and bytes of every array once."""
        inputs = self.inputs_of(inv)
        flops = 2.0 * inputs.rows * inputs.k * inputs.n
        operands = array_bytes(inputs)
        out = inputs.rows * inputs.n * jnp.dtype(inputs.out_dtype).itemsize
        if inv.direction == "forward":
            return Cost(flops, float(operands + out))
        return Cost(2 * flops, float(2 * operands + out))

    def min_cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """The same forward; backward a caller may use one gradient alone."""
        cost = self.cost(inv)
        return cost if inv.direction == "forward" else Cost(cost.flops / 2, 0.0)


_MATMUL = Matmul()


@public_function(Matmul.prepare)
def matmul(*args: Any, **kwargs: Any) -> jax.Array:
    """A matmul, ``lhs · rhs``, with sums in float32.

    Args:
      lhs: ``[..., k]``, floating-point.
      rhs: ``[k, n]``, floating-point.
      transpose_lhs: lhs is ``[k, m]``.
      transpose_rhs: rhs is ``[n, k]``.
      precision: as in ``jax.lax.dot``, of one value for both operands.
      preferred_element_type: the dtype of the result; by default that of the operands.
      platform: None or "auto" takes the best that can serve the call; a name is strict, several are tried in order.
      cfg: a config to use instead of the selected one.

    Returns:
      ``[..., n]``, or ``[m, n]``.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    return _MATMUL(*args, **kwargs)
