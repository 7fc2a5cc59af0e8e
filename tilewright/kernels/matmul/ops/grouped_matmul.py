"""The grouped matmul: rows in groups, each of which has a matrix of its own."""

from typing import Any, ClassVar

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from tilewright.kernels.matmul.arguments import CONTENTS, floating, grouping, scale_array, scaled_dtype, widened
from tilewright.kernels.matmul.cases import GROUPED_CASES
from tilewright.kernels.matmul.inputs import MatmulInputs
from tilewright.kernels.matmul.op import MatmulKernel
from tilewright.kernels.matmul.scales import check_quantized, of_lhs, of_rhs
from tilewright.kernels.op import arguments
from tilewright.kernels.op.arguments import PlatformOption, PrecisionLike
from tilewright.kernels.op.public import public_function
from tilewright.kernels.quantize.quantized import Quantized
from tilewright.ops.utils.stable_ids import stable_id


@stable_id("tilewright/grouped_matmul.GroupedMatmul")
class GroupedMatmul(MatmulKernel):
    """The matmul of rows in groups, each with a matrix of its own; see ``grouped_matmul`` for the arguments."""

    cases = GROUPED_CASES
    contents = CONTENTS
    always: ClassVar[tuple[str, ...]] = ("group_sizes",)

    def __init__(self) -> None:
        super().__init__(
            "grouped_matmul",
            version="1",
            backends=(
                "tilewright.kernels.matmul.hopper.backend:HopperGroupedMatmul",
                # On an H100 3 to 17 times as fast as XLA's loops, in every case and direction that was measured.
                "tilewright.kernels.matmul.triton.backend:TritonGroupedMatmul",
                # First on TPUs only: see its deprioritized.
                "tilewright.kernels.matmul.xla.ragged_dot:RaggedDot",
                "tilewright.kernels.matmul.xla.backend:XlaGroupedMatmul",
            ),
        )

    def prepare(
        self,
        lhs: ArrayLike | Quantized,
        rhs: ArrayLike | Quantized,
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
    ) -> MatmulInputs:
        """Checks a call; reads only types, shapes and dtypes."""
        if out_sharding is not None:
            raise ValueError(f"{out_sharding=} is an argument of the function alone; reshard the result of the kernel")
        transposed = arguments.flag("transpose_rhs", transpose_rhs)
        if isinstance(lhs, Quantized) or isinstance(rhs, Quantized):
            if lhs_scale is not None or rhs_scale is not None:
                raise TypeError("a Quantized has its scales, so lhs_scale and rhs_scale must be left out")
            lhs, lhs_scale, rhs, rhs_scale = _of_quantized(lhs, rhs, transposed)
        rows = floating("lhs", lhs, "[m, k]")
        matrices = floating("rhs", rhs, "[groups, n, k]" if transposed else "[groups, k, n]")
        sizes, offset = grouping(rows, {"rhs": matrices}, group_sizes, group_offset, 2 if transposed else 1)
        dtype = scaled_dtype(preferred_element_type, (lhs_scale, rhs_scale), rows.dtype, matrices.dtype)
        return MatmulInputs(
            widened(rows, dtype, matrices),
            matrices,
            out_dtype=dtype.name,
            group_sizes=sizes,
            group_offset=offset,
            lhs_scale=scale_array("lhs_scale", lhs_scale, "lhs", rows.shape, (1,)),
            rhs_scale=scale_array("rhs_scale", rhs_scale, "rhs", matrices.shape, (1, 2)),
            transpose_rhs=transposed,
            precision=arguments.matmul_precision(precision),
            platform=self.backends.allowed(platform),
        )


def _of_quantized(lhs: Any, rhs: Any, transposed: bool) -> tuple[jax.Array, Any, jax.Array, Any]:
    """The codes and the scales of both operands."""
    check_quantized(lhs=lhs, rhs=rhs)
    if lhs.format == "int8":
        raise TypeError("grouped matmuls of int8 have no kernel: quantise to 'e4m3', or give dequantize(dtype)")
    if (lhs.ndim, rhs.ndim) != (2, 3):
        raise ValueError(f"lhs must be [m, k] and rhs a matrix for each group, got {lhs.shape=}, {rhs.shape=}")
    scale, columns = arguments.apply(lambda rhs: of_rhs(rhs, transposed), rhs)
    if columns is not None:
        raise ValueError(
            "rhs has a scale for each column, which grouped matmuls do not take: quantise it with block=(128, 128)"
        )
    return lhs.values, arguments.apply(of_lhs, lhs), rhs.values, scale


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
      lhs: ``[m, k]``, rows sorted by group; ``Quantized`` along k if rhs is, which then brings ``lhs_scale``.
      rhs: ``[groups, k, n]``; ``Quantized`` with one scale or one for each block of 128 × 128.
      group_sizes: ``[groups]`` integers, the rows of each group. Any numbers are defined: rows behind the last group
        give zeros, in the result and in the gradient of lhs, and whatever they hold reaches nothing; a group ends at
        row m; a negative size counts as zero. In NumPy arrays, in lists, and in an eager call on a CPU a negative size,
        or more rows than lhs has, is an error.
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
    out = _GROUPED_MATMUL(lhs, rhs, group_sizes, precision, preferred_element_type, group_offset, **options)
    return out if out_sharding is None else jax.reshard(out, out_sharding)
