"""The matmul: its argument list, and the parts that all its backends share."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from tilewright.kernels.matmul.cases import CASES
from tilewright.kernels.matmul.inputs import MatmulInputs, MatmulOptions, MatmulProblem
from tilewright.kernels.matmul.partitioning import matmul_partitioning
from tilewright.kernels.numerics.dots import result_dtype
from tilewright.kernels.op import arguments
from tilewright.kernels.op.arguments import PlatformOption, PrecisionLike
from tilewright.kernels.op.portfolio import Choice, PortfolioKernel, lazy
from tilewright.kernels.op.public import public_function
from tilewright.kernels.op.roofline import Cost
from tilewright.kernels.op.sharding import Partitioning
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.utils.stable_ids import stable_id


@stable_id("tilewright/matmul.Matmul")
class Matmul(PortfolioKernel[MatmulInputs, MatmulProblem, Any]):
    """A matmul; see ``matmul`` for the arguments."""

    cases = CASES
    core_dims: ClassVar[Mapping[str, int]] = MappingProxyType({"lhs": 1})

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
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
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
        options = MatmulOptions(dtype.name, *flags, arguments.matmul_precision(precision))
        axes = MatmulInputs(left, right, options).k_axes
        if left.shape[axes[0]] != right.shape[axes[1]]:
            raise ValueError(
                f"axis {axes[0]} of lhs and axis {axes[1]} of rhs must be equal, got {left.shape=}, {right.shape=}"
            )
        if dtype.itemsize == 8 and left.dtype.itemsize < 8 and right.dtype.itemsize < 8:
            # Without an operand of 64 bits a backend runs without x64.
            left = arguments.apply(lambda x: x.astype(dtype), left)
        given = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
        return (left, right), given | {"platform": arguments.platforms(platform)}

    def inputs(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        *,
        out_dtype: str,
        transpose_lhs: bool,
        transpose_rhs: bool,
        precision: object,
        **_: Any,
    ) -> MatmulInputs:
        """The prepared arguments in the form that backends take."""
        return MatmulInputs(lhs, rhs, MatmulOptions(out_dtype, transpose_lhs, transpose_rhs, precision))

    def problem(self, *args: Any, **kwargs: Any) -> MatmulProblem:
        """The sizes of prepared arguments, abstract or concrete."""
        return MatmulProblem.of(self.inputs(*args, **kwargs))

    def reference(self, *args: Any, **kwargs: Any) -> jax.Array:
        """The oracle on prepared arguments: promote narrow arrays for exact results."""
        inputs = self.inputs(*args, **kwargs)
        options = inputs.options
        lhs = inputs.lhs.T if options.transpose_lhs else inputs.lhs
        rhs = inputs.rhs.T if options.transpose_rhs else inputs.rhs
        wide = jnp.promote_types(jnp.promote_types(lhs.dtype, jnp.float32), rhs.dtype)
        product = jnp.matmul(lhs.astype(wide), rhs.astype(wide), precision=options.precision)
        return product.astype(options.out_dtype)

    def results(self, inputs: MatmulInputs) -> Any:
        """``[..., n]`` or ``[m, n]``, in the dtype that was asked for."""
        k_axis, rhs_axis = inputs.k_axes
        rows = [size for axis, size in enumerate(inputs.lhs.shape) if axis != k_axis]
        return jax.ShapeDtypeStruct((*rows, inputs.rhs.shape[1 - rhs_axis]), inputs.options.out_dtype)

    def forward_with_residuals(self, *args: object, cfg: Choice, **kwargs: object) -> tuple[Any, None]:
        """The result; the backward pass needs the operands alone."""
        return super().forward_with_residuals(*args, cfg=cfg, **kwargs)[0], None

    def cotangents(
        self, inputs: MatmulInputs, results: None, cotangents: tuple[Any, ...], *args: Any, **kwargs: Any
    ) -> jax.Array:
        return cast(jax.Array, cotangents[0])

    def differentiated(self, inputs: MatmulInputs, wanted: frozenset[str]) -> MatmulInputs:
        """The inputs, with the names of the operands whose gradients are used."""
        return dataclasses.replace(inputs, gradients=wanted & inputs.gradients)

    def partitioning(self, inputs: MatmulInputs) -> Partitioning | None:
        """Splits by rows, k and n, as in the types of both operands."""
        return matmul_partitioning(inputs)

    def cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """FLOPs of one matmul forward and two backward, and bytes of every array once."""
        problem = self.problem_of(inv)
        flops = 2.0 * problem.rows * problem.k * problem.n
        lhs = problem.rows * problem.k * problem.lhs_dtype.itemsize
        rhs = problem.k * problem.n * problem.rhs_dtype.itemsize
        out = problem.rows * problem.n * jnp.dtype(problem.options.out_dtype).itemsize
        if inv.direction == "forward":
            return Cost(flops, float(lhs + rhs + out))
        return Cost(2 * flops, float(2 * (lhs + rhs) + out))

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
