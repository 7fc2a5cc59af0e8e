"""Attention of packed queries over pages in Pallas Mosaic GPU, on Hopper: what is served, and how it is laid out."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from tilewright.kernels.footprint import SHARED_KB, Footprint
from tilewright.kernels.paged_attention.inputs import PagedInputs, PagedProblem, Results, one_after_the_other
from tilewright.kernels.paged_attention.pallas_gpu_chunk import (
    BLOCK_ROWS,
    CONSUMERS,
    ChunkCall,
    chunk_kernel,
    present_pages,
)
from tilewright.kernels.paged_attention.places import boundaries, most_tiles, packed_tiles, packed_tokens
from tilewright.kernels.paged_attention.xla_forward import empty_forward
from tilewright.kernels.registry import InferenceImplementation, Platform
from tilewright.ops.core.types import Device, Direction

BLOCK_K = 128
"""Keys of a tile; a page has a whole number of tiles, or a tile of pages."""

SEVERAL_PAGES = 8
"""Pages of a tile, from which two stages without causality spill."""

LEAST_PAGE = 8
"""Tokens of a page: the rows of a swizzled tile repeat by as many."""

DIMS = (64, 128)


@dataclasses.dataclass(frozen=True, slots=True)
class HopperChunkParams:
    """How the kernel is cut.

    Attributes:
      num_stages: tiles of keys, and of values, in shared memory at once.
    """

    num_stages: int = 3

    def __post_init__(self) -> None:
        if type(self.num_stages) is not int or not 2 <= self.num_stages <= 8:
            raise ValueError(f"the producer needs a stage ahead of the consumers, 8 at most, got {self.num_stages=}")


class PallasGpuPackedAttention(InferenceImplementation):
    """Serves packed queries over pages in float16 and bfloat16 on compute capability 9.0."""

    platform: ClassVar[Platform] = Platform.PALLAS
    forward_params: ClassVar[type] = HopperChunkParams

    def forward_reasons(self, problem: PagedProblem, device: Device) -> list[str]:
        why, options = [], problem.options
        if device.kind != "gpu" or device.capability != (9, 0):
            why.append(f"needs a GPU of compute capability 9.0, got {device.name} ({device.capability=})")
        if not problem.packed or not problem.paged or problem.starts or options.latent_dim is not None:
            why.append("takes packed queries and a page table")
        if problem.dtype.name not in ("bfloat16", "float16"):
            why.append(f"computes in bfloat16 or float16, got {problem.dtype=}")
        if problem.kv_dtype != problem.dtype or any(shape is not None for shape in problem.scale_shapes):
            why.append(f"takes keys and values in the query's dtype and no scales, got {problem.kv_dtype=}")
        if problem.head_dim != problem.value_dim or problem.head_dim not in DIMS:
            why.append(f"takes head dims of 64 or 128, got {problem.head_dim=}, {problem.value_dim=}")
        if problem.page_size < LEAST_PAGE or problem.page_size & (problem.page_size - 1):
            why.append(f"a page must have a power of two of tokens from {LEAST_PAGE} on, got {problem.page_size=}")
        if problem.groups > BLOCK_ROWS:
            why.append(f"up to {BLOCK_ROWS} heads can share a key head, got {problem.groups}")
        if options.logits_soft_cap is not None or problem.alibi or problem.sinks:
            why.append("has no soft cap, no ALiBi and no sinks")
        return why

    def heuristic(self, problem: PagedProblem, device: Device, direction: Direction) -> HopperChunkParams:
        return self.candidates(problem, device, direction)[0]

    def candidates(self, problem: PagedProblem, device: Device, direction: Direction) -> list[HopperChunkParams]:
        # Those whose registers would be spilled are left out.
        several = problem.options.right is None and _call(problem, HopperChunkParams()).copies >= SEVERAL_PAGES
        listed = [HopperChunkParams(3), *(() if several else (HopperChunkParams(2),))]
        return [params for params in listed if not self.config_reasons(problem, device, direction, params)]

    def config_reasons(
        self, problem: PagedProblem, device: Device, direction: Direction, params: HopperChunkParams
    ) -> list[str]:
        taken = _call(problem, params).plan(problem.dtype, problem.head_dim).shared_bytes
        if taken > SHARED_KB[90] << 10:
            return [f"{params} takes {taken} bytes of shared memory"]
        return []

    def footprints(
        self, problem: PagedProblem, device: Device, direction: Direction, params: HopperChunkParams
    ) -> list[Footprint]:
        call = _call(problem, params)
        plan = call.plan(problem.dtype, problem.head_dim)
        return [Footprint(call.tiles * call.kv_heads, 128 * (CONSUMERS + 1), plan.shared_bytes)]

    def forward(self, inputs: PagedInputs, params: HopperChunkParams) -> Results:
        """``(out, lse)``; lse is float32."""
        if inputs.is_empty:
            return empty_forward(inputs)
        return one_after_the_other(lambda inputs: _run(inputs, params), inputs)


def _tokens_of_a_tile(group: int) -> int:
    return BLOCK_ROWS // group


def _call(problem: PagedProblem, params: HopperChunkParams) -> ChunkCall:
    several = max(BLOCK_K // problem.page_size, 1)
    return ChunkCall(
        tiles=most_tiles(problem.tokens, problem.sequences, _tokens_of_a_tile(problem.groups)),
        kv_heads=problem.kv_heads,
        group=problem.groups,
        page_size=problem.page_size,
        columns=-(-(problem.capacity // problem.page_size) // several) * several,
        block_k=BLOCK_K,
        num_stages=params.num_stages,
        softmax_scale=problem.options.softmax_scale,
        left=problem.options.left,
        right=problem.options.right,
    )


def _run(inputs: PagedInputs, params: HopperChunkParams) -> Results:
    problem = PagedProblem.of(inputs)
    call, tokens = _call(problem, params), problem.tokens
    heads, kv_heads, group, dim = problem.heads, problem.kv_heads, problem.groups, problem.head_dim
    each = _tokens_of_a_tile(group)
    assert inputs.page_table is not None
    assert inputs.value is not None
    cum = boundaries(inputs.cum_q_lens, tokens)
    plan, starts = packed_tiles(cum, inputs.kv_lengths, tokens, each)
    owners = packed_tokens(cum, tokens, problem.sequences, None)

    # Tiles of their own, a key head's rows side by side: TMA has no masks.
    places = jnp.minimum(plan.token[:, None] + jnp.arange(each, dtype=jnp.int32), tokens - 1)
    query = inputs.query[places].reshape(call.tiles, each, kv_heads, group, dim).swapaxes(1, 2)
    query = query.reshape(call.tiles * kv_heads, each * group, dim)
    query = jnp.pad(query, ((0, 0), (0, BLOCK_ROWS - each * group), (0, 0)))
    table, bits = present_pages(inputs.page_table, problem.num_pages, call)
    tiles = jnp.concatenate([plan.sequence, plan.rows, plan.position])
    out, lse = chunk_kernel(query, inputs.key, inputs.value, table, bits, tiles, inputs.kv_lengths, call=call)

    def of_tokens(rows: Any, *dims: int) -> Any:
        """From ``[tiles · kv_heads, 128, ...]`` to ``[tokens, heads, ...]``."""
        rows = rows[:, : each * group].reshape(call.tiles, kv_heads, each, group, *dims).swapaxes(1, 2)
        place = (starts[owners.sequence] + owners.offset // each) * each + owners.offset % each
        return rows.reshape(call.tiles * each, heads, *dims)[place]

    nothing, nothing_lse = empty_forward(inputs)
    out = jnp.where(owners.owned[:, None, None], of_tokens(out, dim), nothing)
    return out, jnp.where(owners.owned[:, None], of_tokens(lse), nothing_lse)
