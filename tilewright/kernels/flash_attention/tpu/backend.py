"""The backend of flash attention for TPUs: what it serves, its configs, and the way to its kernels."""

from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.masking import split_mask
from tilewright.kernels.flash_attention.operands import with_cleared_rows, with_cleared_values, with_positive_scale
from tilewright.kernels.flash_attention.results import Results, empty_backward, empty_forward
from tilewright.kernels.flash_attention.tpu.backward import attention_backward
from tilewright.kernels.flash_attention.tpu.call import Plan
from tilewright.kernels.flash_attention.tpu.configs import listed_tiles
from tilewright.kernels.flash_attention.tpu.forward import attention_forward
from tilewright.kernels.flash_attention.tpu.params import TpuTiles
from tilewright.kernels.flash_attention.tpu.schedule import MAX_ENTRIES
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.tpu.device import LANES, device_reasons, vmem_bytes
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.device import current_device

DTYPES = (np.dtype(np.float32), np.dtype(jnp.bfloat16))

MAX_HEAD_DIM = 256

RESIDENT_SHARE = 3
"""The part of VMEM for the gradients of a head's keys and values is one in so many."""


class TpuFlashAttention(Backend[AttentionInputs, Results, TpuTiles, TpuTiles]):
    """Serves float32 and bfloat16 of head dims to 256 on TPU v5e, v5p, v6e and v7x."""

    name: ClassVar[str] = "tpu"
    platform: ClassVar[Platform] = Platform.PALLAS
    keeps_lowering: ClassVar[bool] = True
    forward_params: ClassVar[type] = TpuTiles
    backward_params: ClassVar[type] = TpuTiles
    serves: ClassVar[frozenset[str]] = frozenset(
        {"bias", "mask", "softmax_aux", "dropout_seed", "dropout_prob", "logits_soft_cap", "precision"}
    )

    def reasons(self, inputs: AttentionInputs, device: Device, direction: Direction) -> list[str]:
        reasons = device_reasons(device)
        if inputs.dtype not in DTYPES:
            reasons.append(f"computes in float32 or bfloat16, got dtype={inputs.dtype}")
        if max(inputs.head_dim, inputs.value_dim) > MAX_HEAD_DIM:
            reasons.append(
                f"head dims go to {MAX_HEAD_DIM}, got head_dim={inputs.head_dim}, value_dim={inputs.value_dim}"
            )
        if inputs.bias is not None and inputs.bias.dtype == np.float64:
            reasons.append("a bias is added in float32, got float64")
        return reasons + _table_reasons(inputs, listed_tiles(inputs, device, direction)[0])

    def candidates(self, inputs: AttentionInputs, device: Device, direction: Direction) -> list[TpuTiles]:
        return listed_tiles(inputs, device, direction)

    def deprioritized(self, inputs: AttentionInputs, device: Device, direction: Direction) -> bool:
        """True for a few queries, of which XLA computes no more than there are; blocks have at least 128."""
        return inputs.q_length <= LANES // 2

    def config_reasons(
        self, inputs: AttentionInputs, device: Device, direction: Direction, params: TpuTiles
    ) -> list[str]:
        return _table_reasons(inputs, params)

    def forward(self, inputs: AttentionInputs, params: TpuTiles) -> Results:
        """``(out, lse)``."""
        if inputs.is_empty:
            return empty_forward(inputs)
        return attention_forward(with_cleared_values(with_positive_scale(inputs)), params)

    def backward(
        self,
        inputs: AttentionInputs,
        results: Results,
        cotangents: tuple[Array, Array | None],
        params: TpuTiles,
    ) -> dict[str, Any]:
        """Gradients for query, key, value, bias and softmax_aux, from any backend's ``(out, lse)``."""
        if inputs.is_empty:
            return empty_backward(inputs, *results, *cotangents)
        inputs, d_out = with_cleared_rows(inputs, cotangents[0])
        negative_scale, inputs = inputs.softmax_scale < 0, with_positive_scale(inputs)
        resident = vmem_bytes(current_device()) // RESIDENT_SHARE
        gradients = attention_backward(inputs, *results, d_out, cotangents[1], params, resident)
        d_query = gradients["query"]
        return gradients if d_query is None or not negative_scale else gradients | {"query": -d_query}


def _table_reasons(inputs: AttentionInputs, params: TpuTiles) -> list[str]:
    """The reason why scalar memory has no room for the table of the blocks that arrays of a mask leave."""
    if inputs.is_empty or split_mask(inputs.mask)[1] is None:
        return []
    grid = Plan(inputs, params).grid
    if grid.q_tiles * grid.kv_tiles <= MAX_ENTRIES:
        return []
    return [
        f"a table of visible blocks has {MAX_ENTRIES} entries, got score_shape={inputs.score_shape} "
        f"in blocks of {grid.block_q} x {grid.block_k}"
    ]
