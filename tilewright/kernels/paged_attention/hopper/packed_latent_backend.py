"""Packed queries over latents on Hopper: tiles of tokens as sequences of their own, by the kernel for latents."""

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tilewright.kernels.hopper.tiles import ROWS
from tilewright.kernels.op.backend import InferenceBackend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.op.footprint import Footprint
from tilewright.kernels.paged_attention.hopper.latent_backend import HopperLatentParams, PallasGpuPagedAttention
from tilewright.kernels.paged_attention.inputs import PagedInputs
from tilewright.kernels.paged_attention.results import Results, empty_forward
from tilewright.kernels.paged_attention.token_layout import (
    boundaries,
    bounded,
    max_tiles,
    packed_tiles,
    packed_tokens,
)
from tilewright.ops.types import Device, Direction

LATENTS = PallasGpuPagedAttention()


class PallasGpuPackedLatents(InferenceBackend[PagedInputs, Results, HopperLatentParams]):
    """Serves packed queries where the kernel for latents serves as many sequences as there are tiles of tokens.

    The tokens of a tile are the last of a sequence that is cut behind them, whose table is a row of the caller's: no
    latent is copied. From 64 heads on a tile is one token, and neither queries nor results are moved.
    """

    name: ClassVar[str] = "hopper"
    platform: ClassVar[Platform] = Platform.PALLAS
    keeps_lowering: ClassVar[bool] = True
    forward_params: ClassVar[type] = HopperLatentParams
    serves: ClassVar[frozenset[str]] = LATENTS.serves

    def forward_reasons(self, inputs: PagedInputs, device: Device) -> list[str]:
        if inputs.cum_q_lens is None or inputs.page_table is None:
            return ["takes packed queries and a page table"]
        why = LATENTS.forward_reasons(_structs_of_tiles(inputs), device)
        if inputs.right not in (0, None):
            why.append(f"queries see keys up to their own position, or all, got right={inputs.right}")
        return why

    def candidates(self, inputs: PagedInputs, device: Device, direction: Direction) -> list[HopperLatentParams]:
        return list(LATENTS.candidates(_structs_of_tiles(inputs), device, direction))

    def config_reasons(
        self, inputs: PagedInputs, device: Device, direction: Direction, params: HopperLatentParams
    ) -> list[str]:
        return LATENTS.config_reasons(_structs_of_tiles(inputs), device, direction, params)

    def footprints(
        self, inputs: PagedInputs, device: Device, direction: Direction, params: HopperLatentParams
    ) -> list[Footprint]:
        return LATENTS.footprints(_structs_of_tiles(inputs), device, direction, params)

    def forward(self, inputs: PagedInputs, params: HopperLatentParams) -> Results:
        """``(out, lse)``; lse is float32."""
        if inputs.is_empty:
            return empty_forward(inputs)
        return _by_token(inputs, params) if _block_q(inputs) == 1 else _by_tile(inputs, params)


def _block_q(inputs: PagedInputs) -> int:
    """Tokens of a tile: as many as fill 64 rows, but no more than a sequence has on average."""
    mean = math.ceil(inputs.tokens / max(inputs.sequences, 1))
    return max(min(ROWS // inputs.heads, mean), 1)


def _structs_of_tiles(inputs: PagedInputs) -> PagedInputs:
    """The call of the kernel for latents, as shapes."""
    block_q = _block_q(inputs)
    tiles = inputs.tokens if block_q == 1 else max_tiles(inputs.tokens, inputs.sequences, block_q)
    return inputs.structs.replace(
        query=jax.ShapeDtypeStruct((tiles * block_q, *inputs.query.shape[1:]), inputs.query.dtype),
        page_table=jax.ShapeDtypeStruct((tiles, inputs.columns), jnp.int32),
        kv_lengths=jax.ShapeDtypeStruct((tiles,), jnp.int32),
        cum_q_lens=None,
        q_length=block_q,
    )


def _by_token(inputs: PagedInputs, params: HopperLatentParams) -> Results:
    at = packed_tokens(inputs.cum_q_lens, inputs.tokens, inputs.sequences, None)
    length = bounded(inputs.kv_lengths)[at.sequence]
    ends = length if inputs.right is None else length - at.new + at.offset + 1
    found = LATENTS.forward(_of_tiles(inputs, inputs.query, at.sequence, jnp.where(at.owned, ends, 0), 1), params)
    return _where_owned(at.owned, found, inputs)


def _by_tile(inputs: PagedInputs, params: HopperLatentParams) -> Results:
    tokens, block_q = inputs.tokens, _block_q(inputs)
    cum = boundaries(inputs.cum_q_lens, tokens)
    plan, starts = packed_tiles(cum, inputs.kv_lengths, tokens, block_q)
    ends = bounded(inputs.kv_lengths)[plan.sequence] if inputs.right is None else plan.position + plan.rows
    # The last rows of a tile: behind a sequence's tokens are latents that were never written.
    first = plan.token + plan.rows - block_q
    token = jnp.clip(first[:, None] + jnp.arange(block_q, dtype=jnp.int32), 0, tokens - 1)
    query = inputs.query[token.reshape(-1)]
    of_tiles = _of_tiles(inputs, query, plan.sequence, jnp.where(plan.rows > 0, ends, 0), block_q)
    at = packed_tokens(cum, tokens, inputs.sequences, None)
    tile = jnp.clip(starts[at.sequence] + at.offset // block_q, 0, plan.rows.shape[0] - 1)
    row = tile * block_q + block_q - plan.rows[tile] + at.offset % block_q
    found = (result[jnp.clip(row, 0, query.shape[0] - 1)] for result in LATENTS.forward(of_tiles, params))
    return _where_owned(at.owned, found, inputs)


def _of_tiles(inputs: PagedInputs, query: jax.Array, sequence: jax.Array, ends: jax.Array, block_q: int) -> PagedInputs:
    assert inputs.page_table is not None
    return inputs.replace(
        query=query, page_table=inputs.page_table[sequence], kv_lengths=ends, cum_q_lens=None, q_length=block_q
    )


def _where_owned(owned: jax.Array, found: Any, inputs: PagedInputs) -> Results:
    """The results of tokens, which are those of no keys where a token has no sequence."""
    (out, lse), (nothing, nothing_lse) = found, empty_forward(inputs)
    return jnp.where(owned[:, None, None], out, nothing), jnp.where(owned[:, None], lse, nothing_lse)
