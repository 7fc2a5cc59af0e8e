"""The dense matmul of codes with scales, by what multiplies codes: grouped matmuls of one group, and XLA for int8."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from tilewright.kernels.matmul.ops.grouped_matmul import GROUPED_MATMUL
from tilewright.kernels.matmul.scales import check_quantized, of_lhs, of_rhs
from tilewright.kernels.numerics.dots import result_dtype
from tilewright.kernels.op import arguments
from tilewright.kernels.op.arguments import PlatformOption, PrecisionLike
from tilewright.kernels.quantize.quantized import Quantized, by_axis, expanded


def matmul_of_quantized(
    lhs: Any,
    rhs: Any,
    *,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    platform: PlatformOption = None,
    cfg: Any = None,
) -> jax.Array:
    """``matmul`` of two ``Quantized``; see there for the arguments."""
    check_quantized(lhs=lhs, rhs=rhs)
    transposed = arguments.flag("transpose_rhs", transpose_rhs)
    if arguments.flag("transpose_lhs", transpose_lhs):
        lhs = lhs.mT
    k = rhs.shape[-1 if transposed else 0]
    if rhs.ndim != 2 or lhs.ndim < 1 or (transpose_lhs and lhs.ndim != 2) or lhs.shape[-1] != k:
        raise ValueError(f"lhs and rhs must be matrices with the same k, got {lhs.shape=}, {rhs.shape=}, {transposed=}")
    dtype = result_dtype(jnp.bfloat16 if preferred_element_type is None else preferred_element_type)
    if lhs.format == "int8":
        if platform not in (None, "auto", "xla") or cfg is not None or precision is not None:
            raise ValueError(f"int8 is multiplied by XLA, exactly, got {platform=}, {cfg=}, {precision=}")
        return _of_integers(lhs, rhs, transposed).astype(dtype)
    scale, columns = of_rhs(rhs, transposed)
    leading, of_rows = lhs.shape[:-1], of_lhs(lhs)
    rows = math.prod(leading)
    out = GROUPED_MATMUL(
        lhs.values.reshape(rows, k),
        rhs.values[None],
        jnp.full((1,), rows, jnp.int32),
        precision,
        dtype if columns is None else jnp.promote_types(dtype, jnp.float32),
        transpose_rhs=transposed,
        lhs_scale=of_rows.reshape(rows, -1) if of_rows.ndim else of_rows,
        rhs_scale=None if scale is None else scale if scale.ndim == 0 else scale[None],
        platform=platform,
        cfg=cfg,
    )
    out = out if columns is None else (out * columns).astype(dtype)
    return out.reshape(*leading, out.shape[-1])


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
