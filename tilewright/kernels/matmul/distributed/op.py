"""The ops: their argument list, and what their plans share."""

import abc
from typing import Any, ClassVar, Literal, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from tilewright.kernels.matmul.arguments import floating, widened
from tilewright.kernels.matmul.distributed.inputs import CollectiveInputs
from tilewright.kernels.matmul.ops.matmul import MATMUL
from tilewright.kernels.numerics.dots import result_dtype
from tilewright.kernels.op import arguments
from tilewright.kernels.op.arguments import PlatformOption, PrecisionLike
from tilewright.kernels.op.distributed import DistributedOp
from tilewright.kernels.op.portfolio import PortfolioKernel
from tilewright.kernels.op.public import public_function
from tilewright.kernels.op.sharding import AxisName, axis_of, devices_along
from tilewright.ops.kernel.arrays import struct_like
from tilewright.ops.kernel.parts import Product
from tilewright.ops.utils.device import current_device
from tilewright.ops.utils.stable_ids import stable_id

type Strategy = Literal["auto", "collective", "ring", "bidirectional", "remote"]

_PLANS = "tilewright.kernels.matmul.distributed.plans"


class CollectiveMatmul(DistributedOp[CollectiveInputs, Any], PortfolioKernel[CollectiveInputs, Any], abc.ABC):
    """A matmul with a gather before or a sum after, inside ``shard_map``."""

    scatters: ClassVar[bool]

    def __init__(self, name: str) -> None:
        plans = [f"{_PLANS}:{plan}" for plan in ("Collective", "Ring", "Bidirectional", "Remote")]
        super().__init__(name, version="1", backends=plans)

    def prepare(
        self,
        lhs: ArrayLike,
        rhs: ArrayLike,
        *,
        axis_name: AxisName,
        transpose_rhs: bool = False,
        precision: PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        strategy: Strategy = "auto",
        platform: PlatformOption = None,
        cfg: object = None,
    ) -> CollectiveInputs:
        """Checks a call inside ``shard_map``."""
        transposed = arguments.flag("transpose_rhs", transpose_rhs)
        left, right = floating("lhs", lhs, "[..., m, k]"), floating("rhs", rhs, "[n, k]" if transposed else "[k, n]")
        if left.shape[-1] != right.shape[1 if transposed else 0]:
            raise ValueError(
                f"lhs and rhs must have the same k, got {left.shape=}, {right.shape=} with {transpose_rhs=}"
            )
        try:
            devices = devices_along(axis_name, "operands")
        except ValueError as error:
            raise ValueError(
                f"{error}; outside of shard_map, arrays that are split over explicit mesh axes go to matmul as they are"
            ) from error
        if self.scatters and left.shape[-2] % devices:
            raise ValueError(
                f"the rows of lhs must be a multiple of the {devices} devices of {axis_name=}, got "
                f"lhs.shape={left.shape}"
            )
        dtype = result_dtype(preferred_element_type, left.dtype, right.dtype)
        mesh = jax.sharding.get_abstract_mesh()
        inputs = CollectiveInputs(
            widened(left, dtype, right),
            right,
            out_dtype=dtype.name,
            scatters=self.scatters,
            transpose_rhs=transposed,
            precision=arguments.matmul_precision(precision),
            other_axes=tuple(name for name in mesh.axis_names if name not in mesh.manual_axes),
            times=mesh.size // devices,
            platform=MATMUL.backends.allowed(platform),
            devices=devices,
            strategy=strategy,
            axis=axis_of(axis_name),
        )
        if devices == 1 and strategy == "remote":
            return inputs.replace(strategy="auto")  # there is no other device to send to
        self.check_strategy(inputs, current_device())
        return inputs

    def results(self, inputs: CollectiveInputs) -> Any:
        """This device's rows of the product, or all of them, in the dtype that was asked for."""
        return jax.ShapeDtypeStruct(inputs.out_shape, inputs.out_dtype)

    def residuals(self, results: jax.Array) -> None:
        """Nothing: the backward pass needs only the operands."""

    def cotangents(self, inputs: CollectiveInputs, residuals: None, cotangents: tuple[Any, ...]) -> jax.Array:
        return cast(jax.Array, cotangents[0])

    def product(self, inputs: CollectiveInputs) -> Product:
        """This device's rows times its matrix."""
        contracting = ((len(inputs.lhs.shape) - 1,), (1 if inputs.transpose_rhs else 0,))
        return Product(struct_like(inputs.lhs), struct_like(inputs.rhs), contracting, sources=(("lhs",), ("rhs",)))

    def reference(self, inputs: CollectiveInputs) -> jax.Array:
        """The oracle inside ``shard_map``: promote narrow arrays for exact results."""
        wide = jnp.promote_types(jnp.promote_types(inputs.lhs.dtype, jnp.float32), inputs.rhs.dtype)
        lhs, rhs = (x.astype(wide) for x in (inputs.lhs, inputs.rhs))
        rows = lhs.ndim - 2
        lhs = lhs if self.scatters else lax.all_gather(lhs, inputs.axis, axis=rows, tiled=True)
        out = jnp.matmul(lhs, rhs.T if inputs.transpose_rhs else rhs, precision=inputs.precision)
        out = lax.psum_scatter(out, inputs.axis, scatter_dimension=rows, tiled=True) if self.scatters else out
        return out.astype(inputs.out_dtype)


@stable_id("tilewright/matmul.MatmulReduceScatter")
class MatmulReduceScatter(CollectiveMatmul):
    """A matmul whose partial sums are added over devices; see ``matmul_reduce_scatter`` for the arguments."""

    scatters: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__("matmul_reduce_scatter")


_MATMUL_REDUCE_SCATTER = MatmulReduceScatter()


@stable_id("tilewright/matmul.AllGatherMatmul")
class AllGatherMatmul(CollectiveMatmul):
    """A matmul of gathered rows; see ``all_gather_matmul`` for the arguments. Its gradient of lhs is the other op."""

    scatters: ClassVar[bool] = False
    kernel = _MATMUL_REDUCE_SCATTER

    def __init__(self) -> None:
        super().__init__("all_gather_matmul")


_ALL_GATHER_MATMUL = AllGatherMatmul()


@public_function(AllGatherMatmul.prepare)
def all_gather_matmul(*args: Any, **kwargs: Any) -> jax.Array:
    """``all_gather(lhs) · rhs`` inside of ``shard_map``, where rows of lhs are split over a mesh axis.

    The gradient of lhs is a ``matmul_reduce_scatter``. For that of rhs lhs is gathered again, and sums are in float32.

    Args:
      lhs: ``[..., m / devices, k]``, floating-point: this device's rows.
      rhs: ``[k, n]``, floating-point: mostly this device's columns of a matrix.
      axis_name: the mesh axis, or several.
      transpose_rhs: rhs is ``[n, k]``.
      precision, preferred_element_type, platform: as in ``matmul``, which multiplies the parts.
      strategy: "collective" gathers and then multiplies. "ring" multiplies a part while the next one comes from a
        neighbour, and "bidirectional" takes them from both neighbours. "remote" is one kernel, whose devices send their
        rows to each other: for up to 8 Hopper GPUs of one process, 16-bit operands and a ``shard_map`` over all axes of
        the mesh. "auto" takes what a measurement on this mesh (``tilewright.tune``) or else a model found fastest.
      cfg: a ``Choice`` of a plan to use instead of the selected one.

    Returns:
      ``[..., m, n]``: all rows, in the order of the devices. A ring's parts are the same numbers as a gather's if
      ``matmul`` computes them alike.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
    """
    return _ALL_GATHER_MATMUL(*args, **kwargs)


@public_function(MatmulReduceScatter.prepare)
def matmul_reduce_scatter(*args: Any, **kwargs: Any) -> jax.Array:
    """``psum_scatter(lhs · rhs)`` inside of ``shard_map``, where k is split over a mesh axis.

    Partial products stay in float32 (float64 for float64) until they are added up: ``devices − 1`` additions, and one
    rounding to the dtype of the result. In a ring the order of the additions depends on the rows, not on time: results
    repeat bit for bit. The gradient of lhs is an ``all_gather_matmul``, and that of rhs uses the same gathered
    cotangents.

    Args:
      lhs: ``[..., m, k / devices]``, floating-point: this device's part of k. m must be a multiple of the devices.
      rhs: ``[k / devices, n]``, floating-point.
      axis_name: the mesh axis, or several.
      transpose_rhs: rhs is ``[n, k / devices]``.
      precision, preferred_element_type, platform: as in ``matmul``, which multiplies the parts.
      strategy: "collective" multiplies and then sums. "ring" multiplies the rows of one device while the sums of
        another travel, and "bidirectional" sends them to both neighbours. "remote" is one kernel, whose devices send
        their products to each other, where the one of ``all_gather_matmul`` would serve. "auto" takes what a
        measurement on this mesh (``tilewright.tune``) or else a model found fastest.
      cfg: a ``Choice`` of a plan to use instead of the selected one.

    Returns:
      ``[..., m / devices, n]``: this device's rows of the sum.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
    """
    return _MATMUL_REDUCE_SCATTER(*args, **kwargs)
