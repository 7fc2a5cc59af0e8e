"""Matmuls of operands that are split over a mesh axis inside of ``shard_map``: with a gather before, or a sum after.

They are functions over ``matmul``, whose configs and tables their parts share, and but for "remote" no kernels of their
own: a kernel is selected and tuned on one device, where there is no axis to communicate over.
"""

import jax
from jax import lax
from jax.sharding import AxisType
from jax.typing import ArrayLike, DTypeLike

from tilewright.kernels.matmul.products import all_gather_product, reduce_scatter_product
from tilewright.kernels.matmul.rings import STRATEGIES, RingOptions, Strategy
from tilewright.kernels.numerics.dots import result_dtype
from tilewright.kernels.op import arguments
from tilewright.kernels.op.arguments import PlatformOption, PrecisionLike
from tilewright.kernels.op.sharding import AxisName, axis_names, check_manual, vary_over, varying_axes
from tilewright.ops.kernel.kernel import errors_naming_function


def all_gather_matmul(
    lhs: ArrayLike,
    rhs: ArrayLike,
    *,
    axis_name: AxisName,
    transpose_rhs: bool = False,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    strategy: Strategy = "auto",
    platform: PlatformOption = None,
) -> jax.Array:
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
        the mesh. "auto" predicts which is fastest.

    Returns:
      ``[..., m, n]``: all rows, in the order of the devices. A ring's parts are the same numbers as a gather's if
      ``matmul`` computes them alike.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
    """
    left, right, options = _prepared(
        "all_gather_matmul", lhs, rhs, axis_name, transpose_rhs, precision, preferred_element_type, strategy, platform
    )
    return all_gather_product(left, right, options)


def matmul_reduce_scatter(
    lhs: ArrayLike,
    rhs: ArrayLike,
    *,
    axis_name: AxisName,
    transpose_rhs: bool = False,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    strategy: Strategy = "auto",
    platform: PlatformOption = None,
) -> jax.Array:
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
        their products to each other, where the one of ``all_gather_matmul`` would serve. "auto" predicts which is
        fastest.

    Returns:
      ``[..., m / devices, n]``: this device's rows of the sum.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
    """
    name = "matmul_reduce_scatter"
    left, right, options = _prepared(
        name, lhs, rhs, axis_name, transpose_rhs, precision, preferred_element_type, strategy, platform
    )
    if left.shape[-2] % options.devices:
        raise ValueError(
            f"{name}: the rows of lhs must be a multiple of the {options.devices} devices of {axis_name=}, got "
            f"lhs.shape={left.shape}"
        )
    return reduce_scatter_product(left, right, options)


def _prepared(
    name: str,
    lhs: ArrayLike,
    rhs: ArrayLike,
    axis_name: AxisName,
    transpose_rhs: bool,
    precision: PrecisionLike,
    preferred_element_type: DTypeLike | None,
    strategy: Strategy,
    platform: PlatformOption,
) -> tuple[jax.Array, jax.Array, RingOptions]:
    """Checks a call; returns operands whose types vary over the axis."""
    left, right = arguments.as_array("lhs", lhs), arguments.as_array("rhs", rhs)
    transposed = arguments.flag("transpose_rhs", transpose_rhs)
    if left.ndim < 2 or not arguments.is_floating(left.dtype):
        raise ValueError(f"{name}: lhs must be a floating-point array [..., m, k], got {left.shape=}, {left.dtype=}")
    if right.ndim != 2 or not arguments.is_floating(right.dtype):
        form = "[n, k]" if transposed else "[k, n]"
        raise ValueError(f"{name}: rhs must be a floating-point array {form}, got {right.shape=}, {right.dtype=}")
    if left.shape[-1] != right.shape[1 if transposed else 0]:
        raise ValueError(
            f"{name}: lhs and rhs must have the same k, got {left.shape=}, {right.shape=} with {transpose_rhs=}"
        )
    if strategy not in STRATEGIES:
        raise ValueError(f"{name}: {strategy=} must be one of {', '.join(map(repr, STRATEGIES))}")
    arguments.platforms(platform)
    try:
        devices = int(lax.axis_size(axis_name))
    except NameError as error:
        raise ValueError(
            f"{name}: {axis_name=} is no axis of a shard_map around the call; outside of shard_map, arrays that are "
            "split over explicit mesh axes go to matmul as they are"
        ) from error
    with errors_naming_function(name):
        check_manual(AxisType.Explicit)
    options = RingOptions(
        axis_name,
        devices,
        strategy,
        result_dtype(preferred_element_type, left.dtype, right.dtype).name,
        transposed,
        arguments.matmul_precision(precision),
        platform if platform is None or isinstance(platform, str) else tuple(platform),
    )
    # Of an operand that is the same on all devices, the gradients of all are summed by the transpose of this.
    axes = varying_axes((left, right)) | frozenset(axis_names(axis_name))
    left, right = vary_over(axes, (left, right))
    return left, right, options
