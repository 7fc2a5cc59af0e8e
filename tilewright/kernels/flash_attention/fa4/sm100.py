"""FlashAttention-4's kernels for data-center Blackwell, compute capabilities 10.x and 11.0."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from tilewright.kernels.flash_attention.fa4.architecture import (
    Accumulator,
    Architecture,
    Kernels,
    Params,
    Settings,
    forward_arguments,
    postprocess_arguments,
    score_mod,
    score_mod_bwd,
    shared_arguments,
    unavailable,
)
from tilewright.kernels.flash_attention.fa4.params import Fa4BackwardParams, Fa4ForwardParams, Fa4Mask
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.ops.types import Direction

TILE = 128
"""Rows of a tile, and its keys: the M of tcgen05.mma of one CTA."""

WIDEST = 256
"""Maximum head dim. Between 128 and this the kernels are for 192 with values of 128, and for 256."""

_WHERE = "on data-center Blackwell"
_OF_HOPPER = ("num_stages", "overlap", "weights_in_registers")
_OF_HOPPER_BACKWARD = (
    "query_stages", "d_out_stages", "score_stages", "swap_scores", "swap_d_key", "swap_d_query", "score_groups_q",
    "d_key_groups_k", "d_query_groups_q", "groups", "one_d_query_group",
)  # fmt: skip


class Sm100(Architecture):
    """Every mask of ``Fa4Mask`` and soft caps; at head dims beyond 192 the backward pass has less.

    Its heads of 256 elements have a backward pass of two kernels, one for dQ and one for dK and dV, which take neither
    windows nor a soft cap nor a gradient to the log-sum-exp.
    """

    name: ClassVar[str] = "sm100"
    classes: ClassVar[Mapping[str, tuple[str, str]]] = {
        "forward": ("flash_fwd_sm100", "FlashAttentionForwardSm100"),
        "backward": ("flash_bwd_sm100", "FlashAttentionBackwardSm100"),
        "backward of 256": ("sm100_hd256_2cta_fmha_backward", "BlackwellFusedMultiHeadAttentionBackward"),
    }

    def computed_dims(self, inputs: AttentionInputs, direction: Direction) -> tuple[int, int]:
        """Multiples of 32, as the package's tests have them; above 128 what its kernels have."""
        widest = max(inputs.head_dim, inputs.value_dim)
        if widest <= 128:
            return (-(-widest // 32) * 32,) * 2
        return (192, 128) if inputs.head_dim <= 192 and inputs.value_dim <= 128 else (256, 256)

    def reasons(self, inputs: AttentionInputs, mask: Fa4Mask, direction: Direction) -> list[str]:
        dims = f"head_dim={inputs.head_dim}, value_dim={inputs.value_dim}"
        if max(inputs.head_dim, inputs.value_dim) > WIDEST:
            return [f"a head has up to {WIDEST} elements, got {dims}"]
        if direction == "forward" or self.computed_dims(inputs, direction)[0] != 256:
            return []
        reasons, where = [], f"in the backward pass of heads of 256 elements, as which it computes {dims}"
        if inputs.logits_soft_cap is not None:
            reasons.append(f"has no soft cap {where}")
        if inputs.return_lse:
            reasons.append(f"has no gradient to the log-sum-exp {where}")
        if mask.left is not None or mask.right not in (None, 0):
            reasons.append(f"has no window {where}, got {mask.parts.band}")
        return reasons

    def forward_defaults(self, inputs: AttentionInputs, mask: Fa4Mask) -> Fa4ForwardParams:
        head_dim, value_dim = self.computed_dims(inputs, "forward")
        # At 256 elements pairs of CTAs are worth more than packed heads, which they need to divide the tile.
        packs = inputs.groups > 1 and (head_dim != 256 or TILE % inputs.groups == 0)
        rows = inputs.q_length * (inputs.groups if packs else 1)
        # Two tiles of 256 columns of O beside those of S are more than the tensor memory.
        block_q = 2 * TILE if rows > TILE and value_dim != 256 else TILE
        params = Fa4ForwardParams(block_q, TILE, pack_groups=packs)
        return dataclasses.replace(params, two_ctas=not self._pair_reasons(inputs, mask, params))

    def backward_defaults(self, inputs: AttentionInputs, mask: Fa4Mask) -> Fa4BackwardParams:
        head_dim, _ = self.computed_dims(inputs, "backward")
        return Fa4BackwardParams(TILE, TILE, two_ctas=head_dim >= 128)

    def params_reasons(self, inputs: AttentionInputs, mask: Fa4Mask, params: Params) -> list[str]:
        if isinstance(params, Fa4ForwardParams):
            return self._forward_reasons(inputs, mask, params)
        reasons = unavailable(params, _OF_HOPPER_BACKWARD, _WHERE)
        if (params.block_q, params.block_k) != (TILE, TILE):
            reasons.append(f"tiles are {TILE} queries and keys, got {params.block_q=}, {params.block_k=}")
        head_dim, _ = self.computed_dims(inputs, "backward")
        if head_dim < 128 if params.two_ctas else head_dim > 128:
            reasons.append(f"pairs of CTAs are for head dims from 128, and beyond it necessary, got {params.two_ctas=}")
        return reasons

    def _forward_reasons(self, inputs: AttentionInputs, mask: Fa4Mask, params: Fa4ForwardParams) -> list[str]:
        reasons = unavailable(params, _OF_HOPPER, _WHERE)
        _, value_dim = self.computed_dims(inputs, "forward")
        if params.block_q not in (TILE, 2 * TILE) or params.block_k != TILE:
            reasons.append(f"tiles are {TILE} or {2 * TILE} queries, and {TILE} keys, got {params=}")
        if params.block_q == 2 * TILE and value_dim == 256:
            reasons.append(f"O of {2 * TILE} queries and 256 columns is more than the tensor memory, got {params=}")
        return reasons + (self._pair_reasons(inputs, mask, params) if params.two_ctas else [])

    def _pair_reasons(self, inputs: AttentionInputs, mask: Fa4Mask, params: Fa4ForwardParams) -> list[str]:
        """Reasons why pairs of CTAs cannot compute a forward pass."""
        reasons, (head_dim, _) = [], self.computed_dims(inputs, "forward")
        if head_dim not in (128, 192, 256) or (mask.is_band and head_dim != 256):
            reasons.append(
                "pairs of CTAs are for head dims of 128 and 192 without causality or a window, and for 256, got "
                f"{head_dim=}"
            )
        if any(part.q_lengths is not None for part in mask.parts.lengths):
            reasons.append("pairs of CTAs have no lengths of queries")
        groups = inputs.groups if params.pack_groups else 1
        if TILE % groups:
            reasons.append(f"pairs of CTAs want packed query heads to divide {TILE}, got {inputs.groups=}")
        if inputs.q_length * groups <= (params.block_q or 0):
            reasons.append(f"a pair of CTAs has two tiles of queries, got {inputs.q_length=}, {params.block_q=}")
        return reasons

    def candidates(self, inputs: AttentionInputs, mask: Fa4Mask, direction: Direction) -> Iterator[Params]:
        if direction == "backward":
            backward = self.backward_defaults(inputs, mask)
            yield backward
            yield dataclasses.replace(backward, two_ctas=not backward.two_ctas)
            return
        first = self.forward_defaults(inputs, mask)
        yield first
        for block_q in (2 * TILE, TILE):
            for packs in (True, False) if inputs.groups > 1 else (False,):
                yield dataclasses.replace(first, block_q=block_q, pack_groups=packs, two_ctas=False)
        yield dataclasses.replace(first, two_ctas=True)

    def forward_kernel(self, kernels: Kernels, settings: Settings) -> Callable[..., None]:
        params, scores = settings.params, settings.scores
        one_tile_a_cta = params.block_q == TILE
        same = settings.head_dim == settings.value_dim and settings.head_dim in (64, 128, 256)
        dense = not scores.causal and not scores.local and not settings.q_lengths
        # A scheduler of causal tiles, longest first, has pairs of CTAs only where programs are not persistent.
        single = settings.one_tile and not (params.two_ctas and (scores.causal or scores.local))
        kernel: Callable[..., None] = kernels.classes["forward"](
            m_block_size=TILE,
            n_block_size=params.block_k,
            q_stage=params.block_q // TILE,
            is_static_persistent=dense or single,
            is_varlen_q=settings.q_lengths,
            use_2cta_instrs=params.two_ctas,
            # S of the next keys in the place of the other tile's.
            use_s_ping_pong=one_tile_a_cta and same and scores.soft_cap is None,
            **forward_arguments(kernels, settings),
        )
        return kernel

    def backward_kernel(self, kernels: Kernels, settings: Settings) -> Callable[..., None]:
        params, scores = settings.params, settings.scores
        options = shared_arguments(settings) | {
            "cluster_size": 2 if params.two_ctas else 1, "use_2cta_instrs": bool(params.two_ctas),
        }  # fmt: skip
        if not self.accumulates(settings):
            kernel_of_256: Callable[..., None] = kernels.classes["backward of 256"](**options)

            def renamed(*operands: Any, mSeqUsedQ: Any, mSeqUsedK: Any, **others: Any) -> None:
                kernel_of_256(*operands, None, None, seqused_q=mSeqUsedQ, seqused_k=mSeqUsedK, **others)

            return renamed
        kernel: Callable[..., None] = kernels.classes["backward"](
            tile_m=params.block_q,
            tile_n=params.block_k,
            score_mod=score_mod(kernels, scores),
            score_mod_bwd=score_mod_bwd(kernels, scores),
            **options,
        )
        return kernel

    def postprocess_kernel(self, kernels: Kernels, settings: Settings, of: Accumulator) -> Callable[..., None]:
        params, of_query = settings.params, of == "query"
        # The order in which the backward kernel leaves the elements of a tile, which the package defines.
        order_of_query, order_of_key = kernels.classes["backward"].accum_tile_orders(  # type: ignore[attr-defined]
            params.two_ctas, params.block_k
        )
        kernel: Callable[..., None] = kernels.classes["postprocess"](
            arch=100,
            num_threads=128,
            AtomLayoutMdQ=1,
            dQ_swapAB=False,
            use_2cta_instrs=params.two_ctas and of_query,
            cluster_size=2 if params.two_ctas and not of_query else 1,
            hdim_multiple_of=self.dim_multiple(params),
            accum_order=order_of_query if of_query else order_of_key,
            **postprocess_arguments(kernels, settings, of),
        )
        return kernel

    def dim_multiple(self, params: Fa4BackwardParams) -> int:
        return 32

    def accumulates(self, settings: Settings) -> bool:
        return settings.head_dim != 256
