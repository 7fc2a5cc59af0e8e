"""The grouped matmul: its argument list, and the parts that all its backends share."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from tilewright.kernels.grouped_matmul.arguments import (
    check_matrices,
    check_sizes_on_host,
    floating,
    offset_array,
    scale_array,
    sizes_array,
)
from tilewright.kernels.grouped_matmul.cases import CASES, generator_of, group_offset_of, group_sizes
from tilewright.kernels.grouped_matmul.inputs import GroupedInputs
from tilewright.kernels.grouped_matmul.partitioning import grouped_partitioning
from tilewright.kernels.grouped_matmul.reference import grouped_matmul_reference
from tilewright.kernels.numerics.dots import result_dtype
from tilewright.kernels.op import arguments
from tilewright.kernels.op.arguments import PlatformOption, PrecisionLike
from tilewright.kernels.op.backend import lazy
from tilewright.kernels.op.choice import Choice
from tilewright.kernels.op.portfolio import PortfolioKernel
from tilewright.kernels.op.public import public_function
from tilewright.kernels.op.roofline import Cost, array_bytes
from tilewright.kernels.op.sharding import Partitioning, typed_axes
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.utils.stable_ids import stable_id


@stable_id("tilewright/grouped_matmul.GroupedMatmul")
class GroupedMatmul(PortfolioKernel[GroupedInputs, Any]):
    """The matmul of rows in groups, each with a matrix of its own; see ``grouped_matmul`` for the arguments."""

    cases = CASES

    def __init__(self) -> None:
        super().__init__(
            "grouped_matmul",
            version="1",
            implementations=(
                lazy("tilewright.kernels.grouped_matmul.hopper.backend:HopperGroupedMatmul"),
                # On an H100 3 to 17 times as fast as XLA's loops, in every case and direction that was measured.
                lazy("tilewright.kernels.grouped_matmul.triton.backend:TritonGroupedMatmul"),
                lazy("tilewright.kernels.grouped_matmul.xla.backend:XlaGroupedMatmul"),
                lazy("tilewright.kernels.grouped_matmul.ragged_dot:RaggedDot"),
            ),
        )

    def prepare(
        self,
        lhs: ArrayLike,
        rhs: ArrayLike,
        group_sizes: ArrayLike,
        precision: PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        group_offset: ArrayLike | None = None,
        out_sharding: NamedSharding | PartitionSpec | None = None,
        *,
        transpose_rhs: bool = False,
        lhs_scale: ArrayLike | None = None,
        rhs_scale: ArrayLike | None = None,
        platform: PlatformOption = None,
        cfg: object = None,
    ) -> GroupedInputs:
        """Checks a call; reads only types, shapes and dtypes."""
        if out_sharding is not None:
            raise ValueError(f"{out_sharding=} is an argument of the function alone; reshard the result of the kernel")
        transposed = arguments.flag("transpose_rhs", transpose_rhs)
        rows = floating("lhs", lhs, 2, "[m, k]")
        matrices = floating("rhs", rhs, 3, "[groups, n, k]" if transposed else "[groups, k, n]")
        sizes = sizes_array(group_sizes)
        offset = None if group_offset is None else offset_array(group_offset)
        check_matrices("rhs", matrices, rows.shape[1], sizes.shape[0], 2 if transposed else 1, offset is not None)
        if offset is None and not isinstance(matrices, jax.ShapeDtypeStruct) and typed_axes(matrices)[0] is not None:
            # A device has a part of the matrices. The offset is there before a backend is chosen: not all serve one.
            offset = jnp.int32(0)
        if preferred_element_type is None and (lhs_scale is not None or rhs_scale is not None):
            narrow = 1 in (rows.dtype.itemsize, matrices.dtype.itemsize)
            preferred_element_type = jnp.bfloat16 if narrow else None
        dtype = result_dtype(preferred_element_type, rows.dtype, matrices.dtype)
        if dtype.itemsize == 8 and rows.dtype.itemsize < 8 and matrices.dtype.itemsize < 8:
            # Without an operand of 64 bits a backend runs without x64.
            rows = arguments.apply(lambda x: x.astype(dtype), rows)
        return GroupedInputs(
            rows,
            matrices,
            sizes,
            out_dtype=dtype.name,
            group_offset=offset,
            lhs_scale=None if lhs_scale is None else scale_array("lhs_scale", lhs_scale, "lhs", rows.shape, (1,)),
            rhs_scale=None if rhs_scale is None else scale_array("rhs_scale", rhs_scale, "rhs", matrices.shape, (1, 2)),
            transpose_rhs=transposed,
            precision=arguments.matmul_precision(precision),
            platform=arguments.platforms(platform),
        )

    def reference(self, inputs: GroupedInputs) -> jax.Array:
        """The oracle: promote narrow arrays for exact results."""
        return cast(jax.Array, grouped_matmul_reference(inputs).astype(inputs.out_dtype))

    def results(self, inputs: GroupedInputs) -> Any:
        return jax.ShapeDtypeStruct(inputs.out_shape, inputs.out_dtype)

    def residuals(self, results: jax.Array) -> None:
        """Nothing: the backward pass needs the operands alone."""

    def cotangents(self, inputs: GroupedInputs, residuals: None, cotangents: tuple[Any, ...]) -> jax.Array:
        return cast(jax.Array, cotangents[0])

    def partitioning(self, inputs: GroupedInputs) -> Partitioning | None:
        """Splits by rows, k, n and matrices, as in the types of lhs and rhs."""
        return grouped_partitioning(inputs)

    def sampled(self, inputs: GroupedInputs, key: jax.Array) -> GroupedInputs:
        """Normal arrays, unequal groups that have all rows, and an offset at which every matrix has a group."""
        random = generator_of(key)
        drawn: dict[str, Any] = {"group_sizes": group_sizes(random, inputs.rows, inputs.groups)}
        if inputs.group_offset is not None:
            drawn["group_offset"] = group_offset_of(random, inputs.groups, inputs.matrices)
        for name in ("lhs_scale", "rhs_scale"):
            if inputs.arrays[name] is not None:
                drawn[name] = random.uniform(0.5, 2.0, inputs.arrays[name].shape).astype(np.float32)
        return super().sampled(inputs, key).replace(**drawn)

    def cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """FLOPs if every row has a group and a matrix, and bytes of every array once."""
        inputs = self.inputs_of(inv)
        operands, out = array_bytes((inputs.lhs, inputs.rhs)), _out_bytes(inputs)
        flops = 2.0 * inputs.rows * inputs.k * inputs.n
        if inv.direction == "forward":
            return Cost(flops, float(operands + out))
        return Cost(2 * flops, float(2 * operands + out))

    def min_cost(self, inv: Invocation[Choice, Any]) -> Cost:
        """The bytes of the result: groups may be empty, and one gradient alone may be used."""
        return Cost(0.0, float(_out_bytes(self.inputs_of(inv))) if inv.direction == "forward" else 0.0)


def _out_bytes(inputs: GroupedInputs) -> int:
    return inputs.rows * inputs.n * jnp.dtype(inputs.out_dtype).itemsize


_GROUPED_MATMUL = GroupedMatmul()


@public_function(GroupedMatmul.prepare)
def grouped_matmul(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    **options: Any,
) -> jax.Array:
    """The matmul of rows in groups, each of which has a matrix of its own: row i of group g gives ``lhs[i] · rhs[g]``.

    The arguments of ``jax.lax.ragged_dot``, and more. Sums are in float32, gradients of lhs and rhs too; those of rhs
    are zeros for an empty group. The group sizes stay on the device.

    Args:
      lhs: ``[m, k]``, rows sorted by group.
      rhs: ``[groups, k, n]``.
      group_sizes: ``[groups]`` integers, the rows of each group. Any numbers are defined: rows behind the last group
        give zeros, in the result and in the gradient of lhs, and whatever they hold reaches nothing; a group ends at
        row m; a negative size counts as zero. NumPy arrays and lists with a negative size are an error.
      precision: as in ``jax.lax.dot``, of one value for both operands.
      preferred_element_type: the dtype of the result; by default that of the operands, and bfloat16 for operands of
        8 bits with scales.
      group_offset: the group of the first matrix, a scalar. rhs may then have fewer matrices than there are groups, and
        the rows of groups without one give zeros: the share of a device among which experts are split.
      out_sharding: the sharding of the result on a mesh with explicit axes.
      transpose_rhs: rhs is ``[groups, n, k]``.
      lhs_scale: multiplied with lhs, for lhs in float8: a number, or ``[m, k/128]``; no gradient.
      rhs_scale: multiplied with rhs: a number, or ``[groups, k/128, n/128]``, in the layout of rhs; no gradient.
      platform: None or "auto" takes the best that can serve the call; a name is strict, several are tried in order.
      cfg: a config to use instead of the selected one.

    Returns:
      ``[m, n]``.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    check_sizes_on_host(group_sizes)
    out = _GROUPED_MATMUL(lhs, rhs, group_sizes, precision, preferred_element_type, group_offset, **options)
    return out if out_sharding is None else jax.reshard(out, out_sharding)
