"""Multi-head latent attention on Hopper in Pallas Mosaic GPU: support, configs, and the call of the kernel."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tilewright.kernels.hopper.device import device_reasons, dtype_reasons, num_sms
from tilewright.kernels.hopper.limits import SWIZZLE_ROWS, WARPGROUP_THREADS
from tilewright.kernels.hopper.tiles import ROWS
from tilewright.kernels.numerics.softmax import sinks_lse
from tilewright.kernels.op.backend import InferenceBackend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.op.footprint import Footprint
from tilewright.kernels.paged_attention.hopper.latent import WARPGROUPS, latent_kernel
from tilewright.kernels.paged_attention.hopper.latent_work import BLOCK_K, LATENT_DIM, VALUE_DIM, LatentCall, LatentPlan
from tilewright.kernels.paged_attention.inputs import PagedInputs
from tilewright.kernels.paged_attention.results import Results, empty_forward, run_with_sequential_vmap
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.stable_ids import stable_id

ITEM_OVERHEAD = 4
"""Cost of a CTA besides its steps, in steps: its first loads, which overlap with nothing, and its output."""

COMBINE_OVERHEAD = 6
"""Cost of the launch that combines splits, in steps."""

MIN_TILES = 2
"""Steps that a split should have at least, because its partial results are written and read again."""

MAX_SPLITS = 64


@stable_id(
    "tilewright/paged_attention.HopperLatentParams",
    formerly=("tilewright.kernels.paged_attention.pallas_gpu:HopperLatentParams",),
)
@dataclasses.dataclass(frozen=True, slots=True)
class HopperLatentParams:
    """Config of the kernel.

    Attributes:
      num_key_splits: CTAs that share the keys of 64 query rows; their partial results are combined afterwards.
      prefetched: steps ahead of its load that a latent is prefetched to the L2 cache, 0 for no prefetch.
    """

    num_key_splits: int = 1
    prefetched: int = 2

    def __post_init__(self) -> None:
        if type(self.prefetched) is not int or not 0 <= self.prefetched <= 16:
            raise ValueError(f"0 to 16 tiles are prefetched, got {self.prefetched=}")
        if type(self.num_key_splits) is not int or not 1 <= self.num_key_splits <= MAX_SPLITS:
            raise ValueError(f"there are 1 to {MAX_SPLITS} splits, got {self.num_key_splits=}")


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
        return why

    def candidates(self, inputs: PagedInputs, device: Device, direction: Direction) -> list[HopperLatentParams]:
        """Best first by the cost for sequences that fill their page tables; lengths are not read."""
        tiles = -(-inputs.capacity // BLOCK_K)
        items = inputs.sequences * -(-inputs.longest_q * inputs.heads // ROWS)
        cores = num_sms(device)

        def cost(splits: int) -> int:
            rounds = -(-items * splits // cores)
            return rounds * (-(-tiles // splits) + ITEM_OVERHEAD) + (splits > 1) * COMBINE_OVERHEAD

        most = max(min(tiles // MIN_TILES, MAX_SPLITS), 1)
        numbers = sorted(range(1, most + 1), key=lambda splits: (cost(splits), splits))
        others = (2 * numbers[0], max(numbers[0] // 2, 1), 1)
        chosen = [*numbers[:3], *(number for number in others if number <= most)]
        first, *rest = dict.fromkeys(chosen)
        # Few query rows leave the tensor cores idle: only memory traffic counts, and a prefetch reads latents twice.
        prefetched = (0, 2) if inputs.longest_q * inputs.heads < ROWS else (2, 0)
        made = [HopperLatentParams(first, each) for each in (*prefetched, 4)]
        return [*made, *(HopperLatentParams(number, prefetched[0]) for number in rest)]

    def footprints(
        self, inputs: PagedInputs, device: Device, direction: Direction, params: HopperLatentParams
    ) -> list[Footprint]:
        items = inputs.sequences * -(-inputs.longest_q * inputs.heads // ROWS)
        blocks = items * params.num_key_splits
        return [Footprint(blocks, WARPGROUP_THREADS * WARPGROUPS, LatentPlan(inputs.dtype).shared_bytes)]

    def forward(self, inputs: PagedInputs, params: HopperLatentParams) -> Results:
        """``(out, lse)``; lse is float32."""
        if inputs.is_empty:
            return empty_forward(inputs)
        return run_with_sequential_vmap(lambda inputs: _run(inputs, params), inputs)


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
        splits=params.num_key_splits,
        prefetched=params.prefetched,
        partial=params.num_key_splits > 1 or inputs.softmax_aux is not None,
    )
    query = inputs.query.reshape(inputs.sequences, call.rows, LATENT_DIM)
    if call.rows % SWIZZLE_ROWS:
        query = jnp.pad(query, ((0, 0), (0, -call.rows % SWIZZLE_ROWS), (0, 0)))
    pages = inputs.key.reshape(call.num_pages, call.page_size, LATENT_DIM)
    out, lse = latent_kernel(query, pages, inputs.page_table.reshape(-1), inputs.kv_lengths, call=call)
    out, lse = out[..., : call.rows, :], lse[..., : call.rows]
    if call.partial:
        sinks = sinks_lse(inputs.softmax_aux)
        if sinks is not None:
            sinks = jnp.tile(sinks, call.q_length)
        out, lse = _combined(out, lse, sinks, query.dtype)
    return out.reshape(tokens, heads, VALUE_DIM), lse.reshape(tokens, heads)


def _combined(out: jax.Array, lse: jax.Array, sinks: jax.Array, dtype: DTypeLike) -> tuple[Any, Any]:
    """The results of all splits, the first axis, from the partial ones.

    Args:
      sinks: of each row, or None: one more key, without a value.
    """
    max_lse = lse.max(axis=0)
    if sinks is not None:
        max_lse = jnp.maximum(max_lse, sinks)
    shift = jnp.where(jnp.isneginf(max_lse), 0.0, max_lse)
    scale = jnp.exp(lse - shift)
    total = scale.sum(axis=0)
    if sinks is not None:
        total = total + jnp.exp(sinks - shift)
    scale = scale / jnp.where(total == 0.0, 1.0, total)
    combined = (out * scale[..., None]).sum(axis=0).astype(dtype)
    return combined, jnp.where(total == 0.0, -jnp.inf, shift + jnp.log(total))
