"""Params of the Triton kernels that are worth measuring, by head dim, dtype and device, best guess first."""

from collections.abc import Mapping
from typing import Any

from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.mask_terms import MaskParts
from tilewright.kernels.flash_attention.triton.params import Tiles, TritonBackwardParams, TritonForwardParams
from tilewright.kernels.triton.limits import MIN_DOT, power_of_two
from tilewright.ops.types import Device, Direction

TMA_BYTES = 16
"""Alignment that TMA needs: of the first row, and of the distance between rows."""


def padded_dim(dim: int) -> int:
    """The head dim of tiles: a power of two, as Triton needs, and at least the depth of an MMA."""
    return power_of_two(dim, MIN_DOT)


# (block_q, block_k, num_warps, num_stages, tma) by the larger of the head dims. On Hopper TMA saves the registers that
# pointers would take; older GPUs have no TMA. Entries for Hopper are in the order that tuning on an H100 and an H200
# measured (benchmarks/results/*/attention_tuned.json).
_HOPPER_FORWARD = {
    64: ((128, 64, 4, 3, False), (64, 128, 4, 2, True), (64, 64, 4, 3, True), (128, 64, 4, 3, True),
         (128, 128, 8, 3, True), (128, 128, 8, 2, True)),
    128: ((64, 64, 4, 3, False), (64, 64, 4, 3, True), (128, 128, 8, 2, False), (128, 64, 8, 3, True)),
    256: ((64, 32, 4, 2, True), (128, 32, 8, 2, True)),
}  # fmt: skip

# Compute capabilities 10 and 11 accumulate in tensor memory: 128 queries are one MMA, and eight warps hold their scores
# without spills under every option, where four warps spill. Compiled, and never timed.
_BLACKWELL_FORWARD = {
    64: ((128, 64, 8, 3, True), (128, 64, 4, 3, True), (128, 128, 8, 2, True), (64, 64, 4, 3, True)),
    128: ((128, 64, 8, 3, True), (128, 128, 8, 2, True), (64, 64, 4, 3, True)),
    256: _HOPPER_FORWARD[256],
}

_FORWARD = {
    64: ((128, 64, 8, 3, False), (64, 64, 4, 3, False), (64, 32, 4, 3, False)),
    128: ((64, 64, 8, 3, False), (128, 64, 8, 3, False), (64, 32, 4, 2, False)),
    256: ((64, 32, 8, 2, False), (64, 32, 8, 1, False), (64, 16, 8, 1, False)),
}

# (block_q, block_k, num_warps, num_stages, tma, deterministic) of the kernel of dK and dV; the kernel of dQ swaps
# block_q and block_k. Without TMA all entries are deterministic: pointers for the additions to dQ would take all
# registers.
_HOPPER_BACKWARD = {
    64: ((64, 64, 4, 2, True, True), (64, 64, 4, 2, True, False), (64, 128, 8, 3, True, True),
         (64, 128, 8, 2, True, True), (64, 128, 8, 2, True, False)),
    128: ((64, 64, 4, 2, True, True), (64, 128, 8, 2, True, True), (64, 128, 8, 2, True, False),
          (64, 128, 8, 1, True, False), (64, 64, 8, 2, True, False), (64, 64, 8, 2, True, True)),
    256: ((32, 64, 8, 2, True, False), (32, 64, 8, 2, True, True), (16, 64, 8, 2, True, True)),
}  # fmt: skip

_BACKWARD = {
    64: ((32, 128, 8, 2, False, True), (64, 64, 4, 2, False, True), (32, 64, 4, 2, False, True)),
    128: ((32, 64, 8, 2, False, True), (32, 64, 4, 1, False, True)),
    256: ((16, 64, 8, 1, False, True), (32, 64, 8, 1, False, True)),
}

# Smaller tiles for calls with a bias or a mask array: the pointers to its tile take registers, beside the scores.
_SCORES_FORWARD = ((64, 64, 8, 2, True), (64, 32, 4, 2, True), (32, 32, 4, 1, True))

_HOPPER_SCORES_FORWARD = ((64, 32, 4, 2, True), (64, 64, 8, 2, True), (32, 32, 4, 1, True))

_HOPPER_SCORES_BACKWARD = ((32, 64, 4, 1, True, True), (64, 64, 8, 2, True, True), (32, 32, 4, 1, True, True))

_SCORES_BACKWARD = ((32, 64, 8, 1, False, True), (32, 32, 4, 1, False, True))

_WIDE_SCORES_BACKWARD = ((32, 64, 8, 2, True, True), (16, 32, 4, 1, True, True))

_FLOAT32_FORWARD = ((64, 32, 4, 2, False), (64, 32, 4, 1, False), (32, 16, 4, 1, False))

_FLOAT32_BACKWARD = ((16, 32, 4, 1, False, True), (16, 16, 4, 1, False, True))


def listed_params(inputs: AttentionInputs, device: Device, direction: Direction) -> list[Any]:
    """All params for a call's head dims, best guess first."""
    forward, tma = direction == "forward", has_tma(inputs, device)
    max_dim = max(inputs.head_dim, inputs.value_dim)
    sizes: tuple[tuple[Any, ...], ...]
    if inputs.dtype.itemsize == 4:
        sizes = _FLOAT32_FORWARD if forward else _FLOAT32_BACKWARD
    elif inputs.bias is not None or MaskParts.of(inputs.mask).matrix is not None:
        hopper = tma and max_dim <= 128
        if forward:
            sizes = _HOPPER_SCORES_FORWARD if hopper else _SCORES_FORWARD
        else:
            narrow = _HOPPER_SCORES_BACKWARD if tma else _SCORES_BACKWARD
            sizes = narrow if max_dim <= 128 else _WIDE_SCORES_BACKWARD
    else:
        forwards = _HOPPER_FORWARD if device.capability == (9, 0) else _BLACKWELL_FORWARD
        tables = (forwards, _HOPPER_BACKWARD) if tma else (_FORWARD, _BACKWARD)
        table: Mapping[int, tuple[tuple[Any, ...], ...]] = tables[0] if forward else tables[1]
        sizes = next(listed for width, listed in table.items() if max_dim <= width)
        # Dropout, segments, positions, and the derivative of the soft cap take registers: fewest scores per warp first.
        # Not on Hopper, where the first entries were measured to be the best with these, too.
        capped = inputs.logits_soft_cap is not None and not forward
        if not tma and (inputs.dropout or MaskParts.of(inputs.mask).has_rows or capped):
            sizes = tuple(sorted(sizes, key=lambda size: size[0] * size[1] // size[2]))
    if forward:
        return [TritonForwardParams(Tiles(*size)) for size in sizes]
    return [
        TritonBackwardParams(
            Tiles(block_q, block_k, warps, stages, tma), Tiles(block_k, block_q, warps, stages, tma), deterministic
        )
        for block_q, block_k, warps, stages, tma, deterministic in sizes
    ]


def has_tma(inputs: AttentionInputs, device: Device) -> bool:
    """True if the call's tiles are worth loading by TMA.

    Compute capability 12 has TMA, but no more shared memory or tensor cores than Ada: those tiles do not fit, or spill.
    """
    aligned = all(dim * inputs.dtype.itemsize % TMA_BYTES == 0 for dim in (inputs.head_dim, inputs.value_dim))
    return aligned and (9, 0) <= (device.capability or (0, 0)) < (12, 0)


def smallest_params(direction: Direction) -> TritonForwardParams | TritonBackwardParams:
    """Params with the smallest tiles, for when nothing else fits."""
    tiles = Tiles(MIN_DOT, MIN_DOT, 4, 1)
    return TritonForwardParams(tiles) if direction == "forward" else TritonBackwardParams(tiles, tiles)
