"""Tokens from hidden states in plain XLA, by blocks of the vocabulary: the backend for every device."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from tilewright.kernels.linear_cross_entropy.blocks.vocabulary import Block, Head, block_logits
from tilewright.kernels.numerics.dots import accumulator
from tilewright.kernels.op.backend import InferenceBackend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.op.sharding import vary_over, varying_axes
from tilewright.kernels.sampling.draws import Groups, best_group, best_of_groups, slopes, without_nan
from tilewright.kernels.sampling.inputs import GROUP, Draw, LinearSampleInputs
from tilewright.ops.kernel.arrays import is_symbolic
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.stable_ids import stable_id

WORKSPACE = {"cpu": 4 << 20, "gpu": 256 << 20, "tpu": 64 << 20}
"""Bytes of the logits of a block, in float32."""


@stable_id("tilewright/sampling.XlaLinearSampleParams")
@dataclasses.dataclass(frozen=True, slots=True)
class XlaLinearSampleParams:
    """Config of a call; ``block_vocab`` is the number of tokens of a block of the vocabulary."""

    block_vocab: int

    def __post_init__(self) -> None:
        if type(self.block_vocab) is not int or self.block_vocab < GROUP or self.block_vocab % GROUP:
            raise ValueError(f"block_vocab must be a positive multiple of {GROUP}, got {self}")


class XlaLinearSample(InferenceBackend[LinearSampleInputs, Draw, XlaLinearSampleParams]):
    """Serves every call."""

    name: ClassVar[str] = "xla"
    platform: ClassVar[Platform] = Platform.XLA
    forward_params: ClassVar[type] = XlaLinearSampleParams
    symbolic_dimensions: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset({"bias", "temperature", "vocab_first", "logits_soft_cap"})

    def forward_reasons(self, inputs: LinearSampleInputs, device: Device) -> list[str]:
        return []

    def candidates(
        self, inputs: LinearSampleInputs, device: Device, direction: Direction
    ) -> Iterable[XlaLinearSampleParams]:
        # The number of rows of an exported program is not known: this one bounds most calls' memory.
        rows = 64 if is_symbolic(inputs.rows) else max(inputs.rows, 1)
        best = WORKSPACE.get(device.kind, WORKSPACE["cpu"]) // (4 * rows)
        sizes = (_multiple(min(size, inputs.vocab)) for size in (best, best // 4, best * 4))
        return [XlaLinearSampleParams(size) for size in dict.fromkeys(sizes)]

    def forward(self, inputs: LinearSampleInputs, params: XlaLinearSampleParams) -> Draw:
        slope, greedy = slopes(inputs.temperature, inputs.leading)
        wide = accumulator(inputs.x.dtype, inputs.weight.dtype)
        axis = 0 if inputs.vocab_first else 1
        head = Head(inputs.weight, inputs.bias, axis, inputs.logits_soft_cap, wide)
        size = params.block_vocab

        def groups(begin: jax.Array, width: int) -> Groups:
            classes = begin + jnp.arange(width, dtype=jnp.int32)
            logits = block_logits(head, Block(begin, begin, classes, None), inputs.x)
            return best_of_groups(without_nan(logits), begin, inputs.key, slope, greedy)

        whole, rest = divmod(inputs.vocab, size)
        found = [_over_blocks(groups, inputs, size, whole)] if whole else []
        if rest:
            found.append(groups(jnp.int32(whole * size), rest))
        every = Groups(*(jnp.concatenate(parts, -1) for parts in zip(*found, strict=True)))
        return best_group(every, slope, greedy, log_probs=True)


def _over_blocks(
    groups: Callable[[jax.Array, int], Groups], inputs: LinearSampleInputs, size: int, count: int
) -> Groups:
    """The groups of so many blocks, one block after another."""
    if count == 1:
        return groups(jnp.int32(0), size)
    shape = (*inputs.leading, count * size // GROUP)
    dtypes = ("uint32", "float32", "int32", "float32", "float32")
    zeros = vary_over(varying_axes(inputs), Groups(*(jnp.zeros(shape, dtype) for dtype in dtypes)))

    def step(index: jax.Array, every: Groups) -> Groups:
        part = groups(index * size, size)
        at = index * (size // GROUP)
        written = (lax.dynamic_update_slice_in_dim(x, y, at, -1) for x, y in zip(every, part, strict=True))
        return Groups(*written)

    return lax.fori_loop(jnp.int32(0), jnp.int32(count), step, zeros)


def _multiple(size: int) -> int:
    return max(math.ceil(size / GROUP), 1) * GROUP
