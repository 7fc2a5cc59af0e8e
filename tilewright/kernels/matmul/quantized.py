"""The dense matmul of codes with scales: an op's for float8, and XLA's for int8."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.matmul.scales import check_quantized, is_by_rows, of_lhs, of_rhs
from tilewright.kernels.numerics.dots import result_dtype
from tilewright.kernels.op import arguments
from tilewright.kernels.op.arguments import PlatformOption, PrecisionLike
from tilewright.kernels.quantize.quantized import Quantized, by_axis, expanded


def matmul_of_quantized(
    op: Any,
    lhs: Any,
    rhs: Any,
    *,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    lhs_scale: object = None,
    rhs_scale: object = None,
    platform: PlatformOption = None,
    cfg: Any = None,
) -> jax.Array:
    """``matmul`` of two ``Quantized``; see there for the arguments. ``op`` multiplies arrays of float8 with scales."""
    check_quantized(lhs=lhs, rhs=rhs)
    if lhs_scale is not None or rhs_scale is not None:
        raise TypeError("a Quantized has its scales, so lhs_scale and rhs_scale must be left out")
    transposed = arguments.flag("transpose_rhs", transpose_rhs)
    if arguments.flag("transpose_lhs", transpose_lhs):
        lhs = lhs.mT
    if rhs.ndim != 2 or (transpose_lhs and lhs.ndim != 2) or lhs.shape[-1] != rhs.shape[-1 if transposed else 0]:
        raise ValueError(f"lhs and rhs must be matrices with the same k, got {lhs.shape=}, {rhs.shape=}, {transposed=}")
    dtype = result_dtype(jnp.bfloat16 if preferred_element_type is None else preferred_element_type)
    if lhs.format == "int8":
        if platform not in (None, "auto", "xla") or cfg is not None or precision is not None:
            raise ValueError(f"int8 is multiplied by XLA, exactly, got {platform=}, {cfg=}, {precision=}")
        return _of_integers(lhs, rhs, transposed).astype(dtype)
    scale, factors = of_rhs(rhs, transposed)
    # Scales of rows multiply the result where those of columns do: the codes are then multiplied without any.
    by_rows = factors is not None and is_by_rows(lhs)
    if by_rows:
        factors = lhs.scales * factors
    out = op(
        lhs.values,
        rhs.values,
        transpose_rhs=transposed,
        precision=precision,
        preferred_element_type=dtype if factors is None else jnp.promote_types(dtype, jnp.float32),
        lhs_scale=None if by_rows else of_lhs(lhs),
        rhs_scale=scale,
        platform=platform,
        cfg=cfg,
    )
    found: jax.Array = out if factors is None else (out * factors).astype(dtype)
    return found


def _of_integers(lhs: Quantized, rhs: Quantized, transposed: bool) -> jax.Array:
    """Sums in int32, which are exact, times the scales of rows and columns."""
    scale, columns = of_rhs(rhs, transposed)
    block = by_axis(lhs.block, lhs.shape)
    by_blocks = [name for name, found in (("lhs", block[-1]), ("rhs", scale is not None and scale.ndim)) if found]
    if by_blocks:
        raise ValueError(
            f"sums of int8 have no scales of blocks of k: quantise {' and '.join(by_blocks)} with scaling='row' or "
            f"'tensor', got {lhs.block=}, {rhs.block=}"
        )
    contracting = ((lhs.ndim - 1,), (1 if transposed else 0,))
    sums = lax.dot_general(lhs.values, rhs.values, (contracting, ((), ())), preferred_element_type=jnp.int32)
    of_rows = expanded(lhs.scales, block, (*lhs.shape[:-1], 1))
    of_columns = next(each for each in (scale, columns) if each is not None)
    return sums.astype(jnp.float32) * of_rows * of_columns
