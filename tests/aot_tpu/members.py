"""Kernels of JAX itself for TPUs, as they would be called beside ours, with gradients where they have them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention as jax_flash_attention
from jax.experimental.pallas.ops.tpu.megablox import gmm
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask


def bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def with_gradients(function: Any, count: int) -> Any:
    """The function with the gradients of its first arguments."""

    def both(*arrays: Any) -> Any:
        out, pull = jax.vjp(lambda *floats: function(*floats, *arrays[count:]), *arrays[:count])
        return out, pull(out)

    return both


def splash() -> Any:
    def attend(query: Any, key: Any, value: Any) -> Any:
        mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((1024, 1024))] * 8)
        sizes = splash_attention_kernel.BlockSizes.get_default()
        kernel = splash_attention_kernel.make_splash_mqa_single_device(mask, block_sizes=sizes)
        return jax.vmap(kernel, in_axes=(0, 0, 0))(query, key, value)

    shared = bf16(2, 1024, 128)
    return with_gradients(attend, 3), (bf16(2, 8, 1024, 128), shared, shared)


def flash() -> Any:
    attend = functools.partial(jax_flash_attention, causal=True)
    return with_gradients(attend, 3), (bf16(1, 8, 1024, 128),) * 3


def megablox() -> Any:
    return with_gradients(functools.partial(gmm, preferred_element_type=jnp.bfloat16), 2), (
        bf16(2048, 512),
        bf16(8, 512, 1024),
        int32(8),
    )


def ragged_pages() -> Any:
    # It would ask the device that is here for its block sizes.
    attend = functools.partial(ragged_paged_attention, num_kv_pages_per_block=16, num_queries_per_block=32)
    return attend, (bf16(512, 32, 128), bf16(1024, 16, 16, 128), int32(64), int32(64, 32), int32(65), int32(1))
