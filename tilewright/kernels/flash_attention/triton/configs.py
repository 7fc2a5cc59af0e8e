"""Which params are worth measuring in Triton, by width, dtype and device, best guess first."""

from collections.abc import Mapping
from typing import Any

from tilewright.kernels.flash_attention.mask_terms import MaskParts
from tilewright.kernels.flash_attention.problem import AttentionProblem
from tilewright.kernels.flash_attention.triton.params import Tiles, TritonBackwardParams, TritonForwardParams
from tilewright.kernels.triton.limits import MIN_DOT, power_of_two
from tilewright.ops.types import Device, Direction

TMA_BYTES = 16
"""Of which TMA wants a whole number between rows, and before the first."""


def padded_dim(dim: int) -> int:
    """The head dim that kernels compute with."""
    return power_of_two(dim, MIN_DOT)


# By the widest head dim. On Hopper TMA leaves the registers that addresses would take; elsewhere there is none.
# For Hopper in the order of what tuning on an H100 and an H200 measured (benchmarks/results/*/attention_tuned.json).
_HOPPER_FORWARD = {
    64: ((128, 64, 4, 3, False), (64, 128, 4, 2, True), (64, 64, 4, 3, True), (128, 64, 4, 3, True),
         (128, 128, 8, 3, True), (128, 128, 8, 2, True)),
    128: ((64, 64, 4, 3, False), (64, 64, 4, 3, True), (128, 128, 8, 2, False), (128, 64, 8, 3, True)),
    256: ((64, 32, 4, 2, True), (128, 32, 8, 2, True)),
}  # fmt: skip

_FORWARD = {
    64: ((128, 64, 8, 3, False), (64, 64, 4, 3, False), (64, 32, 4, 3, False)),
    128: ((64, 64, 8, 3, False), (128, 64, 8, 3, False), (64, 32, 4, 2, False)),
    256: ((64, 32, 8, 2, False), (64, 32, 8, 1, False), (64, 16, 8, 1, False)),
}

# The tiles of queries and keys of dK and dV, which those of dQ have the other way round, and last whether the pass is
# deterministic. Without TMA, where to add to dQ takes all registers, so it always is.
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

# Where a tile of scores is loaded beside its product, all of whose addresses take registers.
_SCORES_FORWARD = ((64, 64, 8, 2, True), (64, 32, 4, 2, True), (32, 32, 4, 1, True))

_HOPPER_SCORES_FORWARD = ((64, 32, 4, 2, True), (64, 64, 8, 2, True), (32, 32, 4, 1, True))

_HOPPER_SCORES_BACKWARD = ((32, 64, 4, 1, True, True), (64, 64, 8, 2, True, True), (32, 32, 4, 1, True, True))

_SCORES_BACKWARD = ((32, 64, 8, 1, False, True), (32, 32, 4, 1, False, True))

_WIDE_SCORES_BACKWARD = ((32, 64, 8, 2, True, True), (16, 32, 4, 1, True, True))

_FLOAT32_FORWARD = ((64, 32, 4, 2, False), (64, 32, 4, 1, False), (32, 16, 4, 1, False))

_FLOAT32_BACKWARD = ((16, 32, 4, 1, False, True), (16, 16, 4, 1, False, True))


def listed_params(problem: AttentionProblem, device: Device, direction: Direction) -> list[Any]:
    """All params for a call's width, best guess first."""
    forward, widest, tma = direction == "forward", max(problem.head_dim, problem.value_dim), has_tma(problem, device)
    sizes: tuple[tuple[Any, ...], ...]
    if problem.dtype.itemsize == 4:
        sizes = _FLOAT32_FORWARD if forward else _FLOAT32_BACKWARD
    elif problem.bias is not None or MaskParts.of(problem.mask).matrix is not None:
        hopper = tma and widest <= 128
        if forward:
            sizes = _HOPPER_SCORES_FORWARD if hopper else _SCORES_FORWARD
        else:
            narrow = _HOPPER_SCORES_BACKWARD if tma else _SCORES_BACKWARD
            sizes = narrow if widest <= 128 else _WIDE_SCORES_BACKWARD
    else:
        tables = (_HOPPER_FORWARD, _HOPPER_BACKWARD) if tma else (_FORWARD, _BACKWARD)
        table: Mapping[int, tuple[tuple[Any, ...], ...]] = tables[0] if forward else tables[1]
        sizes = next(listed for width, listed in table.items() if widest <= width)
        # What is known of single rows takes registers, and so does the derivative of the cap. (What stands first for
        # Hopper was measured to be first with these, too.)
        capped = problem.options.logits_soft_cap is not None and not forward
        if not tma and (problem.dropout or MaskParts.of(problem.mask).has_rows or capped):
            sizes = tuple(sorted(sizes, key=lambda size: size[0] * size[1] // size[2]))
    if forward:
        return [TritonForwardParams(Tiles(*size)) for size in sizes]
    return [
        TritonBackwardParams(Tiles(few, many, warps, stages, tma), Tiles(many, few, warps, stages, tma), repeats)
        for few, many, warps, stages, tma, repeats in sizes
    ]


def has_tma(problem: AttentionProblem, device: Device) -> bool:
    """Whether the call's tiles can be loaded by TMA."""
    whole = all(dim * problem.dtype.itemsize % TMA_BYTES == 0 for dim in (problem.head_dim, problem.value_dim))
    return whole and (device.capability or (0, 0)) >= (9, 0)


def smallest_params(direction: Direction) -> TritonForwardParams | TritonBackwardParams:
    tiles = Tiles(MIN_DOT, MIN_DOT, 4, 1)
    return TritonForwardParams(tiles) if direction == "forward" else TritonBackwardParams(tiles, tiles)
