"""Paged attention in plain XLA: the backend for every device."""

import math
from collections.abc import Iterable
from typing import ClassVar

from tilewright.kernels.op.backend import InferenceBackend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.paged_attention.inputs import PagedInputs
from tilewright.kernels.paged_attention.results import Results, empty_forward
from tilewright.kernels.paged_attention.xla.forward import paged_forward
from tilewright.ops.kernel.arrays import at_most, is_symbolic
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.datacarrier import FwdParams

CPU_BYTES = 4 << 20
"""Bytes of gathered keys, values and logits processed at once: about the size of caches."""

ACCELERATOR_BYTES = 1 << 29
"""The same on an accelerator, where a loop step costs more than memory traffic."""

MAX_BLOCK_Q = 128

SYMBOLIC_BLOCK_Q = 16
"""Query rows per tile if the number of tokens is a symbolic dimension: decoding wastes little, chunks fill several."""


class XlaPagedAttention(InferenceBackend[PagedInputs, Results, FwdParams]):
    """Serves every call; its params use ``q_blocksize``, ``kv_blocksize`` and ``blocksize_heads``.

    ``blocksize_heads`` is the number of score matrices (query tiles × heads) processed at once.
    """

    name: ClassVar[str] = "xla"
    platform: ClassVar[Platform] = Platform.XLA
    forward_params: ClassVar[type] = FwdParams
    symbolic_dimensions: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset(
        {
            "kv_starts", "key_scale", "value_scale", "alibi_slopes", "softmax_aux", "left", "right", "logits_soft_cap",
            "q_length", "latent_dim", "row_format", "tree_mask",
        }
    )  # fmt: skip

    def forward_reasons(self, inputs: PagedInputs, device: Device) -> list[str]:
        return []

    def heuristic(self, inputs: PagedInputs, device: Device, direction: Direction) -> FwdParams:
        return _params(inputs, device, 256 if device.kind == "cpu" else 1024)

    def candidates(self, inputs: PagedInputs, device: Device, direction: Direction) -> Iterable[FwdParams]:
        sizes = (128, 256, 512, 1024) if device.kind == "cpu" else (256, 512, 1024, 2048, 4096)
        params_list = [_params(inputs, device, size) for size in sizes]
        return [params for params in dict.fromkeys(params_list) if params != self.heuristic(inputs, device, direction)]

    def forward(self, inputs: PagedInputs, params: FwdParams) -> Results:
        """``(out, lse)``; lse is float32, or float64 for float64 queries."""
        if inputs.is_empty:
            return empty_forward(inputs)
        longest = inputs.q_length or inputs.tokens
        block_q = at_most(longest, params.q_blocksize or 1)
        block_k = at_most(inputs.capacity, params.kv_blocksize or 256)
        return paged_forward(inputs, block_q, block_k, max((params.blocksize_heads or 1) // inputs.heads, 1))


def _params(inputs: PagedInputs, device: Device, block_k: int) -> FwdParams:
    if is_symbolic(inputs.tokens, inputs.sequences, inputs.capacity):
        block_q = at_most(inputs.longest_q, SYMBOLIC_BLOCK_Q)
        return FwdParams(q_blocksize=block_q, kv_blocksize=at_most(inputs.capacity, block_k), blocksize_heads=1)
    mean = math.ceil(inputs.tokens / max(inputs.sequences, 1))
    block_q = min(1 << (mean - 1).bit_length() if mean > 1 else 1, MAX_BLOCK_Q, max(inputs.longest_q, 1))
    block_k = max(min(block_k, inputs.capacity), 1)
    # Gathered keys and values, and logits, in float32.
    tile = block_k * (inputs.kv_heads * (inputs.head_dim + inputs.value_dim) + inputs.heads * block_q) * 4
    budget = CPU_BYTES if device.kind == "cpu" else ACCELERATOR_BYTES
    tiles = max(budget // max(tile, 1), 1)
    return FwdParams(q_blocksize=block_q, kv_blocksize=block_k, blocksize_heads=tiles * inputs.heads)
