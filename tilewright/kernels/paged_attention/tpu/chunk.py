"""Attention of chunks of query tokens over pages: a tile of queries beside all key heads of a block of pages.

| symbol | |
| --- | --- |
| Q | ``[rows, head_dim]`` of a key head: the tokens of a tile, each with the query heads of that key head |
| K, V | ``[block_k, head_dim]`` of a key head |
| S, P | logits and probabilities ``[rows, block_k]`` |

A tile has a fixed number of packed tokens, which may be of several sequences. A step of the grid is one sequence in one
tile; the online softmax goes on over the steps of a tile, since rows of other sequences are masked in each. Pages are
copied as they lie, by token, and K and V are sorted by head in VMEM once a block for all rows of the tile.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Kwon et al., "Efficient Memory Management
for Large Language Model Serving with PagedAttention" (2023).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from tilewright.kernels.masks import Index
from tilewright.kernels.paged_attention.inputs import PagedInputs
from tilewright.kernels.paged_attention.token_layout import bounded
from tilewright.kernels.paged_attention.tpu.decode import SCALE, SINK_MAX, SINK_TOTAL, SLOPE, VALUE_SCALE
from tilewright.kernels.paged_attention.tpu.pages import (
    PagedCall,
    Reader,
    Step,
    Work,
    in_lanes,
    rows_at,
    work_of,
)
from tilewright.kernels.pallas_types import Ref, Scalar
from tilewright.kernels.tpu.device import LANES, vmem_bytes
from tilewright.kernels.tpu.launch import run_kernel
from tilewright.ops.utils.device import current_device

SORTED = 128
"""Tokens of a block that are sorted by head at once."""

SUBTILE = 256
"""Rows of queries whose logits are computed at once; those that have no token of a step are left out."""


class TileWork(NamedTuple):
    """The query tokens of each step, which follow the fields of `Work`.

    Attributes:
      tile: whose queries a step has.
      begin, tokens: its first query token in the tile, and their number.
      opens, closes: 1 for the first and the last step of a tile.
    """

    tile: Int[Array, " steps"]
    begin: Int[Array, " steps"]
    tokens: Int[Array, " steps"]
    opens: Int[Array, " steps"]
    closes: Int[Array, " steps"]


def tile_work(inputs: PagedInputs, table: jax.Array, cum: jax.Array, tokens: int, longer: int) -> tuple[Work, TileWork]:
    """The steps of all sequences with more than ``longer`` query tokens, in tiles of ``tokens``.

    Args:
      cum: ascending boundaries of the sequences' tokens.
    """
    counts, sequences = jnp.diff(cum), inputs.sequences
    first_tile = cum[:-1] // tokens
    tiles = jnp.where(counts > longer, (cum[1:] - 1) // tokens - first_tile + 1, 0)
    ends = jnp.cumsum(tiles)
    # A tile more than those of all tokens for each sequence that begins within one.
    steps = -(-inputs.tokens // tokens) + min(sequences, inputs.tokens // (longer + 1))
    number = jnp.arange(steps, dtype=jnp.int32)
    owner = jnp.sum(ends[None] <= number[:, None], axis=1, dtype=jnp.int32)
    exists, sequence = owner < sequences, jnp.minimum(owner, sequences - 1)
    tile = lax.cummax(jnp.where(exists, first_tile[sequence] + number - (ends - tiles)[sequence], 0))
    begin = jnp.maximum(cum[sequence], tile * tokens)
    count = jnp.where(exists, jnp.minimum(cum[sequence + 1], (tile + 1) * tokens) - begin, 0)
    first = bounded(inputs.kv_lengths)[sequence] - counts[sequence] + begin - cum[sequence]
    changes = tile[1:] != tile[:-1]
    opens = exists & jnp.pad(changes, (1, 0), constant_values=True)
    closes = exists & jnp.pad(changes | ~exists[1:], (0, 1), constant_values=True)
    work = work_of(inputs, table, sequence, first, count, 1)
    return work, TileWork(tile, begin - tile * tokens, count, opens.astype(jnp.int32), closes.astype(jnp.int32))


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkCall(PagedCall):
    """Static facts of a call, whose rows are query tokens × ``groups`` of a key head, whole vectors of lanes.

    Attributes:
      groups: query heads of a key head.
    """

    groups: int


class State(NamedTuple):
    """The online softmax of a tile, ``[kv_heads, rows, ...]``: maximum in all lanes, sums by lane, and P · V."""

    row_max: Ref
    total: Ref
    weighted: Ref


def attend_chunks(
    call: ChunkCall,
    query: jax.Array,
    numbers: jax.Array,
    table: jax.Array,
    work: Work,
    tiles: TileWork,
    *pages: jax.Array,
) -> Any:
    """``(out [kv_heads, tiles · rows, value_dim], lse [kv_heads, tiles · rows])``; tiles without a step are undefined.

    Args:
      query: ``[kv_heads, tiles · rows, head_dim]``.
      numbers: ``[kv_heads, rows, LANES]``, as `decode` has them for its rows.
    """
    blocks, kv_heads, dtype = call.blocks, query.shape[0], query.dtype
    count, steps = query.shape[1] // call.rows, blocks.steps
    lines = call.rows // LANES
    tile_field = blocks.fields.index("tile") * steps

    def of_step(step: Index, _: Any, work: Any) -> tuple[Any, ...]:
        return 0, work[tile_field + step], 0

    def lse_of_step(step: Index, _: Any, work: Any) -> tuple[Any, ...]:
        return work[tile_field + step], 0, 0, 0

    scores = call.rows * kv_heads * blocks.columns * blocks.tokens * steps
    out, lse = run_kernel(
        functools.partial(_step, call),
        table.reshape(-1),
        jnp.concatenate([*work, *tiles]),
        query,
        numbers,
        *pages,
        role="chunks",
        grid=(steps,),
        orders=("arbitrary",),
        scalars=2,
        in_specs=[
            pl.BlockSpec((kv_heads, call.rows, call.head_dim), of_step),
            pl.BlockSpec(numbers.shape, lambda *_: (0, 0, 0)),
            *[pl.BlockSpec(memory_space=pltpu.HBM) for _ in pages],
        ],
        out_specs=[
            pl.BlockSpec((kv_heads, call.rows, call.value_dim), of_step),
            pl.BlockSpec((1, kv_heads, lines, LANES), lse_of_step),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((kv_heads, count * call.rows, call.value_dim), dtype),
            jax.ShapeDtypeStruct((count, kv_heads, lines, LANES), jnp.float32),
        ],
        scratch_shapes=[
            [pltpu.VMEM((2, blocks.rows, array.shape[-1]), array.dtype) for array in pages],
            [pltpu.VMEM((kv_heads, blocks.block_k, array.shape[-1]), dtype) for array in pages],
            pltpu.VMEM((1, blocks.block_k), jnp.int32),
            State(
                pltpu.VMEM((kv_heads, call.rows, LANES), jnp.float32),
                pltpu.VMEM((kv_heads, call.rows, LANES), jnp.float32),
                pltpu.VMEM((kv_heads, call.rows, call.value_dim), jnp.float32),
            ),
            pltpu.SMEM((1,), jnp.int32),
            pltpu.SemaphoreType.DMA((len(pages), 2)),
        ],
        flops=scores * (call.head_dim + call.value_dim),  # causal: half
        transcendentals=scores // 2,
        bytes_accessed=blocks.columns * blocks.page_rows * sum(x.shape[-1] * x.dtype.itemsize for x in pages) * steps,
        vmem_limit=_vmem_limit(call, query, pages),
    )
    return out, jnp.moveaxis(lse, 1, 0).reshape(kv_heads, -1)


def _vmem_limit(call: ChunkCall, query: jax.Array, pages: Sequence[jax.Array]) -> int:
    """Bytes of VMEM that the kernel asks for: its buffers, and a half more for what the compiler keeps there."""
    blocks, itemsize = call.blocks, query.dtype.itemsize
    rows = query.shape[0] * call.rows
    tile = 2 * itemsize * (call.head_dim + call.value_dim) + 4 * (call.value_dim + 4 * LANES)
    read = sum(blocks.rows * page.shape[-1] * (2 * page.dtype.itemsize + itemsize) for page in pages)
    logits = 8 * SUBTILE * blocks.block_k
    return min((rows * tile + read + logits) * 5 // 4, vmem_bytes(current_device()))


def _step(call: ChunkCall, table: Ref, work: Ref, query: Ref, numbers: Ref, *others: Any) -> None:
    pages = others[: 1 if call.latent else 2]
    out, lse, buffers, by_head, seen, state, slot_of, semaphores = others[len(pages) :]
    reader = Reader(call.blocks, table, work, pages, buffers, semaphores)
    step = reader.step(pl.program_id(0))

    @pl.when(pl.program_id(0) == 0)
    def start() -> None:
        reader.start_first(step, slot_of)

    @pl.when(step.field("opens") == 1)
    def initialise() -> None:
        state.row_max[...] = jnp.broadcast_to(numbers[:, :, SINK_MAX : SINK_MAX + 1], state.row_max.shape)
        lane = lax.broadcasted_iota(jnp.int32, state.total.shape, 2)
        state.total[...] = jnp.where(lane == SINK_TOTAL, numbers[...], 0.0)
        state.weighted[...] = jnp.zeros_like(state.weighted)

    def compute(block: Index, slot: Index) -> None:
        _block(call, reader, step, block, query, numbers, [each.at[slot] for each in buffers], by_head, seen, state)

    reader.blocks_of(step, slot_of, compute)

    @pl.when(step.field("closes") == 1)
    def finish() -> None:
        def each(head: Index, _: None) -> None:
            total = jnp.sum(state.total[head], axis=1, keepdims=True)
            scale = numbers[head, :, VALUE_SCALE : VALUE_SCALE + 1] / jnp.where(total == 0.0, 1.0, total)
            out[head] = (state.weighted[head] * scale).astype(out.dtype)
            found = state.row_max[head] + jnp.log(total)
            for line in range(call.rows // LANES):
                # All lanes hold a row's number: the first row of the transposed tile has those of all rows.
                lse[0, head, line : line + 1, :] = found[line * LANES : (line + 1) * LANES].T[:1]

        lax.fori_loop(0, numbers.shape[0], each, None)


def _block(
    call: ChunkCall,
    reader: Reader,
    step: Step,
    block: Index,
    query: Ref,
    numbers: Ref,
    buffers: list[Ref],
    by_head: list[Ref],
    seen: Ref,
    state: State,
) -> None:
    """Adds a block to the online softmax of all heads."""
    blocks = call.blocks
    whole = reader.is_whole(step, block)

    @pl.when(whole)
    def mark_all() -> None:
        seen[...] = jnp.ones_like(seen)

    @pl.when(jnp.logical_not(whole))
    def mark_seen() -> None:
        seen[...] = reader.seen(step, block, buffers[-1], 1).astype(jnp.int32)

    piece = math.gcd(blocks.block_k, SORTED)

    def sort(index: Index, _: None) -> None:
        for source, target in zip(buffers, by_head, strict=True):
            rows = source[rows_at(index * piece * blocks.heads, piece * blocks.heads)].astype(target.dtype)
            heads_last = rows.reshape(piece, blocks.heads, rows.shape[1])
            target[:, rows_at(index * piece, piece)] = jnp.swapaxes(heads_last, 0, 1)

    lax.fori_loop(0, blocks.block_k // piece, sort, None)

    key_first = step.pages_of(block)[0] * blocks.tokens
    begin, count = step.field("begin"), step.field("tokens")
    subtile = math.gcd(call.rows, SUBTILE)

    def each_part(part: Index, _: None) -> None:
        at = rows_at(part * subtile, subtile)
        # Tokens of the rows, counted from the step's first, and their positions.
        low = lax.div(part * subtile, call.groups) - begin
        high = lax.div((part + 1) * subtile - 1, call.groups) - begin
        first = step.field("first")
        inside = (low >= 0) & (high < count) & whole
        if call.right is not None:
            inside &= key_first + blocks.block_k - 1 <= first + low + call.right
        if call.left is not None:
            inside &= key_first >= first + high - call.left
        some = (high >= 0) & (low < count)
        if call.right is not None:
            some &= key_first <= first + jnp.minimum(high, count - 1) + call.right

        def heads(masked: bool) -> None:
            visible = _visible(call, part * subtile, subtile, begin, count, key_first - first, seen) if masked else None
            distance = None
            if call.slopes:
                distance = key_first - first - _tokens(call, part * subtile, subtile, begin) + _columns(call)

            def each_head(head: Index, _: None) -> None:
                operands = query[head, at], by_head[0][head], by_head[-1][head][:, : call.value_dim]
                _online_softmax(call, *operands, numbers[head, at], visible, distance, _rows_of(state, head, at))

            lax.fori_loop(0, blocks.heads, each_head, None)

        pl.when(some & inside)(functools.partial(heads, False))
        pl.when(some & jnp.logical_not(inside))(functools.partial(heads, True))

    lax.fori_loop(0, call.rows // subtile, each_part, None)


def _rows_of(state: State, head: Index, at: pl.Slice) -> State:
    return State(*(each.at[head, at] for each in state))


def _tokens(call: ChunkCall, start: Scalar, subtile: int, begin: Scalar) -> Any:
    """Tokens of rows from ``start`` on, counted from a step's first, ``[subtile, 1]``."""
    return (start + lax.broadcasted_iota(jnp.int32, (subtile, 1), 0)) // call.groups - begin


def _columns(call: ChunkCall) -> Any:
    return lax.broadcasted_iota(jnp.int32, (1, call.blocks.block_k), 1)


def _visible(
    call: ChunkCall, start: Scalar, subtile: int, begin: Scalar, count: Scalar, shift: Scalar, seen: Ref
) -> Any:
    """The mask of rows from ``start`` on; ``shift`` is the first key's position from that of the first query on."""
    token = _tokens(call, start, subtile, begin)
    visible = (seen[...] == 1) & (token >= 0) & (token < count)
    distance = shift - token + _columns(call)
    if call.left is not None:
        visible &= distance >= -call.left
    if call.right is not None:
        visible &= distance <= call.right
    return visible


def _online_softmax(
    call: ChunkCall,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    numbers: jax.Array,
    visible: jax.Array | None,
    distance: jax.Array | None,
    state: State,
) -> None:
    precision = lax.Precision.HIGHEST if query.dtype == jnp.float32 else None
    dot = functools.partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    s = dot(query, key, (((1,), (1,)), ((), ()))) * call.softmax_scale
    if call.scaled:
        s = s * numbers[:, SCALE : SCALE + 1]
    if distance is not None:
        s = s + numbers[:, SLOPE : SLOPE + 1] * distance.astype(jnp.float32)
    if call.soft_cap is not None:
        s = call.soft_cap * jnp.tanh(s * (1.0 / call.soft_cap))
    if visible is not None:
        s = jnp.where(visible, s, -jnp.inf)
    row_max = state.row_max[...]
    # Maxima are in all lanes, and sums are added up over the lanes in the end: one reduction remains for the XLU.
    new_max = jnp.maximum(row_max, jnp.max(s, axis=1, keepdims=True))
    shift = jnp.where(new_max == -jnp.inf, 0.0, new_max)
    shrink = jnp.exp(row_max - shift)
    p = jnp.exp(s - in_lanes(shift, s.shape[1]))
    state.row_max[...] = new_max
    sums = (p[:, at : at + LANES] for at in range(0, p.shape[1], LANES))
    state.total[...] = functools.reduce(jnp.add, sums, state.total[...] * shrink)
    out = dot(p.astype(query.dtype), value, (((1,), (0,)), ((), ())))
    state.weighted[...] = state.weighted[...] * in_lanes(shrink, call.value_dim) + out
