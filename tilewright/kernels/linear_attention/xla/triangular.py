"""Block triangular matrices ``[..., n, n]``, n a power of two: put together from blocks, and inverted."""

import jax
import jax.numpy as jnp
from jax import lax

MIN_MATMUL = 8
"""Blocks below this size are multiplied by the vector units: a matmul of so few elements is mostly padding."""


def merged(diagonal: jax.Array, lower: jax.Array) -> jax.Array:
    """``[..., blocks, 2s, 2s]`` from blocks ``[..., 2 · blocks, s, s]`` of a diagonal, and those below each pair."""
    *leading, count, size, _ = diagonal.shape
    pairs = diagonal.reshape(*leading, count // 2, 2, size, size)
    upper = jnp.concatenate([pairs[..., 0, :, :], jnp.zeros_like(lower)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([lower, pairs[..., 1, :, :]], axis=-1)], axis=-2)


def lower_blocks(matrix: jax.Array, size: int) -> jax.Array:
    """``[..., n / 2s, s, s]``: of each pair of blocks along the diagonal, the block below."""
    *leading, n, _ = matrix.shape
    pairs = matrix.reshape(*leading, n // (2 * size), 2 * size, n // (2 * size), 2 * size)
    diagonal = jnp.moveaxis(jnp.diagonal(pairs, axis1=-4, axis2=-2), -1, -3)
    return diagonal[..., size:, :size]


@jax.custom_jvp
def inverse(strict: jax.Array) -> jax.Array:
    """(I + L)⁻¹ of the part L of a matrix below its diagonal.

    Pairs of inverted blocks are merged, X₂₁ = −X₂₂ L₂₁ X₁₁, from single elements up to the whole. A sum of powers of L,
    which is as short, is of no use: with keys that are alike its terms are larger than the result by many orders of
    magnitude.
    """
    *leading, n, _ = strict.shape
    found = jnp.ones((*leading, n, 1, 1), strict.dtype)
    size = 1
    while size < n:
        pairs = found.reshape(*leading, n // (2 * size), 2, size, size)
        lower = lower_blocks(strict, size)
        found = merged(found, -_product(pairs[..., 1, :, :], _product(lower, pairs[..., 0, :, :])))
        size *= 2
    return found.reshape(*leading, n, n)


@inverse.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    found = inverse(*primals)
    change = jnp.tril(tangents[0], -1)
    return found, -_product(_product(found, change), found)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    if a.shape[-1] < MIN_MATMUL:
        return jnp.sum(a[..., :, :, None] * b[..., None, :, :], axis=-2)
    # An inverse amplifies what its factors are rounded by.
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
