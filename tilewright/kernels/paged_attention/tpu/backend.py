"""Attention over a cache on TPUs, in Pallas: support, configs, the calls of the kernels."""

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tilewright.kernels.op.backend import InferenceBackend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.paged_attention.inputs import PagedInputs
from tilewright.kernels.paged_attention.results import Results, empty_forward, run_with_sequential_vmap, sinks_of
from tilewright.kernels.paged_attention.token_layout import bounded
from tilewright.kernels.paged_attention.tpu import decode
from tilewright.kernels.paged_attention.tpu.pages import (
    Blocks,
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
"""Rows of query tokens × heads of a sequence up to which all heads are one matmul with all keys."""


@stable_id("tilewright/paged_attention.TpuPagedParams")
@dataclasses.dataclass(frozen=True, slots=True)
class TpuPagedParams:
    """Config of the kernels.

    Attributes:
      block_rows: keys of all key heads that are copied to VMEM together.
    """

    block_rows: int = 4096

    def __post_init__(self) -> None:
        if type(self.block_rows) is not int or self.block_rows < LANES or self.block_rows % LANES:
            raise ValueError(f"{self.block_rows=} must be a positive multiple of {LANES}")


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
        if inputs.q_length is None or inputs.q_length * inputs.heads > MAX_ROWS:
            why.append(
                f"takes up to {MAX_ROWS} query tokens × heads of each sequence, got q_length={inputs.q_length}, "
                f"heads={inputs.heads}"
            )
        scales = (inputs.key_scale, inputs.value_scale)
        if any(scale is not None and scale.shape[:2] != (1, 1) for scale in scales):
            why.append("takes scales of whole arrays or of heads, not of pages or tokens")
        return why + cache_reasons(inputs)

    def deprioritized(self, inputs: PagedInputs, device: Device, direction: Direction) -> bool:
        return is_copied(inputs)

    def candidates(self, inputs: PagedInputs, device: Device, direction: Direction) -> Iterable[TpuPagedParams]:
        return [TpuPagedParams(rows) for rows in (4096, 2048, 1024)]

    def forward(self, inputs: PagedInputs, params: TpuPagedParams) -> Results:
        """``(out, lse)``; lse is float32."""
        if inputs.is_empty:
            return empty_forward(inputs)
        return run_with_sequential_vmap(lambda inputs: _run(inputs, params), inputs)


def _run(inputs: PagedInputs, params: TpuPagedParams) -> Results:
    """The results of ``q_length`` query tokens of each sequence."""
    sequences, heads, count = inputs.sequences, inputs.heads, inputs.q_length or 1
    rows, cores = count * heads, max(current_device().cores, 1)
    steps = -(-sequences // cores) * cores
    padded = -(-rows // tile_rows(inputs.dtype.itemsize)) * tile_rows(inputs.dtype.itemsize)
    blocks = Blocks.of(inputs, params.block_rows, steps)
    several = count > 1
    call = decode.DecodeCall(
        blocks=blocks,
        rows=padded,
        head_dim=inputs.head_dim,
        value_dim=inputs.value_dim,
        latent=inputs.value is None,
        left=inputs.left if several else None,
        right=inputs.right if several else None,
        soft_cap=inputs.logits_soft_cap,
        slopes=inputs.alibi_slopes is not None,
        cores=cores,
    )
    table = table_of(inputs)
    step = jnp.arange(steps, dtype=jnp.int32)
    sequence = jnp.minimum(step, sequences - 1)
    tokens = jnp.where(step < sequences, count, 0)
    work = work_of(inputs, table, sequence, bounded(inputs.kv_lengths)[sequence] - count, tokens, cores)
    query = inputs.query.reshape(sequences, rows, inputs.head_dim)
    query = jnp.pad(query, ((0, steps - sequences), (0, padded - rows), (0, 0)))
    pages = [paged_view(inputs, each) for each in (inputs.key, inputs.value) if each is not None]
    out, lse = decode.decode(call, query, _numbers(inputs, count, padded), table, work, *pages)
    out, lse = out[:sequences, :rows], lse[:sequences, :rows]
    return out.reshape(*inputs.query.shape[:2], inputs.value_dim), lse.reshape(inputs.query.shape[:2])


def _numbers(inputs: PagedInputs, count: int, padded: int) -> Any:
    """The numbers of the rows of a step of `decode`: ``[padded, LANES]``."""
    heads, rows = inputs.heads, count * inputs.heads
    sink_max, sink_total = sinks_of(inputs)

    def of_heads(scale: jax.Array | None) -> Any:
        if scale is None:
            return jnp.ones(heads, jnp.float32)
        return jnp.repeat(jnp.broadcast_to(scale[0, 0], (inputs.kv_heads,)), inputs.groups)

    slopes = jnp.zeros(heads, jnp.float32) if inputs.alibi_slopes is None else inputs.alibi_slopes
    head = jnp.arange(heads, dtype=jnp.int32)
    by_head = [
        of_heads(inputs.key_scale) * jnp.float32(inputs.softmax_scale),
        slopes.astype(jnp.float32),
        sink_max.reshape(-1),
        sink_total.reshape(-1),
        of_heads(inputs.value_scale if inputs.value is not None else inputs.key_scale),
        (head // inputs.groups).astype(jnp.float32),
    ]
    columns = jnp.stack([*(jnp.tile(each, count) for each in by_head), jnp.repeat(jnp.arange(count) * 1.0, heads)], 1)
    nothing = jnp.asarray([0.0, 0.0, -jnp.inf, 0.0, 0.0, -2.0, 0.0], jnp.float32)
    columns = jnp.concatenate([columns, jnp.broadcast_to(nothing, (padded - rows, nothing.shape[0]))])
    return jnp.pad(columns.astype(jnp.float32), ((0, 0), (0, LANES - columns.shape[1])))
