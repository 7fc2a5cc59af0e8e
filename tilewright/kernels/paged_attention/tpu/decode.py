"""Attention of few query tokens of each sequence over pages: all heads of a step are rows of one matmul.

| symbol | |
| --- | --- |
| Q | the rows of a step: a sequence's query tokens, each with all heads |
| K, V | a block of pages: rows are keys of all key heads, token by token |
| S, P | logits and probabilities ``[rows, block_rows]``: of a row only the columns of its own key head count |

A key is pushed into the MXU once, whichever heads are its query's: as long as all heads are few rows, their products
with keys of other heads cost nothing, and keys need not be sorted by head. A block's logits are computed in chunks of
columns before the maximum is taken over all of them, so that matmuls of one chunk overlap with the softmax of another.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Kwon et al., "Efficient Memory Management
for Large Language Model Serving with PagedAttention" (2023).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tilewright.kernels.masks import Index
from tilewright.kernels.paged_attention.tpu.pages import Blocks, PagedCall, Reader, Step, Work, in_lanes, rows_at
from tilewright.kernels.pallas_types import Ref, Scalar
from tilewright.kernels.tpu.device import LANES, vmem_bytes
from tilewright.kernels.tpu.launch import run_kernel
from tilewright.ops.utils.device import current_device

CHUNK = 512
"""Columns of logits of one matmul."""

PART = 4096
"""Columns of logits of one step of the online softmax: matmuls of one chunk overlap with the softmax of another."""

SCALE, SLOPE, SINK_MAX, SINK_TOTAL, VALUE_SCALE, HEAD, TOKEN = range(7)
"""Columns of the numbers that each row of queries has: see `decode`."""


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeCall(PagedCall):
    """Static facts of a call, whose rows are query tokens × heads, padded to whole tiles.

    Attributes:
      cores: that the steps are dealt out to.
    """

    cores: int = 1


def decode(
    call: DecodeCall, query: jax.Array, numbers: jax.Array, table: jax.Array, work: Work, *pages: jax.Array
) -> Any:
    """``(out [steps, rows, value_dim], lse [steps, rows])``.

    Args:
      query: ``[steps, rows, head_dim]``.
      numbers: ``[rows, LANES]`` float32, of each row in the columns named above: the factor of its logits, its slope,
        maximum and sum of the sinks, the factor of values, its key head, and its token.
      pages: keys and values as `paged_view` gives them; keys only if they contain the values.
    """
    blocks, steps = call.blocks, query.shape[0]
    each = steps // call.cores
    dtype = query.dtype

    def of_step(core: Index, step: Index, *_: Any) -> tuple[Any, ...]:
        return core * each + step, 0, 0

    out, lse = run_kernel(
        functools.partial(_step, call),
        table.reshape(-1),
        jnp.concatenate(work),
        query,
        numbers,
        *pages,
        role="decode",
        grid=(call.cores, each),
        orders=("parallel", "arbitrary"),
        scalars=2,
        in_specs=[
            pl.BlockSpec((1, call.rows, call.head_dim), of_step),
            pl.BlockSpec((call.rows, LANES), lambda *_: (0, 0)),
            *[pl.BlockSpec(memory_space=pltpu.HBM) for _ in pages],
        ],
        out_specs=[
            pl.BlockSpec((1, call.rows, call.value_dim), of_step),
            pl.BlockSpec((1, call.rows, LANES), of_step),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((steps, call.rows, call.value_dim), dtype),
            jax.ShapeDtypeStruct((steps, call.rows, LANES), jnp.float32),
        ],
        scratch_shapes=[
            [pltpu.VMEM((2, blocks.rows, array.shape[-1]), array.dtype) for array in pages],
            pltpu.VMEM((1, blocks.rows), jnp.float32),
            pltpu.VMEM((call.rows, _part(blocks)), jnp.float32),
            pltpu.VMEM((call.rows, LANES), jnp.float32),
            pltpu.VMEM((call.rows, LANES), jnp.float32),
            pltpu.VMEM((call.rows, call.value_dim), jnp.float32),
            pltpu.SMEM((1,), jnp.int32),
            pltpu.SemaphoreType.DMA((len(pages), 2)),
        ],
        vmem_limit=_vmem_limit(call, dtype, pages),
        flops=2 * steps * call.rows * blocks.columns * blocks.page_rows * (call.head_dim + call.value_dim),
        transcendentals=steps * call.rows * blocks.columns * blocks.page_rows,
        bytes_accessed=steps * blocks.columns * blocks.page_rows * sum(x.shape[-1] * x.dtype.itemsize for x in pages),
    )
    return out, lse[..., 0]


def _vmem_limit(call: DecodeCall, dtype: np.dtype[Any], pages: Sequence[jax.Array]) -> int:
    """Bytes of VMEM that the kernel asks for: its buffers, and as much again for what the compiler keeps there."""
    rows = call.rows * (2 * dtype.itemsize * (call.head_dim + call.value_dim) + 4 * (call.value_dim + 3 * LANES + PART))
    blocks = sum(2 * call.blocks.rows * page.shape[-1] * page.dtype.itemsize for page in pages)
    return min(2 * (rows + blocks) + (8 << 20), vmem_bytes(current_device()))


def _step(call: DecodeCall, table: Ref, work: Ref, query: Ref, numbers: Ref, *others: Any) -> None:
    pages = others[: 1 if call.latent else 2]
    out, lse, buffers, codes, logits, row_max, total, weighted, slot_of, semaphores = others[len(pages) :]
    blocks = call.blocks
    index = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)
    reader = Reader(blocks, table, work, pages, buffers, semaphores)
    step = reader.step(index)

    @pl.when(pl.program_id(1) == 0)
    def start() -> None:
        reader.start_first(step, slot_of)

    row_max[...] = jnp.broadcast_to(numbers[:, SINK_MAX : SINK_MAX + 1], row_max.shape)
    total[...] = jnp.broadcast_to(numbers[:, SINK_TOTAL : SINK_TOTAL + 1], total.shape)
    weighted[...] = jnp.zeros_like(weighted)

    def compute(block: Index, slot: Index) -> None:
        key, value = buffers[0].at[slot], buffers[-1].at[slot]
        _mark(reader, step, block, codes, value)
        first = step.pages_of(block)[0] * blocks.tokens - step.field("first")

        def each_part(part: Index, _: None) -> None:
            at = part * _part(blocks)
            _attend(call, query[0], numbers, key, value, first, at, codes, logits, row_max, total, weighted)

        lax.fori_loop(0, blocks.rows // _part(blocks), each_part, None)

    reader.blocks_of(step, slot_of, compute)
    sums = total[:, :1]
    scale = numbers[:, VALUE_SCALE : VALUE_SCALE + 1] / jnp.where(sums == 0.0, 1.0, sums)
    out[0] = (weighted[...] * scale).astype(out.dtype)
    lse[0] = row_max[...] + jnp.log(total[...])


def _mark(reader: Reader, step: Step, block: Index, codes: Ref, value: Ref) -> None:
    """Writes the key head of each column, and -1 where the step does not see it; most blocks have none such."""
    head = lax.broadcasted_iota(jnp.int32, codes.shape, 1) % reader.blocks.heads
    whole = reader.is_whole(step, block)

    @pl.when(whole)
    def mark_all() -> None:
        codes[...] = head.astype(jnp.float32)

    @pl.when(jnp.logical_not(whole))
    def mark_seen() -> None:
        seen = reader.seen(step, block, value, reader.blocks.heads)
        codes[...] = jnp.where(seen, head, -1).astype(jnp.float32)


def _part(blocks: Blocks) -> int:
    """Columns of a step of the online softmax: as many that divide a block."""
    return math.gcd(blocks.rows, PART)


def _attend(
    call: DecodeCall,
    query: jax.Array,
    numbers: Ref,
    key: Ref,
    value: Ref,
    first: Scalar,
    start: Scalar,
    codes: Ref,
    logits: Ref,
    row_max: Ref,
    total: Ref,
    weighted: Ref,
) -> None:
    """Adds the columns from ``start`` on to the online softmax.

    ``first`` is the first position of the block, from that of the first query on.
    """
    precision = lax.Precision.HIGHEST if query.dtype == jnp.float32 else None
    dot = functools.partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    scale, slope, head, token = (numbers[:, at : at + 1] for at in (SCALE, SLOPE, HEAD, TOKEN))
    chunk = math.gcd(call.blocks.rows, CHUNK)
    chunks = range(0, logits.shape[1], chunk)

    def rows_of(at: int) -> Any:
        return rows_at(start + at, chunk)

    found = row_max[...]
    for at in chunks:
        s = dot(query, key[rows_of(at)].astype(query.dtype), (((1,), (1,)), ((), ()))) * call.softmax_scale
        if call.scaled:
            s = s * scale
        visible = codes[:, rows_of(at)] == head
        if call.slopes or call.left is not None or call.right is not None:
            column = start + at + lax.broadcasted_iota(jnp.int32, (1, chunk), 1)
            distance = (first + column // call.blocks.heads) - token.astype(jnp.int32)
            if call.slopes:
                s = s + slope * distance.astype(jnp.float32)
            if call.left is not None:
                visible &= distance >= -call.left
            if call.right is not None:
                visible &= distance <= call.right
        if call.soft_cap is not None:
            s = call.soft_cap * jnp.tanh(s * (1.0 / call.soft_cap))
        s = jnp.where(visible, s, -jnp.inf)
        logits[:, at : at + chunk] = s
        found = functools.reduce(jnp.maximum, (s[:, i : i + LANES] for i in range(0, chunk, LANES)), found)
    new_max = jnp.broadcast_to(jnp.max(found, axis=1, keepdims=True), found.shape)
    shift = jnp.where(new_max == -jnp.inf, 0.0, new_max)
    shrink = jnp.exp(row_max[...] - shift)
    row_max[...] = new_max
    sums = jnp.zeros_like(found)
    out = jnp.zeros_like(weighted)
    for at in chunks:
        p = jnp.exp(logits[:, at : at + chunk] - in_lanes(shift, chunk))
        sums = functools.reduce(jnp.add, (p[:, i : i + LANES] for i in range(0, chunk, LANES)), sums)
        v = value[rows_of(at), : call.value_dim].astype(query.dtype)
        out += dot(p.astype(query.dtype), v, (((1,), (0,)), ((), ())))
    total[...] = total[...] * shrink + jnp.sum(sums, axis=1, keepdims=True)
    weighted[...] = weighted[...] * in_lanes(shrink, call.value_dim) + out
