"""FlashAttention-4's kernels for Hopper, compute capability 9.0."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from tilewright.kernels.flash_attention.fa4.architecture import (
    Accumulator,
    Architecture,
    Kernels,
    Params,
    Settings,
    dtype_of,
    forward_arguments,
    postprocess_arguments,
    score_mod,
    score_mod_bwd,
    shared_arguments,
    unavailable,
)
from tilewright.kernels.flash_attention.fa4.params import Fa4BackwardParams, Fa4ForwardParams, Fa4Mask
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.hopper.limits import SHARED_BYTES
from tilewright.ops.types import Direction

WIDEST = 256
"""Maximum head dim."""

REGISTERS = {1: 256, 2: 240, 3: 160}
"""Registers of a thread, by the number of consumer warpgroups."""


class Sm90(Architecture):
    """Every mask of ``Fa4Mask``, soft caps and head dims up to 256, in both directions."""

    name: ClassVar[str] = "sm90"
    classes: ClassVar[Mapping[str, tuple[str, str]]] = {
        "forward": ("flash_fwd_sm90", "FlashAttentionForwardSm90"),
        "backward": ("flash_bwd_sm90", "FlashAttentionBackwardSm90"),
    }

    def computed_dims(self, inputs: AttentionInputs, direction: Direction) -> tuple[int, int]:
        """Accumulators of gradients have tiles of 32 columns, above 128 of 64.

        For other head dims the kernels' own rounding is inconsistent.
        """
        widest = max(inputs.head_dim, inputs.value_dim)
        multiple = 8 if direction == "forward" else 32 if widest <= 128 else 64
        head_dim, value_dim = (-(-dim // multiple) * multiple for dim in (inputs.head_dim, inputs.value_dim))
        if 128 < head_dim <= 192 and value_dim <= 128 and (direction == "forward" or inputs.groups == 1):
            return head_dim, 128  # the only pair of different head dims with tiles
        return (max(head_dim, value_dim),) * 2

    def reasons(self, inputs: AttentionInputs, mask: Fa4Mask, direction: Direction) -> list[str]:
        if max(inputs.head_dim, inputs.value_dim) <= WIDEST:
            return []
        dims = f"head_dim={inputs.head_dim}, value_dim={inputs.value_dim}"
        return [f"a head has up to {WIDEST} elements, got {dims}"]

    def forward_defaults(self, inputs: AttentionInputs, mask: Fa4Mask) -> Fa4ForwardParams:
        head_dim, value_dim = self.computed_dims(inputs, "forward")
        local = mask.left is not None or mask.right not in (None, 0)
        block_q, registers = 128, True
        if head_dim <= 64:
            block_q, block_k = 192, 128
        elif head_dim <= 96:
            block_q, block_k, registers = 192, 128 if mask.is_band else 144, False
        elif head_dim <= 128:
            block_k = 128
        elif head_dim <= 192:
            block_k = 96 if local else 128 if value_dim <= 128 else 112
        else:
            block_k = 64 if local else 80
        return Fa4ForwardParams(block_q, block_k, 2, True, registers, inputs.groups > 1)

    def backward_defaults(self, inputs: AttentionInputs, mask: Fa4Mask) -> Fa4BackwardParams:
        head_dim, value_dim = self.computed_dims(inputs, "backward")
        narrow = Fa4BackwardParams(64, 128, 2, 2, 2, True, False, False, 1, 2, 1, 2, False)
        wide = Fa4BackwardParams(64, 96, 2, 1, 1, False, True, False, 1, 2, 1, 2, False)
        if head_dim <= 64:
            return dataclasses.replace(narrow, block_q=128, d_query_groups_q=2)
        if head_dim <= 96:
            return dataclasses.replace(narrow, one_d_query_group=True)
        if head_dim <= 128:
            return narrow if mask.is_band else dataclasses.replace(narrow, block_q=80, swap_d_query=True)
        if head_dim <= 192:
            return dataclasses.replace(wide, d_out_stages=2) if value_dim <= 128 else wide
        return dataclasses.replace(wide, block_k=48, d_key_groups_k=1)

    def params_reasons(self, inputs: AttentionInputs, mask: Fa4Mask, params: Params) -> list[str]:
        if reasons := unavailable(params, ("two_ctas",), "on Hopper"):
            return reasons
        if isinstance(params, Fa4ForwardParams):
            return forward_params_reasons(params, *self.computed_dims(inputs, "forward"))
        return backward_params_reasons(params, *self.computed_dims(inputs, "backward"), inputs.groups > 1)

    def candidates(self, inputs: AttentionInputs, mask: Fa4Mask, direction: Direction) -> Iterator[Params]:
        forward = direction == "forward"
        yield from self._forward_candidates(inputs, mask) if forward else self._backward_candidates(inputs, mask)

    def _forward_candidates(self, inputs: AttentionInputs, mask: Fa4Mask) -> Iterator[Fa4ForwardParams]:
        first = self.forward_defaults(inputs, mask)
        yield first
        if inputs.groups > 1:
            yield dataclasses.replace(first, pack_groups=False)
        rows = inputs.q_length * (inputs.groups if inputs.groups > 1 else 1)
        # Compiling each takes seconds, so only sizes near the package's own.
        own_block_k = first.block_k or 128
        near = sorted((128, 176, 144, 112, 96, 80, 64), key=lambda block_k: abs(block_k - own_block_k))[:3]
        for block_q in (192, 128, 64) if rows <= 64 else (192, 128):
            for block_k in near:
                yield dataclasses.replace(first, block_q=block_q, block_k=block_k)
        yield dataclasses.replace(first, overlap=False)

    def _backward_candidates(self, inputs: AttentionInputs, mask: Fa4Mask) -> Iterator[Fa4BackwardParams]:
        first = self.backward_defaults(inputs, mask)
        yield first
        head_dim, _ = self.computed_dims(inputs, "backward")
        if head_dim <= 64:
            yield dataclasses.replace(first, block_q=64, d_query_groups_q=1)
            yield dataclasses.replace(first, block_q=64, d_query_groups_q=1, one_d_query_group=True)
        elif head_dim <= 128:
            for one_group in (False, True):
                yield dataclasses.replace(first, block_q=64, swap_d_query=False, one_d_query_group=one_group)
            yield dataclasses.replace(first, block_q=80, swap_d_query=True, one_d_query_group=False)

    def forward_kernel(self, kernels: Kernels, settings: Settings) -> Callable[..., None]:
        params = settings.params
        kernel: Callable[..., None] = kernels.classes["forward"](
            dtype=dtype_of(kernels, settings),
            tile_m=params.block_q,
            tile_n=params.block_k,
            num_stages=params.num_stages,
            intra_wg_overlap=params.overlap,
            mma_pv_is_rs=params.weights_in_registers,
            **forward_arguments(kernels, settings),
        )
        return kernel

    def backward_kernel(self, kernels: Kernels, settings: Settings) -> Callable[..., None]:
        params, scores = settings.params, settings.scores
        kernel: Callable[..., None] = kernels.classes["backward"](
            dtype=dtype_of(kernels, settings),
            tile_m=params.block_q,
            tile_n=params.block_k,
            Q_stage=params.query_stages,
            dO_stage=params.d_out_stages,
            PdS_stage=params.score_stages,
            SdP_swapAB=params.swap_scores,
            dKV_swapAB=params.swap_d_key,
            dQ_swapAB=params.swap_d_query,
            AtomLayoutMSdP=params.score_groups_q,
            AtomLayoutNdKV=params.d_key_groups_k,
            AtomLayoutMdQ=params.d_query_groups_q,
            num_threads=128 * (params.groups + 1),
            score_mod=score_mod(kernels, scores),
            score_mod_bwd=score_mod_bwd(kernels, scores),
            dQ_single_wg=params.one_d_query_group,
            **shared_arguments(settings),
        )
        return kernel

    def postprocess_kernel(self, kernels: Kernels, settings: Settings, of: Accumulator) -> Callable[..., None]:
        params, of_query = settings.params, of == "query"
        kernel: Callable[..., None] = kernels.classes["postprocess"](
            arch=90,
            num_threads=128 * (1 if of_query and params.one_d_query_group else params.groups),
            AtomLayoutMdQ=params.d_query_groups_q if of_query else params.d_key_groups_k,
            dQ_swapAB=params.swap_d_query if of_query else params.swap_d_key,
            hdim_multiple_of=self.dim_multiple(params),
            **postprocess_arguments(kernels, settings, of),
        )
        return kernel

    def dim_multiple(self, params: Fa4BackwardParams) -> int:
        return 64 if params.swap_d_key else 32

    def accumulates(self, settings: Settings) -> bool:
        return True


def forward_shared_bytes(params: Any, head_dim: int, value_dim: int) -> int:
    """Bytes of a block's tiles in shared memory."""
    head_dim, value_dim = (-(-dim // 16) * 16 for dim in (head_dim, value_dim))
    p_elements = 0 if params.weights_in_registers else params.block_q * params.block_k
    # The output overwrites the queries.
    queries = params.block_q * max(head_dim, value_dim)
    return 2 * (queries + params.num_stages * params.block_k * (head_dim + value_dim) + p_elements)


def forward_params_reasons(params: Any, head_dim: int, value_dim: int) -> list[str]:
    """Reasons why complete params cannot serve these head dims."""
    reasons = []
    if params.block_q not in (64, 128, 192):
        reasons.append(f"tiles have 64, 128 or 192 queries, got {params.block_q=}")
    if params.block_k % 16 or params.block_k > 256:
        reasons.append(f"keys per tile are a multiple of 16 up to 256, got {params.block_k=}")
    needed = forward_shared_bytes(params, head_dim, value_dim) + 1024
    if needed > SHARED_BYTES:
        reasons.append(f"tiles need {needed} bytes of shared memory of {SHARED_BYTES}, got {params=}")
    if reasons:
        return reasons
    p_bytes = 4 if params.weights_in_registers else 0
    # A warpgroup has 64 rows for 128 threads: half an element of each column a thread. S and O take 4 bytes an element,
    # P another 2 where it stays in registers.
    registers = (params.block_k * (8 + p_bytes) // 8 + value_dim) // 2
    limit = REGISTERS[params.block_q // 64] - 32
    if registers > limit:
        reasons.append(f"a thread's tiles need {registers} registers of {limit}, got {params=}")
    return reasons


def backward_params_reasons(params: Any, head_dim: int, value_dim: int, grouped: bool) -> list[str]:
    """Reasons why complete params cannot serve these head dims."""
    reasons, queries, groups = [], params.query_stages, params.groups
    if not {params.d_out_stages, params.score_stages} <= {1, queries}:
        reasons.append(f"stages are 1 or as many as of queries, got {params=}")
    if groups not in ((2,) if grouped else (2, 3)):
        reasons.append(f"2 warpgroups compute, or 3 where each query head has a key of its own, got {params.groups=}")
    if params.one_d_query_group and groups != 2:
        reasons.append(f"one of two warpgroups may compute the gradient of queries, got {params.groups=}")
    of_query = 1 if params.one_d_query_group else groups
    if groups % params.score_groups_q or groups % params.d_key_groups_k or of_query % params.d_query_groups_q:
        reasons.append(f"warpgroups are divided evenly, got {params=}")
    if params.block_q % 16 or params.block_k % 16:
        reasons.append(f"tiles are multiples of 16, got {params.block_q=}, {params.block_k=}")
    if params.block_q * head_dim % 1024:
        reasons.append(f"sums are cleared 1024 at a time, got {params.block_q=}, {head_dim=}")
    # P in registers: only where Sᵀ has the layout of operand A of dV, with all warpgroups along the keys. Then dS alone
    # takes shared memory.
    in_registers = params.score_groups_q == 1 and params.d_key_groups_k == groups
    in_registers = in_registers and params.swap_scores and not params.swap_d_key
    halves = params.block_q * (queries * head_dim + params.d_out_stages * value_dim)
    halves += params.block_k * (head_dim + value_dim)
    halves += (1 if in_registers else 2) * params.score_stages * params.block_q * params.block_k
    per_row = -(-params.block_q // 64) * 64 * (queries + params.d_out_stages)
    # 16-bit tiles; and in float32 a tile of dQ, and lse and delta of every stage.
    needed = 2 * halves + 4 * (params.block_q * head_dim + per_row)
    if needed > SHARED_BYTES:
        reasons.append(f"tiles need {needed} bytes of shared memory of {SHARED_BYTES}, got {params=}")
    return reasons
