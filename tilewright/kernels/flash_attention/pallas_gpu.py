"""Flash attention for Hopper GPUs in Pallas Mosaic GPU: what it serves, its configs, and the way to its kernels."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.pallas_gpu_backward import (
    BackwardPlan,
    HopperBackwardParams,
    key_value_kernel,
    query_kernel,
)
from tilewright.kernels.flash_attention.pallas_gpu_forward import (
    SHARED_MEMORY,
    ForwardPlan,
    HopperForwardParams,
    forward_kernel,
)
from tilewright.kernels.flash_attention.pallas_gpu_scores import LOG2E, prepare_scores, transposed
from tilewright.kernels.flash_attention.pallas_gpu_walk import Extent, plan_walk, program_order, visits
from tilewright.kernels.flash_attention.problem import AttentionProblem
from tilewright.kernels.flash_attention.xla_backward import empty_backward, row_terms, sinks_gradient
from tilewright.kernels.flash_attention.xla_forward import Results, empty_forward
from tilewright.kernels.registry import Implementation, Platform
from tilewright.ops.core.types import Device, Direction
from tilewright.ops.utils.device import current_device

HEAD_DIMS = (64, 96, 128, 192, 256)
"""Head dims that kernels are built for; others are padded to the next."""

ALIGNED_ROWS = 8
"""Rows of which TMA wants a whole number in global memory, where shared memory is tiled by as many."""

CACHED_KEYS_AND_VALUES = 24 << 20
"""Bytes of keys and values that are worked on at a time: about half of the L2 cache."""

BACKWARD_DIM = 128
"""Widest head dim of the backward kernels: two accumulators of 64 rows fill a warpgroup's registers there."""

PROCESSORS = 132
"""Multiprocessors of an H100 or H200, where the device does not say."""


def padded_dim(dim: int) -> int:
    """The head dim that kernels compute with."""
    return next(size for size in HEAD_DIMS if size >= dim)


def aligned(array: Any, dim: int) -> Any:
    """``[batch, length, heads, ...]`` with zeros to a whole number of ``ALIGNED_ROWS`` and ``dim`` at the end."""
    widths = [(0, 0), (0, -array.shape[1] % ALIGNED_ROWS), (0, 0), (0, dim - array.shape[3])]
    return jnp.pad(array, widths) if any(width != (0, 0) for width in widths) else array


def check_shared_memory(params: Any, plan: ForwardPlan | BackwardPlan) -> None:
    """Raises ``ValueError`` if a config does not fit the head dims or the shared memory of a block."""
    if isinstance(plan, BackwardPlan) and plan.reason:
        raise ValueError(f"{params} {plan.reason}")
    if plan.shared_bytes > SHARED_MEMORY:
        raise ValueError(
            f"{params} needs {plan.shared_bytes} bytes of shared memory at {plan.head_dim=}, {plan.value_dim=}; "
            f"a block has {SHARED_MEMORY}"
        )


class PallasGpuFlashAttention(Implementation):
    """Serves float16 and bfloat16 of head dims up to 256 on compute capability 9.0."""

    platform: ClassVar[Platform] = Platform.PALLAS
    algorithm: ClassVar[str | None] = None
    forward_params: ClassVar[type] = HopperForwardParams
    backward_params: ClassVar[type] = HopperBackwardParams

    def not_supported_reasons(self, problem: AttentionProblem, device: Device, direction: Direction) -> list[str]:
        reasons = []
        if device.kind != "gpu" or device.capability != (9, 0):
            reasons.append(f"needs a GPU of compute capability 9.0, got {device.name} ({device.capability=})")
        if problem.dtype not in (np.dtype(jnp.bfloat16), np.dtype(np.float16)):
            reasons.append(f"computes in bfloat16 or float16, got {problem.dtype=}")
        if max(problem.head_dim, problem.value_dim) > HEAD_DIMS[-1]:
            reasons.append(f"head dims go to {HEAD_DIMS[-1]}, got {problem.head_dim=}, {problem.value_dim=}")
        if problem.bias is not None and problem.bias.dtype == np.float64:
            reasons.append("a bias is added in float32, got float64")
        if direction == "backward":
            if problem.bias is not None:
                reasons.append("computes no gradient of a bias")
            if max(problem.head_dim, problem.value_dim) > BACKWARD_DIM:
                reasons.append(
                    f"its backward pass goes to head dim {BACKWARD_DIM}, got {problem.head_dim=}, {problem.value_dim=}"
                )
        return reasons

    def heuristic(
        self, problem: AttentionProblem, device: Device, direction: Direction
    ) -> HopperForwardParams | HopperBackwardParams:
        return next(iter(self.candidates(problem, device, direction)))

    def candidates(
        self, problem: AttentionProblem, device: Device, direction: Direction
    ) -> list[HopperForwardParams | HopperBackwardParams]:
        """Best first by the sweeps in ``benchmarks/results/nvidia-h100-80gb-hbm3/hopper_sweep.json``."""
        widest = max(padded_dim(problem.head_dim), padded_dim(problem.value_dim))
        banded = problem.mask is not None
        if direction == "backward":
            block = 128 if widest <= 64 else 64
            # What adds dQ up in global memory is slower as yet: its two warpgroups wait for each other in every step.
            params = [HopperBackwardParams(block, 2, deterministic) for deterministic in (True, False)]
            dims = padded_dim(problem.head_dim), padded_dim(problem.value_dim)
            return [one for one in params if not BackwardPlan(one, *dims, problem.dtype).reason]
        if widest <= 64:
            tiles = [(192, 128, True, True), (192, 128, True, False), (128, 128, True, True), (128, 128, False, True)]
        elif widest <= 128:
            tiles = [(128, 128, False, False), (128, 128, False, True), (128, 128, True, True), (128, 128, True, False)]
            tiles = tiles if banded else [tiles[1], tiles[2], tiles[3], tiles[0]]
        else:
            tiles = [(128, 64, False, False), (128, 64, True, False)]
        return [
            HopperForwardParams(block_q, block_k, 2, persistent, ping_pong)
            for block_q, block_k, persistent, ping_pong in tiles
        ]

    def forward(self, inputs: AttentionInputs, params: HopperForwardParams) -> Results:
        """``(out, lse)``."""
        if 0 in (*inputs.query.shape, *inputs.value.shape):
            return empty_forward(inputs)
        batch, q_length, heads, head_dim = inputs.query.shape
        kv_length, kv_heads, value_dim = inputs.value.shape[1:]
        dims = padded_dim(head_dim), padded_dim(value_dim)
        check_shared_memory(params, ForwardPlan(params, *dims, inputs.query.dtype))
        extent = Extent(q_length, kv_length, params.block_q, params.block_k)
        walk, tables = plan_walk(inputs.mask, extent, transposed=False, masked_rows=False, masked_columns=True)
        options, arrays = prepare_scores(
            inputs, extent.row_tiles * params.block_q, extent.column_tiles * params.block_k
        )
        per_head = kv_length * sum(dims) * inputs.key.dtype.itemsize
        at_once = max(CACHED_KEYS_AND_VALUES // per_head, 1) * (heads // kv_heads)
        order = program_order(visits(walk, inputs.mask, False), batch * heads, at_once)
        sinks = None
        if inputs.softmax_aux is not None:
            sinks = jax.nn.logsumexp(inputs.softmax_aux.astype(jnp.float32), axis=1)
        out, lse = forward_kernel(
            aligned(inputs.query, dims[0]),
            aligned(inputs.key, dims[0]),
            aligned(inputs.value, dims[1]),
            sinks,
            jnp.asarray(order),
            tables,
            arrays,
            options=options,
            walk=walk,
            params=params,
            processors=current_device().cores or PROCESSORS,
        )
        return out[:, :q_length, :, :value_dim], lse[..., :q_length]

    def backward(
        self,
        inputs: AttentionInputs,
        results: Results,
        cotangents: tuple[Array, Array | None],
        params: HopperBackwardParams,
    ) -> dict[str, Any]:
        """Gradients for query, key, value and softmax_aux, from any backend's ``(out, lse)``."""
        if 0 in (*inputs.query.shape, *inputs.value.shape):
            return empty_backward(inputs, *results, *cotangents)
        batch, q_length, heads, head_dim = inputs.query.shape
        kv_length, kv_heads, value_dim = inputs.value.shape[1:]
        delta, exponent = row_terms(inputs, *results, *cotangents)
        dims = padded_dim(head_dim), padded_dim(value_dim)
        check_shared_memory(params, BackwardPlan(params, *dims, inputs.query.dtype))
        query, key = aligned(inputs.query, dims[0]), aligned(inputs.key, dims[0])
        value, d_out = aligned(inputs.value, dims[1]), aligned(cotangents[0], dims[1])
        q_padded, kv_padded = -(-q_length // 128) * 128, -(-kv_length // 128) * 128
        options, arrays = prepare_scores(inputs, q_padded, kv_padded)
        rows = [(0, 0), (0, 0), (0, q_padded - q_length)]
        shift = jnp.pad(exponent * (-LOG2E / options.multiplier), rows, constant_values=-jnp.inf)
        statistics = jnp.stack([shift, jnp.pad(-delta, rows)], axis=2)
        at_once = max(CACHED_KEYS_AND_VALUES // (q_length * sum(dims) * inputs.key.dtype.itemsize), 1)
        extent = Extent(kv_length, q_length, params.block_k, params.block_q)
        walk, tables = plan_walk(inputs.mask, extent, transposed=True, masked_rows=True, masked_columns=False)
        order = program_order(visits(walk, inputs.mask, True), batch * kv_heads, max(at_once // (heads // kv_heads), 1))
        d_query_ref = None
        if not params.deterministic:
            d_query_ref = jax.new_ref(jnp.zeros(query.shape, jnp.float32))
        d_key, d_value = key_value_kernel(
            query, key, value, d_out, statistics, d_query_ref, jnp.asarray(order), tables, transposed(arrays),
            options=options, walk=walk, params=params,
        )  # fmt: skip
        if d_query_ref is not None:
            d_query = (jax.freeze(d_query_ref) * options.scale).astype(query.dtype)
        else:
            block_k = 128 if max(dims) <= 64 else 64
            extent = Extent(q_length, kv_length, 128, block_k)
            walk, tables = plan_walk(inputs.mask, extent, transposed=False, masked_rows=False, masked_columns=True)
            order = program_order(visits(walk, inputs.mask, False), batch * heads, at_once)
            d_query = query_kernel(
                query, key, value, d_out, statistics, jnp.asarray(order), tables, arrays,
                options=options, walk=walk, block_k=block_k,
            )  # fmt: skip
        return {
            "query": d_query[:, :q_length, :, :head_dim],
            "key": d_key[:, :kv_length, :, :head_dim],
            "value": d_value[:, :kv_length, :, :value_dim],
            "bias": None,
            "softmax_aux": sinks_gradient(inputs, delta, exponent),
        }
