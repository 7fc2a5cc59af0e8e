"""Configs of the vocabulary losses on Hopper."""

import dataclasses

from tilewright.kernels.hopper.matmul.heuristics import dense_candidates
from tilewright.kernels.hopper.matmul.params import MatmulParams
from tilewright.kernels.linear_cross_entropy.blocks.kept import keeping_reasons
from tilewright.kernels.linear_cross_entropy.blocks.vocabulary import MULTIPLE, aligned, even_blocks
from tilewright.kernels.linear_cross_entropy.inputs import LossInputs
from tilewright.ops.types import Direction
from tilewright.ops.utils.stable_ids import stable_id

WORKSPACE = 512 << 20
"""Bytes of what a block of tokens keeps of the whole vocabulary, or of the gradient of a block of both."""

MIN_TOKENS = 128

STATISTICS_TOKENS = 4096
"""Tokens of a block where only the loss is computed: the matrix is read once for each block, in less time than the
MMAs of 1000 tokens take, and ignored tokens save whole blocks."""


@stable_id("tilewright/linear_cross_entropy.HopperLossParams")
@dataclasses.dataclass(frozen=True, slots=True)
class HopperLossParams:
    """Config of a forward pass.

    Attributes:
      block_tokens: tokens of a block, from which ignored tokens are left out; ``None`` for all tokens as they lie.
      block_vocab: classes of a block, of gradients that the forward pass computes.
      statistics, gradient: tiles of the kernels of statistics and of recomputed gradients.
      keep: gradients that the forward pass computes come from what its first kernel keeps of a block of tokens.
    """

    block_tokens: int | None
    block_vocab: int
    statistics: MatmulParams
    gradient: MatmulParams
    keep: bool

    def __post_init__(self) -> None:
        _check(self)
        if self.keep and self.block_tokens is None:
            raise ValueError(f"blocks of tokens keep something, not all tokens as they lie, got {self}")


@stable_id("tilewright/linear_cross_entropy.HopperLossBackwardParams")
@dataclasses.dataclass(frozen=True, slots=True)
class HopperLossBackwardParams:
    """Config of a backward pass.

    Attributes:
      block_tokens, block_vocab, gradient: as forward, if logits are recomputed.
      recompute: compute logits again even where the forward pass computes gradients of a scalar loss; a compiled
        program then does not have these.
    """

    block_tokens: int | None
    block_vocab: int
    gradient: MatmulParams
    recompute: bool

    def __post_init__(self) -> None:
        _check(self)


type Params = HopperLossParams | HopperLossBackwardParams


def _check(params: Params) -> None:
    if params.block_vocab < 1 or (params.block_tokens is not None and params.block_tokens < 1):
        raise ValueError(f"blocks must have tokens and classes, got {params}")


def kept_tokens(tokens: int, vocab: int, itemsize: int) -> int:
    """Tokens of a block that keeps something of all classes."""
    size = max(WORKSPACE // (itemsize * max(vocab, 1)) // MIN_TOKENS, 1) * MIN_TOKENS
    # Blocks of one size: the last one takes as long with few tokens.
    return even_blocks(tokens, size, MIN_TOKENS)


def vocab_block(tokens: int, vocab: int, itemsize: int) -> int:
    """Classes of a block of so many tokens."""
    return even_blocks(vocab, max(MULTIPLE, WORKSPACE // (itemsize * max(tokens, 1))), MULTIPLE)


def _tiles(rows: int, columns: int, d: int, sms: int) -> list[MatmulParams]:
    """Tiles of logits. Without those of consumers in turns, which were not measured with epilogues of exponentials."""
    return [tile for tile in dense_candidates(rows, columns, d, sms) if not tile.turns]


def listed_params(inputs: LossInputs, direction: Direction, sms: int) -> list[Params]:
    """Params worth measuring, best guess first."""
    tokens, vocab, d = inputs.tokens, aligned(inputs.vocab), inputs.d
    block = vocab_block(tokens, vocab, 2)
    of_gradient = _tiles(tokens, block, d, sms)
    if direction == "backward":
        found: list[Params] = [HopperLossBackwardParams(None, block, tile, True) for tile in of_gradient]
        halved = even_blocks(vocab, max(block // 2, MULTIPLE), MULTIPLE)
        if halved < block:
            found.append(HopperLossBackwardParams(None, halved, of_gradient[0], True))
        kept = [HopperLossBackwardParams(None, block, of_gradient[0], False)]
        return [*kept, *found] if inputs.keeps_gradients else found
    keep = inputs.keeps_gradients and not keeping_reasons(inputs)
    rows = even_blocks(tokens, STATISTICS_TOKENS, 128)
    if keep:  # one pass over all classes: no slices of the matrix and of its gradient are copied
        # In blocks of 8192 classes a call took 47.1 ms instead of 39.5 (docs/notes/vocabulary_losses.md).
        rows, block = kept_tokens(tokens, vocab, 2), vocab
    of_statistics = _tiles(rows, vocab, d, sms)
    return [HopperLossParams(rows, block, tile, of_gradient[0], keep) for tile in of_statistics]
