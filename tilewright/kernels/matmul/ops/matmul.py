"""The dense matmul."""

from typing import Any

import jax
from jax.typing import ArrayLike, DTypeLike

from tilewright.kernels.matmul.arguments import floating, scale_array, scaled_dtype, widened
from tilewright.kernels.matmul.cases import CASES
from tilewright.kernels.matmul.inputs import MatmulInputs
from tilewright.kernels.matmul.op import MatmulKernel
from tilewright.kernels.matmul.quantized import matmul_of_quantized
from tilewright.kernels.op import arguments
from tilewright.kernels.op.arguments import PlatformOption, PrecisionLike
from tilewright.kernels.op.public import public_function
from tilewright.kernels.quantize.quantized import Quantized
from tilewright.kernels.weight_only.op import packed_matmul
from tilewright.kernels.weight_only.weights import PackedWeight
from tilewright.ops.utils.stable_ids import stable_id


@stable_id("tilewright/matmul.Matmul")
class Matmul(MatmulKernel):
    """A matmul; see ``matmul`` for the arguments."""

    cases = CASES

    def __init__(self) -> None:
        backends = (
            "tilewright.kernels.matmul.hopper.backend:HopperMatmul",
            "tilewright.kernels.matmul.xla.backend:XlaMatmul",
        )
        super().__init__("matmul", version="1", backends=backends)

    def prepare(
        self,
        lhs: ArrayLike | Quantized,
        rhs: ArrayLike | Quantized | PackedWeight,
        *,
        transpose_lhs: bool = False,
        transpose_rhs: bool = False,
        precision: PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        lhs_scale: ArrayLike | None = None,
        rhs_scale: ArrayLike | None = None,
        platform: PlatformOption = None,
        cfg: object = None,
    ) -> MatmulInputs:
        """Checks a call; reads only types, shapes and dtypes."""
        flags = arguments.flag("transpose_lhs", transpose_lhs), arguments.flag("transpose_rhs", transpose_rhs)
        left = floating("lhs", lhs, "[k, m]" if flags[0] else "[..., k]")
        right = floating("rhs", rhs, "[n, k]" if flags[1] else "[k, n]")
        dtype = scaled_dtype(preferred_element_type, (lhs_scale, rhs_scale), left.dtype, right.dtype)
        inputs = MatmulInputs(
            widened(left, dtype, right),
            right,
            out_dtype=dtype.name,
            lhs_scale=scale_array("lhs_scale", lhs_scale, "lhs", left.shape, (0 if flags[0] else len(left.shape) - 1,)),
            rhs_scale=scale_array("rhs_scale", rhs_scale, "rhs", right.shape, (0, 1)),
            transpose_lhs=flags[0],
            transpose_rhs=flags[1],
            precision=arguments.matmul_precision(precision),
            platform=self.backends.allowed(platform),
        )
        axes = inputs.k_axes
        if left.shape[axes[0]] != right.shape[axes[1]]:
            raise ValueError(
                f"axis {axes[0]} of lhs and axis {axes[1]} of rhs must be equal, got {left.shape=}, {right.shape=}"
            )
        return inputs


MATMUL = Matmul()
"""The one kernel behind the public function and behind the parts of distributed matmuls."""


@public_function(Matmul.prepare)
def matmul(*args: Any, **kwargs: Any) -> jax.Array:
    """A matmul, ``lhs · rhs``, with sums in float32.

    A ``PackedWeight`` of few bits makes it a call of ``weight_only_matmul``, with its platforms and configs.

    Args:
      lhs: ``[..., k]``, floating-point; ``Quantized`` along k if rhs is: of float8, which brings ``lhs_scale``, or of
        int8, whose sums are in int32, by XLA.
      rhs: ``[k, n]``, floating-point; ``Quantized`` with one scale, one for each column, or one for each block of
        128 × 128; or a ``PackedWeight``, which is not transposed, nor is lhs then.
      transpose_lhs: lhs is ``[k, m]``.
      transpose_rhs: rhs is ``[n, k]``.
      precision: as in ``jax.lax.dot``, of one value for both operands.
      preferred_element_type: the dtype of the result; by default that of the operands, and bfloat16 for codes.
      lhs_scale: multiplied with lhs, for lhs in float8: a number, or ``[..., k/128]``, or ``[k/128, m]`` if it is
        transposed; no gradient.
      rhs_scale: multiplied with rhs: a number, or ``[k/128, n/128]``, in the layout of rhs; no gradient.
      platform: None or "auto" takes the best that can serve the call; a name is strict, several are tried in order.
      cfg: a config to use instead of the selected one.

    Returns:
      ``[..., n]``, or ``[m, n]``.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    operands = (*args[:2], kwargs.get("lhs"), kwargs.get("rhs"))
    if any(isinstance(each, PackedWeight) for each in operands):
        return _of_packed(*args, **kwargs)
    if any(isinstance(each, Quantized) for each in operands):
        return matmul_of_quantized(MATMUL, *args, **kwargs)
    return MATMUL(*args, **kwargs)


def _of_packed(
    lhs: ArrayLike,
    rhs: PackedWeight,
    *,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    precision: PrecisionLike = None,
    **options: Any,
) -> jax.Array:
    if not isinstance(rhs, PackedWeight) or isinstance(lhs, Quantized | PackedWeight):
        raise ValueError(
            f"rhs alone may be a packed weight, beside a plain lhs, got {type(lhs).__name__}, {type(rhs).__name__}"
        )
    if transpose_lhs or transpose_rhs or precision is not None:
        raise ValueError(
            f"a packed weight is multiplied as it is, got {transpose_lhs=}, {transpose_rhs=}, {precision=}; "
            "matmul(lhs, rhs.dequantize(lhs.dtype)) takes them"
        )
    return packed_matmul(lhs, rhs, **options)
