"""Attention over a cache on TPUs, in Pallas: support, configs, the calls of the kernels."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tilewright.kernels.op.backend import InferenceBackend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.paged_attention.inputs import PagedInputs
from tilewright.kernels.paged_attention.results import Results, empty_forward, run_with_sequential_vmap, sinks_of
from tilewright.kernels.paged_attention.token_layout import boundaries, bounded, packed_tokens
from tilewright.kernels.paged_attention.tpu import chunk, decode
from tilewright.kernels.paged_attention.tpu.pages import (
    Blocks,
    PagedCall,
    cache_reasons,
    is_copied,
    paged_view,
    table_of,
    tile_rows,
    work_of,
)
from tilewright.kernels.tpu.device import LANES, device_reasons
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.device import current_device
from tilewright.ops.utils.stable_ids import stable_id

MAX_ROWS = 128
"""Query tokens × heads of a sequence up to which all heads are one matmul with all keys."""


MAX_DIM = 640
"""Elements of a key: blocks of more, and tiles of queries, would not fit the VMEM of every chip."""


@stable_id("tilewright/paged_attention.TpuPagedParams")
@dataclasses.dataclass(frozen=True, slots=True)
class TpuPagedParams:
    """Config of the kernels.

    Attributes:
      block_rows: keys of all key heads that are copied to VMEM together, where queries are few.
      tile_rows: query tokens × heads of a tile of a chunk.
      block_k: tokens of keys that are copied together for a tile, of ``block_rows`` keys at most.
    """

    block_rows: int = 4096
    tile_rows: int = 4096
    block_k: int = 512

    def __post_init__(self) -> None:
        for name in ("block_rows", "tile_rows", "block_k"):
            size = getattr(self, name)
            if type(size) is not int or size < LANES or size % LANES:
                raise ValueError(f"{name}={size} must be a positive multiple of {LANES}")


class TpuPagedAttention(InferenceBackend[PagedInputs, Results, TpuPagedParams]):
    """Serves bfloat16 and float32 on TPU v5e, v5p, v6e and v7x."""

    name: ClassVar[str] = "tpu"
    platform: ClassVar[Platform] = Platform.PALLAS
    keeps_lowering: ClassVar[bool] = True
    forward_params: ClassVar[type] = TpuPagedParams
    serves: ClassVar[frozenset[str]] = frozenset(
        {
            "kv_starts", "key_scale", "value_scale", "alibi_slopes", "softmax_aux", "left", "right", "logits_soft_cap",
            "q_length", "latent_dim",
        }
    )  # fmt: skip

    def forward_reasons(self, inputs: PagedInputs, device: Device) -> list[str]:
        why = device_reasons(device)
        if inputs.dtype.name not in ("bfloat16", "float32"):
            why.append(f"queries must be bfloat16 or float32, not {inputs.dtype}")
        if max(inputs.head_dim, inputs.value_dim) > MAX_DIM:
            why.append(f"takes head dims up to {MAX_DIM}, got head_dim={inputs.head_dim}, value_dim={inputs.value_dim}")
        scales = (inputs.key_scale, inputs.value_scale)
        if any(scale is not None and scale.shape[:2] != (1, 1) for scale in scales):
            why.append("takes scales of whole arrays or of heads, not of pages or tokens")
        return why + cache_reasons(inputs)

    def deprioritized(self, inputs: PagedInputs, device: Device, direction: Direction) -> bool:
        return is_copied(inputs)

    def candidates(self, inputs: PagedInputs, device: Device, direction: Direction) -> Iterable[TpuPagedParams]:
        # Twice the bytes, and six passes of the MXU: half the tiles.
        wide = inputs.dtype.itemsize // 2
        best = TpuPagedParams(4096 // wide, 4096 // wide, 512 // wide)
        listed = [best, *(dataclasses.replace(best, block_rows=rows // wide) for rows in (2048, 8192))]
        if inputs.longest_q > 1:
            listed.append(dataclasses.replace(best, tile_rows=2048 // wide))
            listed += [dataclasses.replace(best, block_k=tokens // wide) for tokens in (256, 1024)]
        return listed

    def forward(self, inputs: PagedInputs, params: TpuPagedParams) -> Results:
        """``(out, lse)``; lse is float32."""
        if inputs.is_empty:
            return empty_forward(inputs)
        return run_with_sequential_vmap(lambda inputs: _run(inputs, params), inputs)


def _run(inputs: PagedInputs, params: TpuPagedParams) -> Results:
    if inputs.q_length is not None and inputs.q_length * inputs.heads <= MAX_ROWS:
        return _decode(inputs, params, inputs.q_length, jnp.ones(inputs.sequences, bool))
    tokens, sequences = inputs.tokens, inputs.sequences
    cum = inputs.cum_q_lens
    if cum is None:
        cum = jnp.arange(sequences + 1, dtype=jnp.int32) * (inputs.q_length or 0)
    cum = boundaries(cum, tokens)
    at = packed_tokens(cum, tokens, sequences, None)
    singles = inputs.q_length is None and inputs.heads <= MAX_ROWS
    out, lse = _chunks(inputs, params, cum, 1 if singles else 0)
    if singles:
        # Sequences with one token, which a tile would give all of its rows.
        queries = inputs.query[jnp.minimum(cum[:-1], tokens - 1)]
        few_out, few_lse = _decode(inputs.replace(query=queries), params, 1, jnp.diff(cum) == 1)
        single = at.new == 1
        out = jnp.where(single[:, None, None], few_out[at.sequence], out)
        lse = jnp.where(single[:, None], few_lse[at.sequence], lse)
    nothing, nothing_lse = empty_forward(inputs)
    return jnp.where(at.owned[:, None, None], out, nothing), jnp.where(at.owned[:, None], lse, nothing_lse)


def _decode(inputs: PagedInputs, params: TpuPagedParams, count: int, wanted: jax.Array) -> Results:
    """The results of ``count`` query tokens of each sequence; those of sequences that are not wanted are undefined."""
    sequences, heads = inputs.sequences, inputs.heads
    rows, cores = count * heads, max(current_device().cores, 1)
    steps = -(-sequences // cores) * cores
    tile = tile_rows(inputs.dtype.itemsize)
    padded = -(-rows // tile) * tile
    call = decode.DecodeCall(
        blocks=Blocks.of(inputs, params.block_rows, steps),
        rows=padded,
        **PagedCall.facts(inputs) | ({} if count > 1 else {"left": None, "right": None}),
        cores=cores,
    )
    table = table_of(inputs)
    step = jnp.arange(steps, dtype=jnp.int32)
    sequence = jnp.minimum(step, sequences - 1)
    tokens = jnp.where((step < sequences) & wanted[sequence], count, 0)
    work = work_of(inputs, table, sequence, bounded(inputs.kv_lengths)[sequence] - count, tokens, cores)
    query = inputs.query.reshape(sequences, rows, inputs.head_dim)
    query = jnp.pad(query, ((0, steps - sequences), (0, padded - rows), (0, 0)))
    numbers = jnp.tile(_numbers(inputs), (count, 1)).at[:, decode.TOKEN].set(jnp.repeat(jnp.arange(count) * 1.0, heads))
    nothing = jnp.zeros(LANES, jnp.float32).at[decode.SINK_MAX].set(-jnp.inf).at[decode.HEAD].set(-2.0)
    numbers = jnp.concatenate([numbers, jnp.broadcast_to(nothing, (padded - rows, LANES))])
    out, lse = decode.decode(call, query, numbers, table, work, *_pages(inputs))
    out, lse = out[:sequences, :rows], lse[:sequences, :rows]
    return out.reshape(-1, heads, inputs.value_dim), lse.reshape(-1, heads)


def _chunks(inputs: PagedInputs, params: TpuPagedParams, cum: jax.Array, longer: int) -> Results:
    """The results of sequences with more than ``longer`` query tokens; those of others are undefined."""
    groups, kv_heads = inputs.groups, inputs.kv_heads
    # Rows of a key head are whole vectors of lanes.
    least = LANES // math.gcd(groups, LANES)
    tokens = max(params.tile_rows // (inputs.heads * least), 1) * least
    table = table_of(inputs)
    work, tiles = chunk.tile_work(inputs, table, cum, tokens, longer)
    fields = (*work._fields, *tiles._fields)
    call = chunk.ChunkCall(
        blocks=Blocks.of(
            inputs, min(params.block_k * kv_heads, params.block_rows), work.low.shape[0], fields, by_head=True
        ),
        rows=tokens * groups,
        groups=groups,
        **PagedCall.facts(inputs),
    )
    query = jnp.pad(inputs.query, ((0, -inputs.tokens % tokens), (0, 0), (0, 0)))
    # By key head: [tokens, kv_heads, groups, head_dim] to [kv_heads, tokens · groups, head_dim].
    query = jnp.swapaxes(query.reshape(-1, kv_heads, groups, inputs.head_dim), 0, 1)
    query = query.reshape(kv_heads, -1, inputs.head_dim)
    numbers = jnp.tile(_numbers(inputs).reshape(kv_heads, groups, LANES), (1, tokens, 1))
    found = chunk.attend_chunks(call, query, numbers, table, work, tiles, *_pages(inputs))

    def by_token(x: jax.Array) -> Any:
        x = jnp.swapaxes(x.reshape(kv_heads, -1, groups, *x.shape[2:]), 0, 1)
        return x[: inputs.tokens].reshape(inputs.tokens, inputs.heads, *x.shape[3:])

    out, lse = found
    return by_token(out), by_token(lse)


def _pages(inputs: PagedInputs) -> list[Any]:
    return [paged_view(inputs, each) for each in (inputs.key, inputs.value) if each is not None]


def _numbers(inputs: PagedInputs) -> Any:
    """The numbers that the kernels have of each head, ``[heads, LANES]``: see `decode.decode`."""
    heads = inputs.heads
    sink_max, sink_total = sinks_of(inputs)

    def of_heads(scale: jax.Array | None) -> Any:
        if scale is None:
            return jnp.ones(heads, jnp.float32)
        return jnp.repeat(jnp.broadcast_to(scale[0, 0], (inputs.kv_heads,)), inputs.groups)

    columns = [
        of_heads(inputs.key_scale),
        jnp.zeros(heads, jnp.float32) if inputs.alibi_slopes is None else inputs.alibi_slopes,
        sink_max.reshape(-1),
        sink_total.reshape(-1),
        of_heads(inputs.key_scale if inputs.value is None else inputs.value_scale),
        jnp.arange(heads, dtype=jnp.int32) // inputs.groups,
    ]
    numbers = jnp.stack([column.astype(jnp.float32) for column in columns], axis=1)
    return jnp.pad(numbers, ((0, 0), (0, LANES - len(columns))))
