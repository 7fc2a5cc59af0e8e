"""The configs of the Hopper kernels for a call, best first, by a model of their work where that decides.

The model counts what a kernel does: steps of whole tiles, the share of the SMs that has them, and for the forms of the
backward pass the FLOPs of the one and the bytes of the other. The rest is by the sweeps in
``benchmarks/results/nvidia-h100-80gb-hbm3/hopper_sweep.json`` and, for masks with arrays, by ``attention_tuned.json``.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tilewright.kernels.flash_attention.hopper.bias_gradient import BiasGradient, position_gradient_of
from tilewright.kernels.flash_attention.hopper.call import GroupParts
from tilewright.kernels.flash_attention.hopper.dims import forward_dims, needs_panels
from tilewright.kernels.flash_attention.hopper.params import (
    BackwardParams,
    HopperBackwardParams,
    HopperForwardParams,
    WideBackwardParams,
)
from tilewright.kernels.flash_attention.hopper.plans import BackwardPlan
from tilewright.kernels.flash_attention.hopper.schedule import BandSchedule, Extent
from tilewright.kernels.flash_attention.hopper.scores import PositionOptions
from tilewright.kernels.flash_attention.hopper.wide.plans import WideBackwardPlan
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.masking import split_mask
from tilewright.kernels.hopper.limits import SHARED_BYTES
from tilewright.kernels.hopper.schedule import ITEM_OVERHEAD, makespan
from tilewright.kernels.masks import AndMask

INDEPENDENT_OVERHEAD = 1.3
"""`ITEM_OVERHEAD` of consumers that go from item to item on their own, all keys in one step (``ahead`` is False).

At head_dim 64, 64 × 16 heads of 197 keys took 46 µs in one step of 208 and 54 in two of 128, 66 × 14 heads of 256 keys
54 and 57.
"""

CACHED_OVERHEAD = 1.0
"""`ITEM_OVERHEAD` with a third stage, where K and V come from the cache as other rows of tiles of the head read them.

At head_dim 64, 66 × 14 heads of 256 keys took 49 µs in two such steps and 53 in one step, 32 × 12 heads of 512 keys 65,
66 in tiles of 192 queries with two stages, and 69 with keys that stay in the rings.
"""

PERSISTENT_DIM = 160
"""Widest head dim beyond 128 from which one CTA for each item is faster: 256 keys at 256 took 203 µs so, and 214."""

ONE_STEP = 256
"""Most keys of a step, the N of wgmma. Up to head_dim 64 there are registers for them, if no step overlaps with it."""

THIRD_CONSUMER = 1.2
"""Throughput of three consumer warpgroups relative to two, in steps of 128 keys at head_dim 64: measured 1.14 (causal)
to 1.2 where both have the same number of rows to compute."""

THIRD_CONSUMER_WITH_BIAS = 1.07
"""The same with a matrix as bias, whose bytes are as many for each row: measured 1.05 to 1.11."""

FEW_KEYS = 256
"""Keys of two steps, in which taking turns hides nothing; beside a bias and the end of the keys it spills registers."""

FUSED_KEYS_PER_DIM = 5
"""Visible keys of a query, relative to the head dim, from which adding dQ up in global memory pays.

The accumulator is cleared, read and converted once, which takes 10 bytes for each element of dQ; the other form has two
more matmuls, 4 FLOPs for each element and visible key. Their times are equal at (10 B / 3 TB/s) · (350 TFLOP/s / 4) =
290 keys at head_dim 64, and at 500 with the 600 TFLOP/s of head_dim 128; measured are about 350 and 600.
"""

FLOPS_PER_BYTE = 200
"""FLOPs of a backward step in the time of a byte of global memory: 600 TFLOP/s beside 3 TB/s."""

MAX_SPLIT_TIME = 0.9
"""Split the query heads of a key head only if the model predicts less than this fraction of the unsplit time.

Smaller differences are within its error.
"""

UNREDUCED_BYTES = 256 << 20
"""Bytes of a bias's gradient per batch element and head, unreduced, up to which that may be the first choice."""


def steps_of_rows(inputs: AttentionInputs, block_q: int, block_k: int, *, transposed: bool = False) -> np.ndarray:
    """Steps of each row of tiles, of queries or, transposed, of keys, as far as the static band of the mask tells."""
    band = split_mask(inputs.mask)[0]
    if transposed:
        extent, band = Extent(inputs.kv_length, inputs.q_length, block_k, block_q), band.transposed
    else:
        extent = Extent(inputs.q_length, inputs.kv_length, block_q, block_k)
    # Masking of ragged ends does not change the number of steps.
    return BandSchedule(extent, band, True, True).counts()[1]


def forward_time(inputs: AttentionInputs, params: HopperForwardParams, num_sms: int) -> float:
    """Time of the forward kernel in steps of 128 keys of two consumers, for comparisons of tiles at one head dim."""
    rows = steps_of_rows(inputs, params.block_q, params.block_k)
    third = THIRD_CONSUMER_WITH_BIAS if has_bias_matrix(inputs) else THIRD_CONSUMER
    speed = third if params.consumers == 3 else 1.0
    overhead = ITEM_OVERHEAD if params.ahead else INDEPENDENT_OVERHEAD
    if params.num_stages > 2:
        overhead = CACHED_OVERHEAD
    costs = rows * (params.block_k / 128) + overhead
    return makespan(costs, inputs.batch * inputs.heads, num_sms) * params.consumers / speed


def is_full(inputs: AttentionInputs) -> bool:
    """True if all rows of scores are as they leave the matmul, and all keys are visible."""
    plain = inputs.bias is None and not inputs.dropout and inputs.logits_soft_cap is None
    return plain and inputs.mask is None


def has_panels(inputs: AttentionInputs) -> bool:
    """True if tiles lie in panels (`needs_panels`)."""
    return needs_panels(inputs.q_length, inputs.kv_length, inputs.head_dim, inputs.value_dim)


def forward_dims_of(inputs: AttentionInputs) -> tuple[int, int]:
    """The head dims that the forward kernel computes with."""
    return forward_dims(inputs.head_dim, inputs.value_dim, has_panels(inputs))


def even_block(inputs: AttentionInputs, steps: int) -> int:
    """Keys of a step if there are so many: whole tiles are cut by 64 keys, panels by 16."""
    unit = 16 if has_panels(inputs) else 64
    return -(-inputs.kv_length // (steps * unit)) * unit


def has_bias_matrix(inputs: AttentionInputs) -> bool:
    """True if every score has an element of the bias, so that a tile of it is read in each step."""
    return inputs.bias is not None and 1 not in inputs.bias.shape[2:]


def visible_keys(inputs: AttentionInputs) -> float:
    """Keys that a query sees on average, in whole tiles."""
    block = 64
    return float(steps_of_rows(inputs, block, block).mean()) * block


def forward_candidates(inputs: AttentionInputs, widest: int, num_sms: int) -> list[HopperForwardParams]:
    """Configs of the forward kernel; ``widest`` is the wider of the padded head dims."""
    of_arrays = split_mask(inputs.mask)[1]
    if of_arrays is not None and widest > 128:
        # As many keys as leave the registers that masks and the generator take.
        plain = inputs.bias is None and inputs.logits_soft_cap is None
        single = not isinstance(of_arrays, AndMask)
        block_k = 64 if plain else 32
        if inputs.dropout:
            block_k = 64 if plain and single else 32
            if has_bias_matrix(inputs) and widest > 192:  # its tile is in registers beside the bits
                block_k = 16
        elif widest <= 192:
            block_k = 96 if single else 64 if inputs.value_dim <= 128 else 48
        return [HopperForwardParams(128, block_k, 2, False, False)]
    found = _narrow_forward(inputs, num_sms) if widest <= 64 else _broad_forward(inputs, widest)
    if inputs.beside_transfer and widest > 64:
        # CTAs of one item each leave the SMs that a transfer takes to others. Two H100, 8192 tokens each, causal, 32
        # heads of 128 on 8: a ring takes 2.03 ms, and 2.26 with one CTA on each SM.
        found = [*dict.fromkeys([dataclasses.replace(found[0], persistent=False), *found])]
    if of_arrays is not None:  # lists made before the kernel runs do not know the lengths of rows
        found = sorted(found, key=lambda p: (p.persistent, not p.ping_pong))
    if inputs.dropout:
        found = _forward_with_dropout(widest, of_arrays is not None)
    return found


def _forward_with_dropout(widest: int, masked_by_arrays: bool) -> list[HopperForwardParams]:
    """Tiles where random bits are drawn and P stays in float32 beside PV, which takes registers."""
    if widest > 128:
        return _params([(128, 64, False, False)])
    if masked_by_arrays:
        return _params([(128, 64, False, True), (128, 64, False, False)])
    if widest <= 64:
        return _params([(128, 128, True, False), (128, 128, True, True), (128, 128, False, True)])
    return _params([(128, 128, True, True), (128, 96, True, False), (128, 96, True, True)])


def _narrow_forward(inputs: AttentionInputs, num_sms: int) -> list[HopperForwardParams]:
    """Tiles of 192 or of 128 queries up to head_dim 64."""
    found = _params([(192, 128, True, True), (192, 128, True, False), (128, 128, True, True), (128, 128, False, True)])
    if inputs.logits_soft_cap is not None or inputs.kv_length <= 128:
        # Three consumers have too few registers for a cap, and for a mask in the only step, around which there is no
        # loop.
        found = found[2:]
    # Few steps an item leave the ping-pong nothing to overlap: without it short sequences are faster.
    without_turns = HopperForwardParams(128, 128, 2, True, False)
    if inputs.mask is None or inputs.q_length <= 1024:
        found = [*found[:-1], without_turns, found[-1]]
    if split_mask(inputs.mask)[1] is not None:
        return found
    if is_full(inputs):
        special = _few_steps(inputs)
        if inputs.kv_length <= ONE_STEP:
            found = [params for params in found if params.consumers == 2]
        best = min([*special, *found], key=lambda params: forward_time(inputs, params, num_sms))
        if best in special:
            return [best, *(params for params in [*special, *found] if params != best)]
    best = min(found, key=lambda params: forward_time(inputs, params, num_sms))
    if best.block_q == 128 and inputs.q_length <= 1024:
        best = without_turns
    return [best, *(params for params in found if params != best)]


def _few_steps(inputs: AttentionInputs) -> list[HopperForwardParams]:
    """Configs up to head_dim 64 for few keys: all of them in one step, or in whole steps a stage further ahead."""
    found = []
    if inputs.kv_length <= ONE_STEP:
        block_k = even_block(inputs, 1)
        found += [HopperForwardParams(128, block_k, 2, True, turns, ahead=False) for turns in (False, True)]
    items = -(-inputs.q_length // 128) * (inputs.heads // inputs.kv_heads)
    if inputs.kv_length % 128 == 0 and 2 <= inputs.kv_length // 128 <= 4 and items > 1:
        found.append(HopperForwardParams(128, 128, 3, True, True))
    return found


def _broad_forward(inputs: AttentionInputs, widest: int) -> list[HopperForwardParams]:
    """Tiles of 128 queries, beyond head_dim 64."""
    if 128 < widest <= 192:
        # Two consumers: with three (192 queries, 64 or 80 keys) calls took 1 to 18 % longer
        # (docs/notes/hopper_attention.md).
        # 128 keys do not fit beside 192 columns of queries and the output.
        found = _params([(128, 96, True, True), (128, 96, True, False), (128, 64, False, False)])
        if is_full(inputs) and max(forward_dims_of(inputs)) <= PERSISTENT_DIM:
            # In as few steps as can be: 66 × 14 heads of 256 took 131 µs, and 144 not persistent in steps of 64 keys.
            block_k = even_block(inputs, -(-inputs.kv_length // 128))
            return [HopperForwardParams(128, block_k, 2, True, False), *found]
        return found if inputs.mask is not None else [found[1], found[0], found[2]]
    if widest > 192:
        # One CTA for each item: the output waits in the place of Q, so a persistent CTA cannot load the next Q early.
        # Without a mask 4 × 4096 took 0.739 ms so, and 0.779 (docs/notes/hopper_attention.md).
        found = _params([(128, 80, False, False), (128, 64, False, False)])
        return found if inputs.mask is not None else found[::-1]
    found = _params(
        # With more keys registers spill: 4096 without a mask ran at 615, 600 and 580 TFLOP/s in steps of 160, 176 and
        # 192 keys, and at 622 in steps of 128 (docs/notes/hopper_attention.md).
        [(128, 128, True, True), (128, 128, False, False), (128, 128, True, False), (128, 128, False, True)]
    )
    # Turns are 2 to 6 % faster beside a bias, also without a mask; steps of 64 keys were 7 to 13 % slower
    # (docs/notes/hopper_attention.md).
    if has_bias_matrix(inputs):  # the softmax takes longer, which taking turns hides
        return found if inputs.kv_length > FEW_KEYS else found[2:]
    if inputs.mask is None:
        long = inputs.kv_length >= 8192
        return [found[3], found[0], found[2]] if long else [found[2], found[0], found[3]]
    return found


def _params(tiles: Sequence[tuple[int, int, bool, bool]]) -> list[HopperForwardParams]:
    return [HopperForwardParams(rows, keys, 2, persistent, turns) for rows, keys, persistent, turns in tiles]


def narrow_backward_candidates(inputs: AttentionInputs, widest: int) -> list[BackwardParams]:
    """Configs of the backward kernels up to head_dim 128."""
    adds = adds_bias(inputs)
    # Where the gradient of a bias is added up, 128 queries do not fit; the rest is spilled with so many.
    heavy = inputs.bias is not None or inputs.dropout or inputs.logits_soft_cap is not None
    block = 128 if widest <= 64 and not heavy else 64
    repeats = visible_keys(inputs) < FUSED_KEYS_PER_DIM * widest and not adds
    forms = [repeats, not repeats]
    bent = inputs.bias is not None or inputs.logits_soft_cap is not None
    if inputs.dropout and widest > 64 and bent and not adds:  # the one kernel would spill 300 bytes
        forms = [True]
    return [HopperBackwardParams(block, 2, deterministic) for deterministic in forms]


def group_parts(inputs: AttentionInputs, plan: BackwardPlan | WideBackwardPlan, num_sms: int) -> GroupParts:
    """The parts of the query heads of a key head, so that all SMs have work where there are few key heads.

    A part of fewer heads makes shorter items and more of them; dK and dV are then sums of float32 parts, whose bytes
    count as steps.
    """
    group = inputs.heads // inputs.kv_heads
    whole = GroupParts(group)
    if group == 1:
        return whole
    # Wide heads store parts from registers, which takes no shared memory, and all parts are of one size.
    wide = isinstance(plan, WideBackwardPlan)
    if isinstance(plan, BackwardPlan):
        partial = dataclasses.replace(plan, partial_gradients=True)
        if partial.shared_bytes > SHARED_BYTES:
            return whole
    params = plan.params
    rows = steps_of_rows(inputs, params.block_q, params.block_k, transposed=True)
    matrices = inputs.batch * inputs.kv_heads
    # Written once, read once.
    part_bytes = 2 * 4 * matrices * inputs.kv_length * (plan.head_dim + plan.value_dim)
    flops = 10 * params.block_q * params.block_k * (plan.head_dim + plan.value_dim) / 2
    bytes_per_step = flops / (FLOPS_PER_BYTE / num_sms)

    def time(parts: GroupParts) -> float:
        copies = 0 if parts.parts == 1 else parts.parts * part_bytes / bytes_per_step
        return makespan(rows * parts.size + ITEM_OVERHEAD, matrices * parts.parts, num_sms) + copies

    # Sizes rather than counts: 71 heads are split into parts of 9, the last of 8.
    sizes = sorted({-(-group // n) for n in range(2, group + 1)})
    splits = [GroupParts(group, -(-group // size)) for size in sizes if not wide or group % size == 0]
    best = min(splits, key=time)
    return best if time(best) < MAX_SPLIT_TIME * time(whole) else whole


def wide_backward_candidates(inputs: AttentionInputs) -> list[BackwardParams]:
    """Configs of the backward kernels beyond head_dim 128, not all of which fit every call.

    A warpgroup with both dK and dV does a whole step by itself, and the other is free to overlap it: where registers
    hold both, that comes first.
    """
    heavy = inputs.dropout or inputs.logits_soft_cap is not None
    found: list[BackwardParams] = [
        # 2048 causal queries of 128 heads of 192 and 128 ran at 457 TFLOP/s so, and at 322 with dK and dV in two
        # warpgroups (docs/notes/hopper_attention.md).
        *([] if heavy else [HopperBackwardParams(64, 2, True)]),
        WideBackwardParams(value_stages=2),
        WideBackwardParams(),
        WideBackwardParams(False, 2, 2, 16, 1),
        WideBackwardParams(False, 2, 1, 32, 2),
        WideBackwardParams(False, 2, 2, 32, 2),
    ]
    # Beside the gradient of a bias at head_dim 256, none of the others that add up dQ fits.
    if inputs.bias is not None and not inputs.dropout:
        found.append(WideBackwardParams(False, 2, 1, 32, 1))
    if inputs.dropout and visible_keys(inputs) >= 2048:
        # Kernels of their own for dQ and for dK and dV draw random bits twice: at 4096 keys they take 15 % more time.
        found = [found[2], *found[:2], *found[3:]]
    return sorted(found, key=lambda params: params.deterministic) if adds_bias(inputs) else found


def adds_bias(inputs: AttentionInputs) -> bool:
    """True if the gradient of a shared bias, one per batch element and head, is too large to be kept unreduced.

    Or that of relative values, a row for each 16 keys.
    """
    if inputs.position_bias is not None:
        positions = PositionOptions.of(inputs.position_bias, split_mask(inputs.mask)[0], 0)
        of_values = position_gradient_of(inputs.position_bias, positions, inputs.score_shape, True)
        return of_values is not None and of_values.bytes > UNREDUCED_BYTES
    if inputs.bias is None:
        return False
    unreduced = BiasGradient(tuple(inputs.bias.shape), inputs.bias.dtype, inputs.score_shape, True)
    return unreduced.shared and unreduced.bytes > UNREDUCED_BYTES
