"""Configs of the vocabulary losses in Triton: params, a model of their sizes, and those worth measuring."""

import dataclasses

import jax.numpy as jnp

from tilewright.kernels.linear_cross_entropy.blocks.kept import keeping_reasons, narrow_dtype
from tilewright.kernels.linear_cross_entropy.blocks.vocabulary import MULTIPLE, aligned, even_blocks
from tilewright.kernels.linear_cross_entropy.inputs import LossInputs
from tilewright.kernels.op.footprint import Footprint
from tilewright.kernels.triton.limits import MIN_DOT, power_of_two
from tilewright.kernels.triton.matmul import TritonTile
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.stable_ids import stable_id

WORKSPACE = 1 << 30
"""Bytes of what a block of tokens keeps of the vocabulary, or of the gradient of its logits: with a d of 4096 as much
as the gradient of the matrix in 16 bits, whose sum in float32 is there all the time."""

MAX_TOKENS = 4096
"""Tokens of a block. Reading and writing that sum once for each block takes 8 bytes for every ``6 · tokens`` FLOPs: at
3 TB/s and 650 TFLOP/s 7 % of the time with 4096 tokens, 14 % with 2048. With more tokens in a block, a call of which
many are ignored would compute more of them."""

MIN_TOKENS = 1024
"""Tokens below which recomputed gradients rather have blocks of the vocabulary."""


@stable_id("tilewright/linear_cross_entropy.TritonLossParams")
@dataclasses.dataclass(frozen=True, slots=True)
class TritonLossParams:
    """Config of a forward pass.

    Attributes:
      block_tokens: tokens of a block, from which ignored tokens are left out; ``None`` for all tokens as they lie.
      block_vocab: classes of a block, of gradients that the forward pass computes.
      statistics: the tile of the kernel of the statistics.
      gradient: that of the kernel of gradients, where they are recomputed.
      keep: gradients that the forward pass computes come from what its first kernel keeps of a block of tokens.
    """

    block_tokens: int | None
    block_vocab: int
    statistics: TritonTile
    gradient: TritonTile
    keep: bool

    def __post_init__(self) -> None:
        _check(self, "keep")


@stable_id("tilewright/linear_cross_entropy.TritonLossBackwardParams")
@dataclasses.dataclass(frozen=True, slots=True)
class TritonLossBackwardParams:
    """Config of a backward pass.

    Attributes:
      block_tokens, block_vocab: as forward, if logits are recomputed.
      gradient: the tile of the kernel that recomputes them.
      recompute: compute logits again even where the forward pass computes gradients of a scalar loss; a compiled
        program then does not have these.
    """

    block_tokens: int | None
    block_vocab: int
    gradient: TritonTile
    recompute: bool

    def __post_init__(self) -> None:
        _check(self, "recompute")


type Params = TritonLossParams | TritonLossBackwardParams


def _check(params: Params, flag: str) -> None:
    for name in ("block_tokens", "block_vocab"):
        size = getattr(params, name)
        if (size is not None or name == "block_vocab") and (type(size) is not int or size < 1):
            raise ValueError(f"{type(params).__name__} needs a positive integer, got {name}={size!r}")
    if type(getattr(params, flag)) is not bool:
        raise TypeError(f"{type(params).__name__} needs a bool, got {flag}={getattr(params, flag)!r}")


_HOPPER = ((128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 128, 64, 8, 3), (64, 128, 64, 4, 4))
_AMPERE = ((128, 128, 64, 8, 3), (128, 128, 32, 8, 3), (64, 128, 32, 4, 4), (128, 64, 32, 4, 3))
"""Operands of matmuls are in registers, too."""
_FLOAT32 = ((64, 64, 32, 4, 3), (64, 128, 32, 8, 2), (32, 64, 32, 4, 3))
_ODD = ((64, 64, 32, 4, 3), (64, 128, 32, 8, 3), (32, 64, 32, 4, 3))
"""For sizes of rows that are not aligned, or which no step along d divides: masks and addresses take registers."""


def tiles(inputs: LossInputs, device: Device) -> list[TritonTile]:
    """Tiles worth measuring, best guess first, with no more rows than there are tokens."""
    listed: tuple[tuple[int, ...], ...]
    if inputs.x.dtype.itemsize == 4:
        listed = _FLOAT32
    elif inputs.d % 32:
        listed = _ODD
    elif device.capability is not None and (9, 0) <= device.capability < (12, 0):
        # With two of these, 128 registers of logits spill.
        more = (
            inputs.logits_soft_cap is not None,
            inputs.bias is not None or inputs.needs_sum,
            inputs.vocab % 256 != 0,
        )
        listed = tuple(each for each in _HOPPER if sum(more) < 2 or each[1] <= 128)
    else:
        listed = _AMPERE
    most = power_of_two(inputs.tokens, MIN_DOT)
    # A step that divides d needs no mask along it.
    return list(
        dict.fromkeys(
            TritonTile(min(rows, most), columns, 32 if inputs.d % depth else depth, *rest)
            for rows, columns, depth, *rest in listed
        )
    )


def block_sizes(inputs: LossInputs, *, keep: bool) -> tuple[int, int]:
    """Tokens and classes of a block within the workspace.

    Many classes come first: with all of them the matmuls add to the sums themselves, and a compiled program leaves out
    the gradient of the matrix if it is not used. Measured of kept gradients alone, where blocks of 16384 classes took
    21 % more time than all 131072.
    """
    size = jnp.dtype(narrow_dtype(inputs.x.dtype, inputs.weight.dtype)).itemsize
    least, tokens, vocab = 128 if keep else MIN_TOKENS, MAX_TOKENS, aligned(inputs.vocab)
    while tokens > least and tokens * vocab * size > WORKSPACE:
        tokens //= 2
    if keep:  # a token's kept values are those of the whole vocabulary
        return tokens, vocab
    return tokens, even_blocks(vocab, max(MULTIPLE, WORKSPACE // (size * tokens)), MULTIPLE)


def listed_params(inputs: LossInputs, device: Device, direction: Direction) -> list[Params]:
    """Params worth measuring, best guess first."""
    found, sums = tiles(inputs, device), inputs.keeps_gradients
    keep = direction == "forward" and sums and not keeping_reasons(inputs)
    tokens, vocab = block_sizes(inputs, keep=keep)
    sizes = [(2 * tokens, vocab), (tokens // 2, vocab)]
    if not keep:
        sizes.append((2 * tokens, even_blocks(aligned(inputs.vocab), max(MULTIPLE, vocab // 4), MULTIPLE)))
    if direction == "forward":
        listed: list[Params] = [TritonLossParams(tokens, vocab, tile, tile, keep) for tile in found]
        return [*listed, *(TritonLossParams(*each, found[0], found[0], keep) for each in sizes)]
    listed = [TritonLossBackwardParams(tokens, vocab, tile, True) for tile in found]
    listed += [TritonLossBackwardParams(*each, found[0], True) for each in sizes]
    if sums:  # gradients that are there have no sizes to tune
        listed.insert(0, TritonLossBackwardParams(tokens, vocab, found[0], False))
    return listed


def footprints(inputs: LossInputs, params: Params) -> list[Footprint]:
    """Threads, shared memory and the greatest number of blocks of each kernel that params launch."""
    rows = min(params.block_tokens or inputs.tokens, max(inputs.tokens, 1))
    kernels = []
    if isinstance(params, TritonLossParams):
        kernels.append((params.statistics, inputs.vocab))
    recomputes = inputs.keeps_gradients and not params.keep if isinstance(params, TritonLossParams) else (
        params.recompute or not inputs.keeps_gradients
    )  # fmt: skip
    if recomputes:
        kernels.append((params.gradient, min(params.block_vocab, aligned(inputs.vocab))))
    return [
        Footprint(
            blocks=-(-rows // tile.rows) * -(-classes // tile.columns),
            threads=32 * tile.num_warps,
            shared_bytes=tile.shared_bytes(inputs.x.dtype.itemsize),
        )
        for tile, classes in kernels
    ]
