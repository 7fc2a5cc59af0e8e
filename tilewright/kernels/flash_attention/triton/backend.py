"""The Triton backend of flash attention: support, configs, and calls of its kernels."""

import functools
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.mask_terms import score_arrays
from tilewright.kernels.flash_attention.masking import inside_ranges
from tilewright.kernels.flash_attention.operands import (
    INT32_LIMIT,
    backward_arrays,
    bias_gradient,
    with_positive_scale,
)
from tilewright.kernels.flash_attention.results import Results, empty_backward, empty_forward, row_terms, sinks_gradient
from tilewright.kernels.flash_attention.triton.call import TritonCall
from tilewright.kernels.flash_attention.triton.configs import listed_params, padded_dim, smallest_params
from tilewright.kernels.flash_attention.triton.params import TritonBackwardParams, TritonForwardParams
from tilewright.kernels.numerics.softmax import sinks_lse
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.op.footprint import max_shared_bytes
from tilewright.kernels.triton import unavailable
from tilewright.ops.types import Device, Direction

DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(jnp.bfloat16))

MAX_HEAD_DIM = 256
"""Largest head dim: the accumulator of a wider one does not fit into the registers."""

MIN_SHARED_BYTES = 99 << 10
"""Shared memory that a block may have on every compute capability from 8.0 on."""


class TritonFlashAttention(Backend[AttentionInputs, Results, TritonForwardParams, TritonBackwardParams]):
    """Serves float32, float16 and bfloat16 of head dims to 256 on compute capability 8.0 and up.

    A bias of positions is the one option that it does not serve.
    """

    name: ClassVar[str] = "triton"
    platform: ClassVar[Platform] = Platform.TRITON
    forward_params: ClassVar[type] = TritonForwardParams
    backward_params: ClassVar[type] = TritonBackwardParams
    late_import: ClassVar[str] = "triton"
    keeps_lowering: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset(
        {"bias", "mask", "softmax_aux", "dropout_seed", "dropout_prob", "logits_soft_cap", "precision"}
    )

    def reasons(self, inputs: AttentionInputs, device: Device, direction: Direction) -> list[str]:
        reasons = unavailable(device)
        if inputs.dtype not in DTYPES:
            reasons.append(f"computes in float32, float16 or bfloat16, got dtype={inputs.dtype}")
        if max(inputs.head_dim, inputs.value_dim) > MAX_HEAD_DIM:
            reasons.append(
                f"head dims go to {MAX_HEAD_DIM}, got head_dim={inputs.head_dim}, value_dim={inputs.value_dim}"
            )
        if inputs.bias is not None and inputs.bias.dtype == np.float64:
            reasons.append("a bias is added in float32, got float64")
        widest, longest = max(inputs.head_dim, inputs.value_dim), max(inputs.q_length, inputs.kv_length)
        if inputs.heads * widest * longest >= INT32_LIMIT:
            reasons.append(
                f"elements of a sequence must be counted by 32 bits, got score_shape={inputs.score_shape}, {widest=}"
            )
        return reasons

    def deprioritized(self, inputs: AttentionInputs, device: Device, direction: Direction) -> bool:
        """True where it runs only if it is named or measured as the fastest.

        On compute capabilities 10 and 11 the kernels' matmuls are tcgen05's, as PTX shows. FlashAttention-4's authors
        measured attention by Triton at about 600 TFLOP/s on a B200 (theirs at 1613, 2.7 times as fast), and that by
        Ampere's instructions reached 380 (flash-attention#1589); XLA writes the scores of each block to memory.
        """
        of_tensor_memory = (10, 0) <= (device.capability or (0, 0)) < (12, 0) and inputs.dtype.itemsize == 2
        return not of_tensor_memory

    def candidates(
        self, inputs: AttentionInputs, device: Device, direction: Direction
    ) -> list[TritonForwardParams | TritonBackwardParams]:
        """Params listed for the head dims that fit into a block's shared memory; the smallest if none does."""
        listed = listed_params(inputs, device, direction)
        fitting = [params for params in listed if not self.config_reasons(inputs, device, direction, params)]
        return fitting or [smallest_params(direction)]

    def config_reasons(
        self,
        inputs: AttentionInputs,
        device: Device,
        direction: Direction,
        params: TritonForwardParams | TritonBackwardParams,
    ) -> list[str]:
        dims, itemsize = padded_dim(inputs.head_dim) + padded_dim(inputs.value_dim), inputs.dtype.itemsize
        if isinstance(params, TritonForwardParams):
            # Q stays in shared memory for float32 MMAs. For 16-bit ones it is there only until it is in registers, and
            # counts half.
            resident = params.tiles.block_q // (1 if itemsize == 4 else 2)
            needed = {"tiles": params.tiles.shared_bytes(resident, params.tiles.block_k, dims, itemsize)}
        else:
            tiles = params.key_value
            needed = {"key_value": tiles.shared_bytes(tiles.block_k, tiles.block_q, dims, itemsize)}
            if params.deterministic:
                tiles = params.query
                needed["query"] = tiles.shared_bytes(tiles.block_q, tiles.block_k, dims, itemsize)
            elif tiles.tma:  # the float32 tile of dQ, which TMA adds from shared memory
                needed["key_value"] += 4 * tiles.block_q * padded_dim(inputs.head_dim)
        available = max_shared_bytes(device, MIN_SHARED_BYTES)
        return [
            f"{getattr(params, name)} takes about {size} bytes of shared memory at head dims of {dims} together; "
            f"a block has {available}"
            for name, size in needed.items()
            if size > available
        ]

    def forward(self, inputs: AttentionInputs, params: TritonForwardParams) -> Results:
        """Computes ``(out, lse)``."""
        if inputs.is_empty:
            return empty_forward(inputs)
        inputs = with_positive_scale(inputs)
        call = TritonCall.of(inputs)
        sinks = sinks_lse(inputs.softmax_aux)
        arrays = {
            "query": inputs.query, "key": inputs.key, "value": inputs.value,
            "sinks": None if sinks is None else sinks[None],
        }  # fmt: skip
        out, lse = call.run(functools.partial(call.forward, params), arrays | _score_arrays(inputs, backward=False))
        return out, lse

    def backward(
        self,
        inputs: AttentionInputs,
        results: Results,
        cotangents: tuple[Array, Array | None],
        params: TritonBackwardParams,
    ) -> dict[str, Any]:
        """Gradients for query, key, value, bias and softmax_aux, from any backend's ``(out, lse)``."""
        if inputs.is_empty:
            return empty_backward(inputs, *results, *cotangents)
        negative_scale, inputs = inputs.softmax_scale < 0, with_positive_scale(inputs)
        call, (out, lse), (d_out, d_lse) = TritonCall.of(inputs), results, cotangents
        arrays = backward_arrays(inputs, results, cotangents) | _score_arrays(inputs, backward=True)
        d_query, d_key, d_value, *rest = call.run(functools.partial(call.backward, params), arrays)
        d_bias = d_sinks = None
        if inputs.bias is not None:
            # dS is stored unreduced, and summed by XLA: atomic additions to dbias would have no fixed order.
            d_bias = bias_gradient(rest[0], inputs.bias)
        if inputs.softmax_aux is not None:
            d_sinks = sinks_gradient(inputs, *row_terms(inputs, out, lse, d_out, d_lse))
        return {
            "query": -d_query if negative_scale else d_query,
            "key": d_key,
            "value": d_value,
            "bias": d_bias,
            "softmax_aux": d_sinks,
        }


def _score_arrays(inputs: AttentionInputs, backward: bool) -> dict[str, Any]:
    """`score_arrays`, and the ranges outside of which a kernel loads zeros."""
    inside = inside_ranges(inputs.mask, inputs.q_length, inputs.kv_length)
    return score_arrays(inputs, backward) | {"inside": inside}
