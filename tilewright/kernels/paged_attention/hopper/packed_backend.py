"""Attention of packed queries over pages on Hopper, in Pallas Mosaic GPU: support, configs, the call of the kernel."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from tilewright.kernels.hopper.device import num_sms
from tilewright.kernels.hopper.limits import SHARED_BYTES, WARPGROUP_THREADS
from tilewright.kernels.op.backend import InferenceBackend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.op.footprint import Footprint
from tilewright.kernels.paged_attention.hopper.packed import chunk_kernel
from tilewright.kernels.paged_attention.hopper.packed_work import (
    CONSUMERS,
    ChunkCall,
    ordered_work,
    present_pages,
    tile_work,
    tree_rows,
)
from tilewright.kernels.paged_attention.inputs import PagedInputs
from tilewright.kernels.paged_attention.packed import SERVES, is_deprioritized, packed_reasons
from tilewright.kernels.paged_attention.results import Results, empty_forward, run_with_sequential_vmap
from tilewright.kernels.paged_attention.token_layout import boundaries, max_tiles, packed_tiles, packed_tokens
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.device import current_device
from tilewright.ops.utils.stable_ids import stable_id

BLOCK_K = 128
"""Keys of a step; a page has a multiple of them, or a divisor."""


SIMILAR_ITEMS = 4
"""Items of a CTA where they take about the same time; with more, all CTAs end only when the slowest has its last."""

MOST_ITEMS = 16

LONG_CHUNK = 256
"""Tokens of a sequence, in the mean, from which most items are chunks."""


@stable_id(
    "tilewright/paged_attention.HopperChunkParams",
    formerly=("tilewright.kernels.paged_attention.pallas_gpu_packed:HopperChunkParams",),
)
@dataclasses.dataclass(frozen=True, slots=True)
class HopperChunkParams:
    """Config of the kernel.

    Attributes:
      num_stages: stages of the rings of K and of V.
      ping_pong: whether the consumers take turns to issue MMAs.
      items: the most tiles of queries that a CTA computes one after another.
    """

    num_stages: int = 2
    ping_pong: bool = True
    items: int = 1

    def __post_init__(self) -> None:
        if type(self.num_stages) is not int or not 2 <= self.num_stages <= 8:
            raise ValueError(f"the producer needs a stage ahead of the consumers, 8 at most, got {self.num_stages=}")
        if type(self.ping_pong) is not bool or type(self.items) is not int or self.items < 1:
            raise ValueError(
                f"ping_pong is a bool, and a CTA has at least one item, got {self.ping_pong=}, {self.items=}"
            )


class PallasGpuPackedAttention(InferenceBackend[PagedInputs, Results, HopperChunkParams]):
    """Serves packed queries over pages in float16 and bfloat16 on compute capability 9.0."""

    name: ClassVar[str] = "hopper"
    platform: ClassVar[Platform] = Platform.PALLAS
    keeps_lowering: ClassVar[bool] = True
    forward_params: ClassVar[type] = HopperChunkParams
    serves: ClassVar[frozenset[str]] = SERVES | {"tree_mask"}

    def forward_reasons(self, inputs: PagedInputs, device: Device) -> list[str]:
        return packed_reasons(inputs, device)

    def candidates(self, inputs: PagedInputs, device: Device, direction: Direction) -> list[HopperChunkParams]:
        # Several items hide the start of all but one, an eighth of a fresh prefill. Where items differ, as chunks and
        # decoded tokens do, the hardware shares them out better one by one (docs/notes/serving_attention.md).
        best = SIMILAR_ITEMS if inputs.tokens >= LONG_CHUNK * inputs.sequences else 1
        # Not three stages: the slot of a step would need a division, for which ptxas spills registers.
        listed = [HopperChunkParams(2, True, items) for items in dict.fromkeys((best, SIMILAR_ITEMS, 1, MOST_ITEMS))]
        listed += [HopperChunkParams(2, False, best), HopperChunkParams(4, True, best)]
        return [params for params in listed if not self.config_reasons(inputs, device, direction, params)]

    def config_reasons(
        self, inputs: PagedInputs, device: Device, direction: Direction, params: HopperChunkParams
    ) -> list[str]:
        taken = _call(inputs, params).plan(inputs.dtype, inputs.head_dim).shared_bytes
        if taken > SHARED_BYTES:
            return [f"{params} takes {taken} bytes of shared memory"]
        return []

    def deprioritized(self, inputs: PagedInputs, device: Device, direction: Direction) -> bool:
        return is_deprioritized(inputs, device)

    def footprints(
        self, inputs: PagedInputs, device: Device, direction: Direction, params: HopperChunkParams
    ) -> list[Footprint]:
        call = _call(inputs, params)
        plan = call.plan(inputs.dtype, inputs.head_dim)
        return [Footprint(call.tiles * call.kv_heads, WARPGROUP_THREADS * (CONSUMERS + 1), plan.shared_bytes)]

    def forward(self, inputs: PagedInputs, params: HopperChunkParams) -> Results:
        """``(out, lse)``; lse is float32."""
        if inputs.is_empty:
            return empty_forward(inputs)
        return run_with_sequential_vmap(lambda inputs: _run(inputs, params), inputs)


def _call(inputs: PagedInputs, params: HopperChunkParams) -> ChunkCall:
    several = max(BLOCK_K // inputs.page_size, 1)
    call = ChunkCall(
        tiles=0,
        kv_heads=inputs.kv_heads,
        group=inputs.groups,
        page_size=inputs.page_size,
        columns=-(-(inputs.columns) // several) * several,
        block_k=BLOCK_K,
        num_stages=params.num_stages,
        softmax_scale=inputs.softmax_scale,
        left=inputs.left,
        right=inputs.right,
        ping_pong=params.ping_pong,
        num_sms=num_sms(current_device()),
        items_of_program=params.items,
        # One more than the tokens have: what was in the cache before ends within a word.
        mask_words=0 if inputs.tree_mask is None else inputs.tree_mask.shape[1] + 1,
    )
    tiles = max_tiles(inputs.tokens, inputs.sequences + 2, CONSUMERS * call.tokens)
    return dataclasses.replace(call, tiles=tiles)


def _run(inputs: PagedInputs, params: HopperChunkParams) -> Results:
    call, tokens, sequences = _call(inputs, params), inputs.tokens, inputs.sequences
    assert inputs.page_table is not None
    assert inputs.value is not None
    # Tokens before and after those of the sequences become two more sequences, without keys.
    cum = jnp.pad(boundaries(inputs.cum_q_lens, tokens), (1, 1), constant_values=((0, tokens),))
    lengths = jnp.pad(inputs.kv_lengths, 1)
    each = CONSUMERS * call.tokens
    plan, starts = packed_tiles(cum, lengths, tokens, each)
    of_tiles = lengths[plan.sequence]
    first_new = None if inputs.tree_mask is None else plan.position - (plan.token - cum[plan.sequence])
    plan = plan._replace(sequence=jnp.clip(plan.sequence - 1, 0, sequences - 1))
    table, bits = present_pages(inputs.page_table, inputs.num_pages, call)
    work = tile_work(plan, of_tiles, call, first_new)
    tree = None
    if inputs.tree_mask is not None and first_new is not None:
        tree = tree_rows(inputs.tree_mask, work, first_new, call)
    operands = inputs.query, inputs.key, inputs.value, table, bits, ordered_work(work, call)
    out, lse = chunk_kernel(*operands, tree, call=call)

    # XLA removes this if lse is unused.
    owners = packed_tokens(cum, tokens, sequences + 2, None)
    consumer, token = jnp.divmod(owners.offset % each, call.tokens)
    lse = lse[..., : call.group * call.tokens].reshape(call.tiles, call.kv_heads, CONSUMERS, call.group, call.tokens)
    lse = lse[starts[owners.sequence] + owners.offset // each, :, consumer, :, token]
    return out, lse.reshape(tokens, inputs.heads)
