"""Multi-head latent attention on Hopper in Pallas Mosaic GPU: support, configs, and the call of the kernel."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from tilewright.kernels.hopper.device import device_reasons, dtype_reasons, num_sms
from tilewright.kernels.hopper.limits import SWIZZLE_ROWS, WARPGROUP_THREADS
from tilewright.kernels.hopper.tiles import ROWS
from tilewright.kernels.numerics.softmax import sinks_lse
from tilewright.kernels.op.backend import InferenceBackend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.op.footprint import Footprint
from tilewright.kernels.paged_attention.hopper.latent import WARPGROUPS, latent_kernel
from tilewright.kernels.paged_attention.hopper.latent_combine import combine_parts
from tilewright.kernels.paged_attention.hopper.latent_work import (
    BLOCK_K,
    ITEM_OVERHEAD,
    LATENT_DIM,
    MIN_RANGE,
    VALUE_DIM,
    LatentCall,
    LatentPlan,
    latent_ranges,
)
from tilewright.kernels.paged_attention.inputs import PagedInputs
from tilewright.kernels.paged_attention.results import Results, empty_forward, run_with_sequential_vmap
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.device import current_device
from tilewright.ops.utils.stable_ids import Fields, stable_id

MAX_RANGES = 1024

CLUSTERS = 1, 2
"""Sizes of clusters; the SMs of an H100 come in pairs, so clusters of two fill it."""

COMBINE_OVERHEAD = 6
"""Cost of partial results and of the launch that combines them, in steps."""

MAX_ROUNDS = 8
"""Rounds of CTAs from which it does not matter that the last one is not full."""

MAX_BLOCKS = 1 << 30
"""Blocks of all sequences, and the ends of ranges, are counted in int32."""


def _without_splits(fields: Fields) -> Fields:
    """The fields from those of versions before 0.2, which cut every sequence to as many splits."""
    return {name: value for name, value in fields.items() if name != "num_key_splits"}


@stable_id(
    "tilewright/paged_attention.HopperLatentParams",
    formerly=("tilewright.kernels.paged_attention.pallas_gpu:HopperLatentParams",),
    converted=_without_splits,
)
@dataclasses.dataclass(frozen=True, slots=True)
class HopperLatentParams:
    """Config of the kernel.

    Attributes:
      ranges: equal ranges to which the keys of all sequences are cut, a CTA for each range and 64 query rows of a
        sequence; None for as many as fill the device.
      prefetched: steps ahead of its load that a latent is prefetched to the L2 cache, 0 for no prefetch.
      cluster: CTAs of a cluster, each of which loads a share of the latents for all. They have 64 query rows each of
        the same sequence, whose tiles of so many rows must be a multiple.
    """

    ranges: int | None = None
    prefetched: int = 2
    cluster: int = 1

    def __post_init__(self) -> None:
        if type(self.prefetched) is not int or not 0 <= self.prefetched <= 16:
            raise ValueError(f"0 to 16 tiles are prefetched, got {self.prefetched=}")
        if self.ranges is not None and (type(self.ranges) is not int or not 1 <= self.ranges <= MAX_RANGES):
            raise ValueError(f"there are 1 to {MAX_RANGES} ranges, got {self.ranges=}")
        if type(self.cluster) is not int or self.cluster not in CLUSTERS:
            raise ValueError(f"a cluster has one of {CLUSTERS} CTAs, got {self.cluster=}")


class PallasGpuPagedAttention(InferenceBackend[PagedInputs, Results, HopperLatentParams]):
    """Serves pages of latents of 512 and 64 in float16 and bfloat16 on compute capability 9.0."""

    name: ClassVar[str] = "hopper"
    platform: ClassVar[Platform] = Platform.PALLAS
    keeps_lowering: ClassVar[bool] = True
    forward_params: ClassVar[type] = HopperLatentParams
    serves: ClassVar[frozenset[str]] = frozenset({"softmax_aux", "right", "q_length", "latent_dim"})

    def forward_reasons(self, inputs: PagedInputs, device: Device) -> list[str]:
        why = device_reasons(device)
        if inputs.latent_dim is None or (inputs.head_dim, inputs.value_dim) != (LATENT_DIM, VALUE_DIM):
            why.append(
                f"serves latents of {LATENT_DIM} whose first {VALUE_DIM} elements are the value, "
                f"got head_dim={inputs.head_dim}, value_dim={inputs.value_dim}, latent_dim={inputs.latent_dim}"
            )
        why += dtype_reasons(inputs)
        if inputs.key.dtype != inputs.dtype:
            why.append(f"takes latents in the query's dtype, got kv_dtype={inputs.kv_dtype}")
        if inputs.page_table is None or inputs.cum_q_lens is not None or inputs.kv_heads != 1:
            why.append("takes a page table, equally many query tokens of every sequence, and one latent for all heads")
        if inputs.page_size % BLOCK_K:
            why.append(f"a page must have a multiple of {BLOCK_K} tokens, got page_size={inputs.page_size}")
        if (blocks := _blocks(inputs)) >= MAX_BLOCKS:
            why.append(f"counts fewer than {MAX_BLOCKS} blocks of {BLOCK_K} keys, got {blocks=}")
        return why

    def candidates(self, inputs: PagedInputs, device: Device, direction: Direction) -> list[HopperLatentParams]:
        # Few query rows leave the tensor cores idle: only memory traffic counts, and a prefetch reads latents twice.
        prefetched = (0, 2) if inputs.longest_q * inputs.heads < ROWS else (2, 0)
        best = filling_ranges(inputs, device)
        listed = [HopperLatentParams(None, each, cluster) for cluster in CLUSTERS[::-1] for each in (*prefetched, 4)]
        listed += [HopperLatentParams(min(2 * best, MAX_RANGES), prefetched[0], cluster) for cluster in CLUSTERS[::-1]]
        return [params for params in listed if not self.config_reasons(inputs, device, direction, params)]

    def config_reasons(
        self, inputs: PagedInputs, device: Device, direction: Direction, params: HopperLatentParams
    ) -> list[str]:
        tiles = _row_tiles(inputs)
        return [f"{tiles} tiles of rows are no multiple of {params.cluster=}"] if tiles % params.cluster else []

    def footprints(
        self, inputs: PagedInputs, device: Device, direction: Direction, params: HopperLatentParams
    ) -> list[Footprint]:
        blocks = _row_tiles(inputs) * (params.ranges or filling_ranges(inputs, device))
        shared = LatentPlan(inputs.dtype, params.cluster).shared_bytes
        return [Footprint(blocks, WARPGROUP_THREADS * WARPGROUPS, shared)]

    def forward(self, inputs: PagedInputs, params: HopperLatentParams) -> Results:
        """``(out, lse)``; lse is float32."""
        if inputs.is_empty:
            return empty_forward(inputs)
        return run_with_sequential_vmap(lambda inputs: _run(inputs, params), inputs)


def _row_tiles(inputs: PagedInputs) -> int:
    return -(-inputs.longest_q * inputs.heads // ROWS)


def _blocks(inputs: PagedInputs) -> int:
    """The blocks of all sequences, at most, with their overheads."""
    return inputs.sequences * (-(-inputs.capacity // BLOCK_K) + ITEM_OVERHEAD)


def filling_ranges(inputs: PagedInputs, device: Device) -> int:
    """The ranges with which CTAs end soonest if sequences fill their page tables; lengths are not read."""
    cores, row_tiles, blocks, sequences = num_sms(device), _row_tiles(inputs), _blocks(inputs), inputs.sequences
    most = min(-(-blocks // MIN_RANGE), MAX_RANGES)

    def cost(ranges: int) -> int:
        # Sequences of one length end where ranges do, or are cut to as many parts each, or a range has parts of two.
        cut = 0 if sequences % ranges == 0 else COMBINE_OVERHEAD + (ITEM_OVERHEAD if ranges % sequences else 0)
        return -(-ranges * row_tiles // cores) * (-(-blocks // ranges) + ITEM_OVERHEAD) + cut

    # As many as fit into one round of CTAs or, where many row tiles leave a large part of it idle, into several.
    choices = {min(max(rounds * cores // row_tiles, 1), most) for rounds in range(1, MAX_ROUNDS + 1)}
    # A few less, if sequences of one length are then cut alike.
    choices |= {_aligned(ranges, sequences) for ranges in choices}
    return min(choices, key=lambda ranges: (cost(ranges), ranges))


def _aligned(ranges: int, sequences: int) -> int:
    """The largest number up to ``ranges`` that is a multiple or a divisor of ``sequences``."""
    if ranges >= sequences:
        return ranges - ranges % sequences
    return next(number for number in range(ranges, 0, -1) if sequences % number == 0)


def _run(inputs: PagedInputs, params: HopperLatentParams) -> Results:
    tokens, heads = inputs.tokens, inputs.heads
    assert inputs.page_table is not None
    assert inputs.q_length is not None
    call = LatentCall(
        sequences=inputs.sequences,
        q_length=inputs.q_length,
        heads=heads,
        num_pages=inputs.num_pages,
        page_size=inputs.page_size,
        columns=inputs.columns,
        softmax_scale=inputs.softmax_scale,
        right=inputs.right,
        ranges=params.ranges or filling_ranges(inputs, current_device()),
        cluster=params.cluster,
        prefetched=params.prefetched,
    )
    query = inputs.query.reshape(inputs.sequences, call.rows, LATENT_DIM)
    if call.rows % SWIZZLE_ROWS:
        query = jnp.pad(query, ((0, 0), (0, -call.rows % SWIZZLE_ROWS), (0, 0)))
    pages = inputs.key.reshape(call.num_pages, call.page_size, LATENT_DIM)
    sinks = sinks_lse(inputs.softmax_aux)
    if sinks is not None:
        sinks = jnp.pad(jnp.tile(sinks, call.q_length), (0, call.padded_rows - call.rows))
    ranges = latent_ranges(inputs.kv_lengths, call)
    operands = query, pages, inputs.page_table.reshape(-1), inputs.kv_lengths
    whole, parts = latent_kernel(*operands, sinks, ranges, call=call)
    if parts is not None:
        whole = combine_parts(whole, parts, ranges, sinks, call=call)
    out, lse = whole.out[:, : call.rows], whole.lse[:, : call.rows]
    return out.reshape(tokens, heads, VALUE_DIM), lse.reshape(tokens, heads)
