"""The dense matmul."""

from typing import Any

import jax
from jax.typing import ArrayLike, DTypeLike

from tilewright.kernels.matmul.arguments import floating, widened
from tilewright.kernels.matmul.cases import CASES
from tilewright.kernels.matmul.inputs import MatmulInputs
from tilewright.kernels.matmul.op import MatmulKernel
from tilewright.kernels.numerics.dots import result_dtype
from tilewright.kernels.op import arguments
from tilewright.kernels.op.arguments import PlatformOption, PrecisionLike
from tilewright.kernels.op.public import public_function
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
        lhs: ArrayLike,
        rhs: ArrayLike | PackedWeight,
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
        left = floating("lhs", lhs, "[k, m]" if flags[0] else "[..., k]")
        right = floating("rhs", rhs, "[n, k]" if flags[1] else "[k, n]")
        dtype = result_dtype(preferred_element_type, left.dtype, right.dtype)
        inputs = MatmulInputs(
            widened(left, dtype, right),
            right,
            out_dtype=dtype.name,
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
      lhs: ``[..., k]``, floating-point.
      rhs: ``[k, n]``, floating-point or a ``PackedWeight``, which is not transposed, nor is lhs then.
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
    rhs = args[1] if len(args) > 1 else kwargs.get("rhs")
    if isinstance(rhs, PackedWeight):
        return _of_packed(*args, **kwargs)
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
    if transpose_lhs or transpose_rhs or precision is not None:
        raise ValueError(
            f"a packed weight is multiplied as it is, got {transpose_lhs=}, {transpose_rhs=}, {precision=}; "
            "matmul(lhs, rhs.dequantize(lhs.dtype)) takes them"
        )
    return packed_matmul(lhs, rhs, **options)
