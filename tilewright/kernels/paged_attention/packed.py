"""Support of the Hopper kernels for packed queries over pages, and the calls for which others are likely faster.

They are `hopper.packed`, and `cuda.packed` if it can be compiled.
"""

from tilewright.kernels.hopper.device import device_reasons, dtype_reasons, num_sms
from tilewright.kernels.paged_attention.inputs import PagedInputs
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

SERVES = frozenset({"left", "right", "q_length"})
"""The options that these kernels compute; ``q_length`` is ``None`` with packed queries."""


def packed_reasons(inputs: PagedInputs, device: Device) -> list[str]:
    """The shared reasons why none of these kernels can serve a call; empty if there are none."""
    why = device_reasons(device)
    if inputs.cum_q_lens is None or inputs.page_table is None:
        why.append("takes packed queries and a page table")
    why += dtype_reasons(inputs)
    if inputs.key.dtype != inputs.dtype:
        why.append(f"takes keys and values in the query's dtype, got kv_dtype={inputs.kv_dtype}")
    if inputs.head_dim != inputs.value_dim or inputs.head_dim not in DIMS:
        why.append(f"takes head dims of 64 or 128, got head_dim={inputs.head_dim}, value_dim={inputs.value_dim}")
    if inputs.page_size < MIN_PAGE or inputs.page_size & (inputs.page_size - 1):
        why.append(f"a page must have a power of two of tokens from {MIN_PAGE} on, got page_size={inputs.page_size}")
    if inputs.groups > MAX_HEADS:
        why.append(f"up to {MAX_HEADS} heads can share a key head, got {inputs.groups}")
    return why


def is_deprioritized(inputs: PagedInputs, device: Device) -> bool:
    """True if most tokens are decoded, or tiles do not fill the device, since a chunk's keys are not split."""
    tiles = max_tiles(inputs.tokens, inputs.sequences + 2, TILE_ROWS // inputs.groups)
    return inputs.tokens < 2 * inputs.sequences or tiles * inputs.kv_heads < num_sms(device)
