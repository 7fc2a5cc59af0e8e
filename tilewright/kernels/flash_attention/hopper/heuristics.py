"""The configs of the Hopper kernels for a problem, best first, by a model of their work where that decides.

The model counts what a kernel does: steps of whole tiles, the share of the SMs that has them, and for the forms of the
backward pass the FLOPs of the one and the bytes of the other. The rest is by the sweeps in
``benchmarks/results/nvidia-h100-80gb-hbm3/hopper_sweep.json`` and, for masks with arrays, by ``attention_tuned.json``.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tilewright.kernels.flash_attention.hopper.bias_gradient import BiasGradient
from tilewright.kernels.flash_attention.hopper.call import GroupParts
from tilewright.kernels.flash_attention.hopper.params import (
    BackwardParams,
    HopperBackwardParams,
    HopperForwardParams,
    WideBackwardParams,
)
from tilewright.kernels.flash_attention.hopper.plans import BackwardPlan, WideBackwardPlan
from tilewright.kernels.flash_attention.hopper.schedule import BandSchedule, Extent
from tilewright.kernels.flash_attention.masking import split_mask
from tilewright.kernels.flash_attention.problem import AttentionProblem
from tilewright.kernels.hopper.limits import SHARED_BYTES
from tilewright.kernels.hopper.schedule import ITEM_OVERHEAD, makespan
from tilewright.kernels.masks import AndMask

THIRD_CONSUMER = 1.2
"""Throughput of three consumer warpgroups relative to two, in steps of 128 keys at head_dim 64: measured 1.14 (causal)
to 1.2 where both have the same number of rows to compute."""

FUSED_KEYS_PER_DIM = 5
"""Visible keys of a query, relative to the head dim, from which adding dQ up in global memory pays.

The accumulator is cleared, read and converted once, which takes 10 bytes for each element of dQ; the other form has two
more matmuls, 4 FLOPs for each element and visible key. Their times are equal at (10 B / 3 TB/s) · (350 TFLOP/s / 4) =
290 keys at head_dim 64, and at 500 with the 600 TFLOP/s of head_dim 128; measured are about 350 and 600.
"""

FLOPS_PER_BYTE = 200
"""FLOPs of a backward step in the time of a byte of global memory: 600 TFLOP/s beside 3 TB/s."""

MAX_SPLIT_TIME = 0.9
"""Longest time, relative to undivided groups, for which query heads of a key head are split: the model is no better."""

UNREDUCED_BYTES = 256 << 20
"""Bytes of a bias's gradient per batch element and head, unreduced, up to which that may be the first choice."""


def steps_of_rows(problem: AttentionProblem, block_q: int, block_k: int, *, transposed: bool = False) -> np.ndarray:
    """Steps of each row of tiles, of queries or, transposed, of keys, as far as the static band of the mask tells."""
    band = split_mask(problem.mask)[0]
    if transposed:
        extent, band = Extent(problem.kv_length, problem.q_length, block_k, block_q), band.transposed
    else:
        extent = Extent(problem.q_length, problem.kv_length, block_q, block_k)
    # Which tiles the ragged ends mask changes no number of steps.
    return BandSchedule(extent, band, True, True).counts()[1]


def forward_time(problem: AttentionProblem, params: HopperForwardParams, num_sms: int) -> float:
    """Time of the forward kernel in steps of two consumers, for comparisons of tiles at one head dim."""
    rows = steps_of_rows(problem, params.block_q, params.block_k)
    speed = THIRD_CONSUMER if params.consumers == 3 else 1.0
    return makespan(rows + ITEM_OVERHEAD, problem.batch * problem.heads, num_sms) * params.consumers / speed


def visible_keys(problem: AttentionProblem) -> float:
    """Keys that a query sees on average, in whole tiles."""
    block = 64
    return float(steps_of_rows(problem, block, block).mean()) * block


def forward_candidates(problem: AttentionProblem, widest: int, num_sms: int) -> list[HopperForwardParams]:
    """Configs of the forward kernel; ``widest`` is the wider of the padded head dims."""
    of_arrays = split_mask(problem.mask)[1]
    if of_arrays is not None and widest > 128:
        # As many keys as leave the registers that masks and the generator take.
        plain = problem.bias is None and problem.options.logits_soft_cap is None
        block_k = 64 if plain else 32
        if problem.dropout:
            block_k = 64 if plain and not isinstance(of_arrays, AndMask) else 32
        return [HopperForwardParams(128, block_k, 2, False, False)]
    found = _narrow_forward(problem, num_sms) if widest <= 64 else _broad_forward(problem, widest)
    if of_arrays is not None:  # lists made before the kernel runs do not know the lengths of rows
        found = sorted(found, key=lambda p: (p.persistent, not p.ping_pong))
    if problem.dropout:
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


def _narrow_forward(problem: AttentionProblem, num_sms: int) -> list[HopperForwardParams]:
    """Tiles of 192 or of 128 queries up to head_dim 64."""
    found = _params([(192, 128, True, True), (192, 128, True, False), (128, 128, True, True), (128, 128, False, True)])
    if problem.options.logits_soft_cap is not None or problem.kv_length <= 128:
        # Three consumers have too few registers for a cap, and for a mask in the only step, which is no loop then.
        found = found[2:]
    # Few steps an item leave the ping-pong nothing to overlap: without it short sequences are faster.
    without_turns = HopperForwardParams(128, 128, 2, True, False)
    if problem.mask is None or problem.q_length <= 1024:
        found = [*found[:-1], without_turns, found[-1]]
    if split_mask(problem.mask)[1] is not None:
        return found
    best = min(found, key=lambda params: forward_time(problem, params, num_sms))
    if best.block_q == 128 and problem.q_length <= 1024:
        best = without_turns
    return [best, *(params for params in found if params != best)]


def _broad_forward(problem: AttentionProblem, widest: int) -> list[HopperForwardParams]:
    """Tiles of 128 queries, beyond head_dim 64."""
    if widest > 128:
        found = _params([(128, 80, False, False), (128, 64, False, False)])
        return found if problem.mask is not None else found[::-1]
    found = _params(
        [(128, 128, True, True), (128, 128, False, False), (128, 128, True, False), (128, 128, False, True)]
    )
    if problem.mask is None:
        long = problem.kv_length >= 8192
        return [found[3], found[0], found[2]] if long else [found[2], found[0], found[3]]
    return found


def _params(tiles: Sequence[tuple[int, int, bool, bool]]) -> list[HopperForwardParams]:
    return [HopperForwardParams(rows, keys, 2, persistent, turns) for rows, keys, persistent, turns in tiles]


def narrow_backward_candidates(problem: AttentionProblem, widest: int) -> list[BackwardParams]:
    """Configs of the backward kernels up to head_dim 128."""
    adds = adds_bias(problem)
    # Where the gradient of a bias is added up, 128 queries do not fit; the rest is spilled with so many.
    heavy = problem.bias is not None or problem.dropout or problem.options.logits_soft_cap is not None
    block = 128 if widest <= 64 and not heavy else 64
    repeats = visible_keys(problem) < FUSED_KEYS_PER_DIM * widest and not adds
    forms = [repeats, not repeats]
    bent = problem.bias is not None or problem.options.logits_soft_cap is not None
    if problem.dropout and widest > 64 and bent and not adds:  # the one kernel would spill 300 bytes
        forms = [True]
    return [HopperBackwardParams(block, 2, deterministic) for deterministic in forms]


def group_parts(problem: AttentionProblem, plan: BackwardPlan | WideBackwardPlan, num_sms: int) -> GroupParts:
    """The parts of the query heads of a key head, so that all SMs have work where there are few key heads.

    A part of fewer heads makes shorter items and more of them; dK and dV are then sums of float32 parts, whose bytes
    count as steps.
    """
    group = problem.heads // problem.kv_heads
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
    rows = steps_of_rows(problem, params.block_q, params.block_k, transposed=True)
    matrices = problem.batch * problem.kv_heads
    # Written once, read once.
    part_bytes = 2 * 4 * matrices * problem.kv_length * (plan.head_dim + plan.value_dim)
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


def wide_backward_candidates(problem: AttentionProblem) -> list[BackwardParams]:
    """Configs of the backward kernels beyond head_dim 128, not all of which fit every problem."""
    found: list[BackwardParams] = [
        WideBackwardParams(),
        WideBackwardParams(False, 2, 2, 16, 1),
        WideBackwardParams(False, 2, 1, 32, 2),
        WideBackwardParams(False, 2, 2, 32, 2),
    ]
    # Beside the gradient of a bias at head_dim 256, none of the others that add up dQ fits.
    if problem.bias is not None and not problem.dropout:
        found.append(WideBackwardParams(False, 2, 1, 32, 1))
    if problem.dropout and visible_keys(problem) >= 2048:
        # Kernels of their own for dQ and for dK and dV draw random bits twice: at 4096 keys they take 15 % more time.
        found = [found[2], *found[:2], *found[3:]]
    return sorted(found, key=lambda params: params.deterministic) if adds_bias(problem) else found


def adds_bias(problem: AttentionProblem) -> bool:
    """True if the gradient of a shared bias, one per batch element and head, is too large to be kept unreduced."""
    if problem.bias is None:
        return False
    unreduced = BiasGradient(tuple(problem.bias.shape), problem.bias.dtype, problem.score_shape, True)
    return unreduced.shared and unreduced.bytes > UNREDUCED_BYTES
