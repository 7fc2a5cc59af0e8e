"""The triangular inverse of the delta rule, by chunk: a launch of a Triton kernel, for backends on GPUs."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tilewright.kernels.linear_attention.chunks import CHUNK, ChunkTable
from tilewright.kernels.triton import launch
from tilewright.kernels.triton.limits import MIN_DOT, power_of_two


def chunk_inverse(key: jax.Array, beta: jax.Array, table: ChunkTable, *, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """``(I + tril(β_i k_i · k_j, -1))⁻¹`` of each chunk and value head, ``[chunks, HV, 64, 64]``, row-major.

    Rows and columns behind a chunk's tokens are those of the identity. Chunks without a token are not written.

    Args:
      key: ``[batch, length, H, K]``, float16, bfloat16 or float32.
      beta: ``[batch, length, HV]``, any floating-point type; HV is a multiple of H.
      table: the chunks of these tokens.
      dtype: float32, whose operands are three bfloat16 each; or float16, for keys of norm 1: their inverse has elements
        up to max(1, β), while that of others has no bound.
    """
    from tilewright.kernels.linear_attention import inverse_kernels as kernels

    (batch, length, heads, key_dim), value_heads = key.shape, beta.shape[-1]
    (out,) = launch(
        kernels.chunk_inverse,
        [key.reshape(batch * length, heads, key_dim), beta.reshape(batch * length, value_heads), table.chunks],
        [jax.ShapeDtypeStruct((table.num_chunks, value_heads, CHUNK, CHUNK), dtype)],
        grid=[table.num_chunks * heads],
        constants={
            "H": heads,
            "HV": value_heads,
            "K": key_dim,
            "BLOCK_K": min(power_of_two(key_dim, MIN_DOT), 16 if key.dtype.itemsize == 4 else 64),
            "PRECISION": "tf32x3" if key.dtype.itemsize == 4 else "tf32",
        },
        num_warps=1,
    )
    return out


def inverted(negative: jax.Array, table: ChunkTable) -> jax.Array:
    """``(I - N)⁻¹`` of strictly lower matrices N, ``[chunks, HV, 64, 64]`` float32, of chunks that have a token."""
    from tilewright.kernels.linear_attention import inverse_kernels as kernels

    (out,) = launch(
        kernels.invert_in_place,
        [table.chunks, negative],
        [jax.ShapeDtypeStruct(negative.shape, negative.dtype)],
        grid=[table.num_chunks * negative.shape[1]],
        constants={"HV": negative.shape[1]},
        num_warps=1,
        in_place={0: 1},
    )
    return out
