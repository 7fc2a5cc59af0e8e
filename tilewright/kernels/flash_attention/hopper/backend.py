"""Flash attention for Hopper GPUs in Pallas Mosaic GPU: what it serves, its configs, and the way to its kernels."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from tilewright.kernels.flash_attention.hopper.backward import key_value_kernel
from tilewright.kernels.flash_attention.hopper.backward_context import interleaved_at_once
from tilewright.kernels.flash_attention.hopper.backward_query import query_kernel
from tilewright.kernels.flash_attention.hopper.bias_gradient import (
    AnyBiasGradient,
    BiasGradient,
    position_gradient_of,
)
from tilewright.kernels.flash_attention.hopper.call import BackwardCall, KeyValueResults
from tilewright.kernels.flash_attention.hopper.d_query import (
    ConvertedRows,
    OverlappedConversion,
    convert_kernel,
    dq_accumulator_shape,
)
from tilewright.kernels.flash_attention.hopper.delta import MINUS_DELTA, delta_kernel
from tilewright.kernels.flash_attention.hopper.dims import HEAD_DIMS, padded_dim
from tilewright.kernels.flash_attention.hopper.forward import forward_kernel, heads_at_once
from tilewright.kernels.flash_attention.hopper.heuristics import (
    forward_candidates,
    forward_dims_of,
    group_parts,
    has_panels,
    narrow_backward_candidates,
    wide_backward_candidates,
)
from tilewright.kernels.flash_attention.hopper.params import (
    BackwardParams,
    HopperBackwardParams,
    HopperForwardParams,
    WideBackwardParams,
)
from tilewright.kernels.flash_attention.hopper.plans import NARROW_DIM, BackwardPlan, ForwardPlan
from tilewright.kernels.flash_attention.hopper.schedule import Extent, plan_schedule, row_steps
from tilewright.kernels.flash_attention.hopper.scores import (
    PositionOptions,
    position_bias_reasons,
    prepare_scores,
    staged_dtype,
)
from tilewright.kernels.flash_attention.hopper.wide.backward import wide_key_value_kernel
from tilewright.kernels.flash_attention.hopper.wide.plans import WideBackwardPlan
from tilewright.kernels.flash_attention.hopper.wide.query import wide_query_kernel
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.masking import split_mask
from tilewright.kernels.flash_attention.operands import with_cleared_rows, with_cleared_values
from tilewright.kernels.flash_attention.results import (
    Results,
    empty_backward,
    empty_forward,
    sinks_gradient,
    zero_fully_masked_rows,
)
from tilewright.kernels.hopper.device import device_reasons, dtype_reasons, num_sms
from tilewright.kernels.hopper.limits import SHARED_BYTES, TMA_STRIDE_BYTES, WARPGROUP_THREADS
from tilewright.kernels.hopper.schedule import program_lists, program_order
from tilewright.kernels.hopper.shared import SharedTile
from tilewright.kernels.hopper.softmax import LOG2E
from tilewright.kernels.hopper.tiles import ROWS
from tilewright.kernels.in_place import frozen
from tilewright.kernels.masks import Mask
from tilewright.kernels.numerics.softmax import sinks_lse
from tilewright.kernels.op.arguments import padded
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.op.footprint import Footprint
from tilewright.kernels.op.sharding import unvarying
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.device import current_device

CACHED_QUERIES = 16 << 20
"""Bytes of Q, dO and dQ accumulator that the backward pass works on at a time: they stay in the L2 cache."""


def aligned(array: jax.Array) -> Any:
    """``[batch, length, heads, dim]`` with zeros to strides that TMA can have: copied only where ``dim`` is unusual."""
    return padded(array, TMA_STRIDE_BYTES // array.dtype.itemsize, 3)


type Plan = ForwardPlan | BackwardPlan | WideBackwardPlan


def plan_of(inputs: AttentionInputs, params: HopperForwardParams | BackwardParams) -> Plan:
    """The shared memory and rings of a CTA with these params; of arrays only shapes and dtypes are read.

    Raises:
      ValueError: the params do not fit the head dims or the device.
    """
    direction: Direction = "forward" if isinstance(params, HopperForwardParams) else "backward"
    dims = padded_dim(inputs.head_dim), padded_dim(inputs.value_dim)
    if isinstance(params, HopperForwardParams):
        dims = forward_dims_of(inputs)
    bias_dtype = staged_dtype(inputs.bias, direction)
    return _plan(params, *dims, inputs.dtype, bias_gradient_of(inputs, params), has_panels(inputs), bias_dtype)


# Cached, since selection asks for the plan that the kernels are traced with, and adding up its bytes builds all rings.
@functools.cache
def _plan(
    params: HopperForwardParams | BackwardParams,
    head_dim: int,
    value_dim: int,
    dtype: DTypeLike,
    bias_gradient: AnyBiasGradient | None,
    panelled: bool,
    bias_dtype: DTypeLike | None,
) -> Plan:
    """The plan at padded head dims; errors as in ``plan_of``."""
    wide = max(head_dim, value_dim) > NARROW_DIM
    plan: Plan
    if isinstance(params, HopperForwardParams):
        plan = ForwardPlan(params, head_dim, value_dim, dtype, panelled, bias_dtype)
    elif isinstance(params, WideBackwardParams) and wide:
        plan = WideBackwardPlan(params, head_dim, value_dim, dtype, bias_gradient, panelled, bias_dtype)
        if plan.reason:
            raise ValueError(f"{params} at {head_dim=} {plan.reason}")
    elif isinstance(params, HopperBackwardParams):
        plan = BackwardPlan(params, head_dim, value_dim, dtype, bias_gradient, panelled, bias_dtype=bias_dtype)
        if plan.reason:
            raise ValueError(f"{params} at {head_dim=}, {value_dim=} {plan.reason}")
    else:
        raise ValueError(f"{params} is for head dims above {NARROW_DIM}, got {head_dim=}, {value_dim=}")
    if plan.shared_bytes > SHARED_BYTES:
        raise ValueError(
            f"{params} needs {plan.shared_bytes} bytes of shared memory at {head_dim=}, {value_dim=}"
            f"{' with the gradient of a bias' if bias_gradient else ''}; "
            f"a block has {SHARED_BYTES}"
        )
    return plan


def are_listed(params: BackwardParams, mask: Mask | None) -> bool:
    """True if CTAs of the kernel for dK and dV of wide heads have lists of work items.

    dQ that is added up takes the registers for that; and lists do not know the steps that arrays mask.
    """
    # A CTA for each item lost 5.8 µs an item, a fifth of the kernel at a length of 2048. Where dQ is added up, the loop
    # over items spills 12 to 56 bytes at head_dim 256 (docs/notes/hopper_attention.md).
    return params.deterministic and split_mask(mask)[1] is None


def bias_gradient_of(inputs: AttentionInputs, params: HopperForwardParams | BackwardParams) -> AnyBiasGradient | None:
    """The layout of the gradient of a call's bias; None without one, and in the forward pass."""
    if not isinstance(params, BackwardParams):
        return None
    if inputs.position_bias is not None:
        bias_of_positions = inputs.differentiated_position_bias
        positions = PositionOptions.of(bias_of_positions, split_mask(inputs.mask)[0], 0)
        return position_gradient_of(bias_of_positions, positions, inputs.score_shape, params.deterministic)
    bias = inputs.differentiated_bias
    if bias is None:
        return None
    tile_queries = ROWS // 2 if isinstance(params, WideBackwardParams) else ROWS
    return BiasGradient(tuple(bias.shape), bias.dtype, inputs.score_shape, params.deterministic, tile_queries)


class PallasGpuFlashAttention(Backend[AttentionInputs, Results, HopperForwardParams, BackwardParams]):
    """Serves float16 and bfloat16 of head dims up to 256 on compute capability 9.0."""

    name: ClassVar[str] = "hopper"
    platform: ClassVar[Platform] = Platform.PALLAS
    keeps_lowering: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset(
        {"bias", "position_bias", "mask", "softmax_aux", "dropout_seed", "dropout_prob", "logits_soft_cap", "precision"}
    )
    forward_params: ClassVar[type] = HopperForwardParams
    backward_params: ClassVar[type] = BackwardParams

    def reasons(self, inputs: AttentionInputs, device: Device, direction: Direction) -> list[str]:
        reasons = device_reasons(device) + dtype_reasons(inputs)
        if max(inputs.head_dim, inputs.value_dim) > HEAD_DIMS[-1]:
            reasons.append(
                f"head dims go to {HEAD_DIMS[-1]}, got head_dim={inputs.head_dim}, value_dim={inputs.value_dim}"
            )
        if inputs.bias is not None and inputs.bias.dtype == np.float64:
            reasons.append("a bias is added in float32, got float64")
        reasons += position_bias_reasons(inputs.position_bias, inputs.softmax_scale)
        return reasons

    def candidates(
        self, inputs: AttentionInputs, device: Device, direction: Direction
    ) -> list[HopperForwardParams | BackwardParams]:
        widest = max(padded_dim(inputs.head_dim), padded_dim(inputs.value_dim))
        if direction == "forward":
            return [*forward_candidates(inputs, widest, num_sms(device))]
        narrow = widest <= NARROW_DIM
        found = narrow_backward_candidates(inputs, widest) if narrow else wide_backward_candidates(inputs)
        # With two head dims a tile of one size may not fit beside one of the other.
        return [params for params in found if not self.config_reasons(inputs, device, direction, params)]

    def config_reasons(
        self,
        inputs: AttentionInputs,
        device: Device,
        direction: Direction,
        params: HopperForwardParams | BackwardParams,
    ) -> list[str]:
        try:
            plan_of(inputs, params)
        except ValueError as error:
            return [str(error)]
        return []

    def footprints(
        self,
        inputs: AttentionInputs,
        device: Device,
        direction: Direction,
        params: HopperForwardParams | BackwardParams,
    ) -> list[Footprint]:
        plan = plan_of(inputs, params)
        by_queries = functools.partial(_tiles, inputs.q_length, matrices=inputs.batch * inputs.heads)
        by_keys = functools.partial(_tiles, inputs.kv_length, matrices=inputs.batch * inputs.kv_heads)
        persistent = num_sms(device)
        if isinstance(params, HopperForwardParams):
            blocks = by_queries(params.block_q)
            blocks = min(blocks, persistent) if params.persistent else blocks
            return [Footprint(blocks, (params.consumers + 1) * WARPGROUP_THREADS, plan.shared_bytes)]
        threads = 3 * WARPGROUP_THREADS
        if isinstance(params, HopperBackwardParams):
            assert isinstance(plan, BackwardPlan)
            fused, group = not params.deterministic, group_parts(inputs, plan, persistent)
            plan = dataclasses.replace(plan, partial_gradients=group.parts > 1)
            blocks = min(by_keys(params.block_k) * group.parts, persistent)
            key_value = Footprint(blocks, threads + fused * WARPGROUP_THREADS, plan.shared_bytes)
            return [key_value] if fused else [key_value, Footprint(min(by_queries(128), persistent), threads)]
        assert isinstance(params, WideBackwardParams)
        assert isinstance(plan, WideBackwardPlan)
        blocks = by_keys(params.block_k) * group_parts(inputs, plan, persistent).parts
        blocks = min(blocks, persistent) if are_listed(params, inputs.mask) else blocks
        key_value = Footprint(blocks, threads, plan.shared_bytes)
        if not params.deterministic:
            return [key_value]
        return [key_value, Footprint(by_queries(params.query_rows), threads, plan.shared_bytes)]

    def forward(self, inputs: AttentionInputs, params: HopperForwardParams) -> Results:
        """``(out, lse)``."""
        if inputs.is_empty:
            return empty_forward(inputs)
        inputs = with_cleared_values(inputs)
        plan = plan_of(inputs, params)
        assert isinstance(plan, ForwardPlan)
        extent = Extent(inputs.q_length, inputs.kv_length, params.block_q, params.block_k)
        schedule, tables = plan_schedule(inputs.mask, extent, transposed=False, masked_rows=False, masked_columns=True)
        options, arrays = prepare_scores(
            inputs, extent.row_tiles * params.block_q, extent.column_tiles * params.block_k, plan.stages_bias
        )
        out, lse = forward_kernel(
            aligned(inputs.query),
            aligned(inputs.key),
            aligned(inputs.value),
            sinks_lse(inputs.softmax_aux),
            tables,
            arrays,
            options=options,
            schedule=schedule,
            plan=plan,
            num_sms=num_sms(current_device()),
        )
        return out[..., : inputs.value_dim], lse[..., : inputs.q_length]

    def backward(
        self,
        inputs: AttentionInputs,
        results: Results,
        cotangents: tuple[Array, Array | None],
        params: BackwardParams,
    ) -> dict[str, Any]:
        """Gradients for query, key, value, bias and softmax_aux, from any backend's ``(out, lse)``."""
        if inputs.is_empty:
            return empty_backward(inputs, *results, *cotangents)
        inputs, d_out = with_cleared_rows(inputs, cotangents[0])
        cotangents = d_out, cotangents[1]
        batch, q_length, heads, head_dim = inputs.query.shape
        kv_length, kv_heads, value_dim = inputs.value.shape[1:]
        plan = plan_of(inputs, params)
        assert isinstance(plan, BackwardPlan | WideBackwardPlan)
        dims, panelled, bias_gradient = (plan.head_dim, plan.value_dim), plan.panelled, plan.bias_gradient
        group = group_parts(inputs, plan, num_sms(current_device()))
        if isinstance(plan, BackwardPlan):
            plan = dataclasses.replace(plan, partial_gradients=group.parts > 1)
        bias_dtype = plan.bias_dtype if plan.stages_bias else None
        query, key, value, d_out = map(aligned, (inputs.query, inputs.key, inputs.value, cotangents[0]))
        # To whole tiles of all kernels: 128 queries and 128 keys are the largest.
        q_padded, kv_padded = -(-q_length // 128) * 128, -(-kv_length // 128) * 128
        options, arrays = prepare_scores(inputs, q_padded, kv_padded, plan.stages_bias)
        out = aligned(results[0])
        lse = results[1].astype(jnp.float32)
        d_lse = jnp.zeros_like(lse) if cotangents[1] is None else cotangents[1].astype(jnp.float32)
        d_lse, exponent = zero_fully_masked_rows(d_lse, lse)
        rows = [(0, 0), (0, 0), (0, q_padded - q_length)]
        # −lse is −∞ for padded queries: their P is 0, so no kernel has to mask them.
        shift = jnp.pad(exponent * (-LOG2E / options.multiplier), rows, constant_values=-jnp.inf)
        # Without rowsum(dO ∘ O), which the first kernel subtracts.
        statistics = jax.new_ref(unvarying(jnp.stack([shift, jnp.pad(d_lse, rows)], axis=2)))
        call = BackwardCall(
            query, key, value, d_out, out, statistics, arrays, options, params, dims, panelled, group, bias_dtype
        )
        d_query: Any = None
        accumulator: Any = None
        # Either kernel completes the statistics, which the kernel for dK and dV reads.
        if params.deterministic:
            d_query = _query_gradient(call, inputs.mask)
        else:
            shape = dq_accumulator_shape(params.block_q, batch, heads, q_length, dims[0])
            tile = SharedTile((ROWS, dims[1]), out.dtype, panelled=panelled)
            zeros, counters = delta_kernel(out, d_out, statistics, shape, tile)
            # A reference: the kernel for dK and dV adds to it in place.
            accumulator = jax.new_ref(zeros)
        extent = Extent(kv_length, q_length, params.block_k, params.block_q)
        # Rows are keys here, and those beyond the end have to be masked; columns are queries, see ``shift``.
        schedule, tables = plan_schedule(inputs.mask, extent, transposed=True, masked_rows=True, masked_columns=False)
        queue = row_steps(schedule) * group.size
        # What CTAs of one head read, and add to, over and over: Q, dO and the float32 accumulator of dQ.
        worked_on = q_length * sum(dims) * inputs.key.dtype.itemsize
        worked_on += 0 if params.deterministic else q_length * dims[0] * 4
        # In groups of 16 MB the kernel took 393 µs for 16 × 1024 causal queries, and 477 before; 4099 instead of 4376
        # for grouped heads, when the heads of a group were counted once (docs/notes/hopper_attention.md).
        # Sorting over several heads pays only if rows of tiles differ in steps. The heads of a group follow each other.
        at_once = 1 if np.ptp(queue) == 0 else max(CACHED_QUERIES // worked_on, 1)
        order = program_order(queue, batch * kv_heads * group.parts, at_once)
        bias_ref: Any = None
        if bias_gradient is not None:
            order = bias_gradient.reordered(order, len(queue), kv_heads * group.parts)
        if bias_gradient is not None and not bias_gradient.covered_by(schedule):
            bias_ref = jax.new_ref(jnp.zeros(bias_gradient.shape, bias_gradient.dtype))
        conversion: OverlappedConversion | None = None
        kernel: Any
        if isinstance(params, HopperBackwardParams):
            lists = program_lists(order, queue, min(num_sms(current_device()), len(order)))
            # The plan converts the queries at the positions of a work item's keys: both sides must have as many tiles.
            overlaps = isinstance(plan, BackwardPlan) and plan.may_overlap_conversion and query.shape[3] == dims[0]
            if overlaps and q_padded == kv_padded and group.parts == 1:
                conversion = OverlappedConversion.plan(lists, queue, q_length // params.block_k)
            counters_ref = None if conversion is None else jax.new_ref(counters)
            matrices = batch * kv_heads * group.parts
            interleaved = 0
            if bias_gradient is None:
                row_bytes = (dims[0] + dims[1]) * query.dtype.itemsize + dims[0] * 4  # Q, dO, and dQ in float32
                sizes = matrices, at_once, group.size * q_length * row_bytes
                interleaved = interleaved_at_once(schedule, queue, group, *sizes, num_sms(current_device()))
            kernel = functools.partial(
                key_value_kernel, lists=lists, interleaved_at_once=interleaved,
                conversion=conversion, counters=counters_ref,
            )  # fmt: skip
        else:
            listed = are_listed(params, inputs.mask)
            wide_lists = program_lists(order, queue, min(num_sms(current_device()), len(order)))
            kernel = functools.partial(wide_key_value_kernel, lists=wide_lists if listed else (None, order))
        found: KeyValueResults[Any] = kernel(
            call, schedule, tables, dq_accumulator=accumulator, d_bias=bias_ref, bias_gradient=bias_gradient
        )
        if accumulator is not None:
            converted = None
            if conversion is not None and found.conversion is not None:
                converted = ConvertedRows(conversion, *found.conversion)
            d_query = convert_kernel(
                frozen(accumulator), query.shape, query.dtype, converted,
                block_q=params.block_q, kv_heads=kv_heads, scale=options.scale,
                tile=SharedTile((ROWS, dims[0]), query.dtype, panelled=panelled),
            )  # fmt: skip
        d_bias: Any = found.d_bias if bias_ref is None else frozen(bias_ref)
        d_bias = None if bias_gradient is None else bias_gradient.result(d_bias)
        delta = -frozen(statistics)[:, :, MINUS_DELTA, :q_length]
        return {
            "query": d_query[..., :head_dim],
            "key": group.total(found.d_key, key.dtype)[:, :kv_length, :, :head_dim],
            "value": group.total(found.d_value, value.dtype)[:, :kv_length, :, :value_dim],
            "bias": d_bias if inputs.position_bias is None else None,
            "position_bias": d_bias if inputs.position_bias is not None else None,
            "softmax_aux": sinks_gradient(inputs, delta, exponent),
        }


def _query_gradient(call: BackwardCall[BackwardParams], mask: Mask | None) -> jax.Array:
    """dQ by a kernel of its own, which completes the statistics for the one for dK and dV."""
    query, key, value, _ = call.operands
    params, options = call.params, call.options
    batch, q_length, heads, _ = query.shape
    kv_length, kv_heads, _ = value.shape[1:]
    head_dim, value_dim = call.padded_dims
    if isinstance(params, HopperBackwardParams):
        query_rows, block_k = 128, 64
        if max(head_dim, value_dim) <= 64 and options.soft_cap is None and not options.dropout_prob:
            block_k = 128
    else:
        assert isinstance(params, WideBackwardParams)
        query_rows, block_k = params.query_rows, params.block_k
    extent = Extent(q_length, kv_length, query_rows, block_k)
    # Queries beyond the end need no mask, their −lse is −∞; keys do.
    schedule, tables = plan_schedule(mask, extent, transposed=False, masked_rows=False, masked_columns=True)
    queue = row_steps(schedule)
    sms = num_sms(current_device())
    at_once = heads_at_once(schedule, batch * heads, head_dim + value_dim, key.dtype, heads // kv_heads, sms)
    order = program_order(queue, batch * heads, at_once)
    kernel: Any
    if isinstance(params, HopperBackwardParams):
        lists = program_lists(order, queue, min(sms, len(order)))
        kernel = functools.partial(query_kernel, lists=lists, block_k=block_k)
    else:
        kernel = functools.partial(wide_query_kernel, order=jnp.asarray(order))
    return kernel(call, schedule, tables)


def _tiles(length: int, block: int, matrices: int) -> int:
    return -(-length // block) * matrices
