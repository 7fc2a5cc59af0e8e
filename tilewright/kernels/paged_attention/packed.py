"""Support of the Hopper kernels for packed queries over pages, and the problems for which others are likely faster.

They are `hopper.packed`, and `cuda.packed` if it can be compiled.
"""

from tilewright.kernels.hopper.device import device_reasons, dtype_reasons, num_sms
from tilewright.kernels.paged_attention.inputs import PagedProblem
from tilewright.kernels.paged_attention.token_layout import max_tiles
from tilewright.ops.types import Device

TILE_ROWS = 128
"""Query rows of a tile."""

MIN_PAGE = 16
"""Minimum tokens of a page: the copying warp holds the numbers of all pages of a tile in its registers."""

MAX_HEADS = 8
"""Maximum query heads per key head: with more, Pallas's loads spill registers; in CUDA C++ they are an MMA's columns.
"""

DIMS = (64, 128)


def packed_reasons(problem: PagedProblem, device: Device) -> list[str]:
    """The shared reasons why none of these kernels can serve a problem; empty if there are none."""
    why, options = device_reasons(device), problem.options
    if not problem.packed or not problem.paged or problem.starts or options.latent_dim is not None:
        why.append("takes packed queries and a page table")
    why += dtype_reasons(problem)
    if problem.kv_dtype != problem.dtype or any(shape is not None for shape in problem.scale_shapes):
        why.append(f"takes keys and values in the query's dtype and no scales, got {problem.kv_dtype=}")
    if problem.head_dim != problem.value_dim or problem.head_dim not in DIMS:
        why.append(f"takes head dims of 64 or 128, got {problem.head_dim=}, {problem.value_dim=}")
    if problem.page_size < MIN_PAGE or problem.page_size & (problem.page_size - 1):
        why.append(f"a page must have a power of two of tokens from {MIN_PAGE} on, got {problem.page_size=}")
    if problem.groups > MAX_HEADS:
        why.append(f"up to {MAX_HEADS} heads can share a key head, got {problem.groups}")
    if options.logits_soft_cap is not None or problem.alibi or problem.sinks:
        why.append("has no soft cap, no ALiBi and no sinks")
    return why


def is_deprioritized(problem: PagedProblem, device: Device) -> bool:
    """True if most tokens are decoded, or tiles do not fill the device, since a chunk's keys are not split."""
    tiles = max_tiles(problem.tokens, problem.sequences + 2, TILE_ROWS // problem.groups)
    return problem.tokens < 2 * problem.sequences or tiles * problem.kv_heads < num_sms(device)
