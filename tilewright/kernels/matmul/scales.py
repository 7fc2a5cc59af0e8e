"""The scales of narrow operands: one number, or one for each block of 128 elements; those of a ``Quantized``."""

from typing import Any

import jax
import jax.numpy as jnp

from tilewright.kernels.matmul.inputs import SCALE_BLOCK
from tilewright.kernels.quantize import quantized
from tilewright.kernels.quantize.quantized import Quantized


def expanded(scale: jax.Array, shape: tuple[int, ...], axes: tuple[int, ...]) -> jax.Array:
    """The scale of each element of an array of ``shape``, whose ``axes`` are in blocks; the last one may be short."""
    return quantized.expanded(scale, tuple(SCALE_BLOCK if axis in axes else 1 for axis in range(len(shape))), shape)


def factor(*scales: Any) -> Any:
    """The product of the scales that are numbers; ``None`` without any."""
    numbers = [scale for scale in scales if scale is not None and scale.ndim == 0]
    return None if not numbers else numbers[0] if len(numbers) == 1 else numbers[0] * numbers[1]


def by_blocks(scale: Any) -> Any:
    """The scale if it has one for each block, else ``None``."""
    return scale if scale is not None and scale.ndim else None


def check_quantized(**operands: object) -> None:
    """Checks that all operands are ``Quantized`` alike: all of float8 or all int8.

    Raises:
      TypeError: they are not.
    """
    for name, operand in operands.items():
        if not isinstance(operand, Quantized):
            raise TypeError(
                f"{' and '.join(operands)} must all be Quantized or none of them, and {name} is a "
                f"{type(operand).__name__}: quantise it, or give the other one's dequantize(dtype)"
            )
    formats = {name: operand.format for name, operand in operands.items() if isinstance(operand, Quantized)}
    if len({each == "int8" for each in formats.values()}) > 1:
        raise TypeError(f"int8 is multiplied by int8 alone, got {formats}")


def of_lhs(lhs: Quantized) -> jax.Array:
    """The scale of ``[..., rows, k]`` as matmuls take it: a number, or ``[..., rows, k/128]``.

    Raises:
      ValueError: elements of k have scales of their own, which no sum over k can have.
    """
    block = quantized.by_axis(lhs.block, lhs.shape)
    _check_along("lhs", lhs, block[-1])
    if all(each is None for each in block):
        return lhs.scales.reshape(())
    blocks = (*lhs.shape[:-1], quantized.blocks(lhs.shape[-1], SCALE_BLOCK))
    return jnp.broadcast_to(quantized.expanded(lhs.scales, (*block[:-1], 1), blocks), blocks)


def is_by_rows(lhs: Quantized) -> bool:
    """True if ``[..., rows, k]`` has a scale for each row."""
    *across, along = quantized.by_axis(lhs.block, lhs.shape)
    return along is None and all(each == 1 for each in across)


def of_rhs(rhs: Quantized, transposed: bool) -> tuple[jax.Array | None, jax.Array | None]:
    """The scale of matrices ``[..., k, n]``, or ``[..., n, k]``: what matmuls take, and what their columns are times.

    Returns:
      A number or ``[..., k/128, n/128]`` in the layout of rhs, and ``None``; or ``None`` and ``[..., 1, n]``.

    Raises:
      ValueError: the scales are of a form that no kernel has.
    """
    block = quantized.by_axis(rhs.block, rhs.shape)
    k, n = (-1, -2) if transposed else (-2, -1)
    _check_along("rhs", rhs, block[k])
    if all(each is None for each in block):
        return rhs.scales.reshape(()), None
    if block[n] == 1 and block[k] is None:
        return None, (rhs.scales.swapaxes(-1, -2) if transposed else rhs.scales)
    if block[n] == 1:
        raise ValueError(
            "rhs has a scale for each column and block of k, which no kernel takes: quantise it with block=(128, 128) "
            "or scaling='row', or give both operands' dequantize(dtype)"
        )
    shape = list(rhs.shape)
    shape[k], shape[n] = (quantized.blocks(rhs.shape[axis], SCALE_BLOCK) for axis in (k, n))
    across = tuple(1 if axis >= rhs.ndim - 2 else each for axis, each in enumerate(block))
    return jnp.broadcast_to(quantized.expanded(rhs.scales, across, tuple(shape)), shape), None


def _check_along(name: str, operand: Quantized, along: int | None) -> None:
    if along not in (None, SCALE_BLOCK):
        raise ValueError(
            f"{name} has scales that change along k, over which a matmul sums: quantise it along that axis, got "
            f"{operand.block=} with {operand.shape=}"
        )
