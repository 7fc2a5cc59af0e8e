"""FlashAttention-4's kernels for other Blackwell GPUs, compute capabilities 12.x: Ampere's instructions in 99 KB."""

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
    shared_arguments,
    unavailable,
)
from tilewright.kernels.flash_attention.fa4.params import Fa4BackwardParams, Fa4ForwardParams, Fa4Mask
from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.ops.types import Direction
from tilewright.ops.utils.known_devices import SHARED_KB

SHARED_BYTES = SHARED_KB[120] << 10

WIDEST = 128
"""Maximum head dim: a thread's part of O of more, in tiles of 128 queries by 128 threads, is all of its registers."""

THREADS = 128

_WHERE = "on compute capability 12.x"
_OF_OTHERS = ("overlap", "weights_in_registers", "two_ctas")
_OF_HOPPER_BACKWARD = (
    "score_stages", "swap_scores", "swap_d_key", "swap_d_query", "score_groups_q", "d_key_groups_k",
    "d_query_groups_q", "groups", "one_d_query_group", "two_ctas",
)  # fmt: skip


class Sm120(Architecture):
    """Every mask of ``Fa4Mask`` and head dims up to 128; soft caps in the forward pass."""

    name: ClassVar[str] = "sm120"
    classes: ClassVar[Mapping[str, tuple[str, str]]] = {
        "forward": ("flash_fwd_sm120", "FlashAttentionForwardSm120"),
        "backward": ("flash_bwd_sm120", "FlashAttentionBackwardSm120"),
    }

    def computed_dims(self, inputs: AttentionInputs, direction: Direction) -> tuple[int, int]:
        """A multiple of 32, as accumulators of gradients have it."""
        return (-(-max(inputs.head_dim, inputs.value_dim) // 32) * 32,) * 2

    def reasons(self, inputs: AttentionInputs, mask: Fa4Mask, direction: Direction) -> list[str]:
        reasons = []
        if max(inputs.head_dim, inputs.value_dim) > WIDEST:
            dims = f"head_dim={inputs.head_dim}, value_dim={inputs.value_dim}"
            reasons.append(f"a head has up to {WIDEST} elements {_WHERE}, got {dims}")
        if direction == "backward" and inputs.logits_soft_cap is not None:
            reasons.append(f"has no soft cap in the backward pass {_WHERE}")
        return reasons

    def forward_defaults(self, inputs: AttentionInputs, mask: Fa4Mask) -> Fa4ForwardParams:
        head_dim, _ = self.computed_dims(inputs, "forward")
        return Fa4ForwardParams(128, 128 if head_dim <= 64 else 64, 1, pack_groups=inputs.groups > 1)

    def backward_defaults(self, inputs: AttentionInputs, mask: Fa4Mask) -> Fa4BackwardParams:
        head_dim, _ = self.computed_dims(inputs, "backward")
        stages = 2 if head_dim <= 64 else 1
        return Fa4BackwardParams(64, 64, query_stages=stages, d_out_stages=stages)

    def params_reasons(self, inputs: AttentionInputs, mask: Fa4Mask, params: Params) -> list[str]:
        if isinstance(params, Fa4ForwardParams):
            return self._forward_reasons(inputs, params)
        reasons = unavailable(params, _OF_HOPPER_BACKWARD, _WHERE)
        head_dim, _ = self.computed_dims(inputs, "backward")
        if (params.block_q, params.block_k) != (64, 64):
            reasons.append(f"tiles are 64 queries and keys, got {params.block_q=}, {params.block_k=}")
        if (params.query_stages, params.d_out_stages) not in ((1, 1), (2, 2)):
            reasons.append(f"Q and dO have 1 or 2 stages, got {params.query_stages=}, {params.d_out_stages=}")
        if not reasons:
            # Q, dO, K and V; P and dS; and lse and delta of every stage in float32.
            stages = (params.query_stages or 1) + (params.d_out_stages or 1)
            needed = 2 * 64 * (head_dim * (stages + 2) + 2 * 64) + 4 * 64 * stages
            reasons += _shared_reasons(needed, params)
        return reasons

    def _forward_reasons(self, inputs: AttentionInputs, params: Fa4ForwardParams) -> list[str]:
        reasons = unavailable(params, _OF_OTHERS, _WHERE)
        head_dim, value_dim = self.computed_dims(inputs, "forward")
        block_q, block_k, num_stages = params.block_q or 0, params.block_k or 0, params.num_stages or 0
        if block_q not in (64, 128) or block_k not in (32, 64, 128) or num_stages > 2:
            reasons.append(f"tiles are 64 or 128 queries, and 32, 64 or 128 keys in 1 or 2 stages, got {params=}")
        needed = 2 * (block_q * head_dim + num_stages * block_k * (head_dim + value_dim))
        return reasons or _shared_reasons(needed, params)

    def candidates(self, inputs: AttentionInputs, mask: Fa4Mask, direction: Direction) -> Iterator[Params]:
        if direction == "backward":
            backward = self.backward_defaults(inputs, mask)
            yield backward
            for stages in (1, 2):
                yield dataclasses.replace(backward, query_stages=stages, d_out_stages=stages)
            return
        first = self.forward_defaults(inputs, mask)
        yield first
        if inputs.groups > 1:
            yield dataclasses.replace(first, pack_groups=False)
        for block_q, block_k, num_stages in ((128, 64, 1), (128, 32, 2), (64, 64, 2), (64, 64, 1), (128, 64, 2)):
            yield dataclasses.replace(first, block_q=block_q, block_k=block_k, num_stages=num_stages)

    def forward_kernel(self, kernels: Kernels, settings: Settings) -> Callable[..., None]:
        params = settings.params
        kernel: Callable[..., None] = kernels.classes["forward"](
            dtype=dtype_of(kernels, settings),
            tile_m=params.block_q,
            tile_n=params.block_k,
            num_stages=params.num_stages,
            num_threads=THREADS,
            **forward_arguments(kernels, settings),
        )
        return _with_window(kernels, kernel)

    def backward_kernel(self, kernels: Kernels, settings: Settings) -> Callable[..., None]:
        params = settings.params
        kernel: Callable[..., None] = kernels.classes["backward"](
            dtype=dtype_of(kernels, settings),
            m_block_size=params.block_q,
            n_block_size=params.block_k,
            num_stages_Q=params.query_stages,
            num_stages_dO=params.d_out_stages,
            num_threads=THREADS,
            **{f"AtomLayout{name}": THREADS // 32 for name in ("MSdP", "NdKV", "MdQ")},
            **shared_arguments(settings),
        )
        return _with_window(kernels, kernel)

    def postprocess_kernel(self, kernels: Kernels, settings: Settings, of: Accumulator) -> Callable[..., None]:
        kernel: Callable[..., None] = kernels.classes["postprocess"](
            arch=120,
            num_threads=THREADS,
            AtomLayoutMdQ=THREADS // 32,
            dQ_swapAB=False,
            hdim_multiple_of=self.dim_multiple(settings.params),
            **postprocess_arguments(kernels, settings, of),
        )
        return kernel

    def dim_multiple(self, params: Fa4BackwardParams) -> int:
        return 32

    def accumulates(self, settings: Settings) -> bool:
        return True


def _with_window(kernels: Kernels, kernel: Callable[..., None]) -> Callable[..., None]:
    """A kernel that takes the ends of a window as integers, as those of other architectures do."""

    def run(*operands: Any, window_size_left: int | None, window_size_right: int | None, **others: Any) -> None:
        left, right = (None if x is None else kernels.int32(x) for x in (window_size_left, window_size_right))
        kernel(*operands, window_size_left=left, window_size_right=right, **others)

    return run


def _shared_reasons(needed: int, params: Params) -> list[str]:
    if needed <= SHARED_BYTES:
        return []
    return [f"tiles need {needed} bytes of shared memory of {SHARED_BYTES}, got {params=}"]
