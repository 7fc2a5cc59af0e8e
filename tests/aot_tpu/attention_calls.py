"""Calls of attention as `compiler.report` compiles them: ours with a config, and JAX's."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.kernels.flash_attention.op import FlashAttention
from tilewright.kernels.flash_attention.tpu.backend import TpuFlashAttention
from tilewright.kernels.flash_attention.tpu.configs import listed_tiles
from tilewright.ops.types import Direction
from tilewright.ops.utils.known_devices import find_device


def arrays(length: int, head_dim: int, value_dim: int, options: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Types of query, key and value of a call, and its keywords, of which a few stand for arrays."""
    rest = dict(options)
    batch, heads, kv_heads = (rest.pop(name, 1) for name in ("batch", "heads", "kv_heads"))
    dtype = jnp.dtype(rest.pop("dtype", "bfloat16"))
    shapes = [(heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim)]
    given = [jax.ShapeDtypeStruct((batch, length, *shape), dtype) for shape in shapes]
    if rest.pop("segments", False):
        ids = jnp.zeros((batch, length), jnp.int32)
        rest |= {"q_segment_ids": ids, "kv_segment_ids": ids}
    if rest.pop("lengths", False):
        rest["key_value_seq_lengths"] = jnp.full((batch,), length - 5, jnp.int32)
    if rest.pop("mask", False):
        rest["mask"] = jnp.ones((batch, 1, length, length), bool)
    if rest.pop("bias", False):
        rest["bias"] = jnp.zeros((heads, length, length), dtype)
    if rest.pop("sinks", False):
        rest["softmax_aux"] = jnp.zeros((heads, 1), dtype)
    if rest.get("dropout_prob"):
        rest["dropout_seed"] = 3
    return given, rest


def config(tpu: str, direction: Direction, number: int, inputs: Any) -> Any:
    """A listed config of a call on a TPU."""
    return listed_tiles(inputs, find_device(tpu).device, direction)[number]


def attention(
    tpu: str, direction: Direction, number: int, length: int, head_dim: int, value_dim: int, **options: Any
) -> tuple[Any, tuple[Any, ...]]:
    """One direction of our kernels, in a listed config of the call."""
    given, keywords = arrays(length, head_dim, value_dim, options)
    op, backend = FlashAttention(), TpuFlashAttention()

    def forward(*qkv: Any) -> Any:
        inputs = op.prepare(*qkv, **keywords)
        return backend.forward(inputs, config(tpu, direction, number, inputs))

    def backward(query: Any, key: Any, value: Any, out: Any, lse: Any, d_out: Any) -> Any:
        inputs = op.prepare(query, key, value, **keywords)
        return backend.backward(inputs, (out, lse), (d_out, None), config(tpu, direction, number, inputs))

    if direction == "forward":
        return forward, tuple(given)
    batch, _, heads, _ = given[0].shape
    out = jax.ShapeDtypeStruct((*given[0].shape[:3], value_dim), given[0].dtype)
    lse = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
    return backward, (*given, out, lse, out)


def jax_attention(length: int, head_dim: int, block: int) -> tuple[Any, tuple[Any, ...]]:
    """The forward pass of JAX's own flash attention, named as ours, for `TpuReport.kernel_cycles`."""
    from jax.experimental.pallas.ops.tpu import flash_attention as theirs

    struct = jax.ShapeDtypeStruct((1, 1, length, head_dim), jnp.bfloat16)
    sizes = theirs.BlockSizes(block_q=block, block_k_major=block, block_k=block, block_b=1)

    def run(query: Any, key: Any, value: Any) -> Any:
        return theirs.flash_attention(query, key, value, sm_scale=1 / math.sqrt(head_dim), block_sizes=sizes)

    return run, (struct, struct, struct)
