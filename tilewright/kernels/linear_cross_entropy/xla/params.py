"""Configs of the vocabulary losses in XLA."""

import dataclasses

from tilewright.ops.kernel.arrays import is_symbolic
from tilewright.ops.types import Device
from tilewright.ops.utils.stable_ids import stable_id

WORKSPACE = {"cpu": 64 << 20, "gpu": 512 << 20, "tpu": 128 << 20}
"""Bytes of the logits of a block of tokens, in float32, of the whole vocabulary if gradients are computed from them."""

MIN_VOCAB = 128


@stable_id("tilewright/linear_cross_entropy.XlaLossParams")
@dataclasses.dataclass(frozen=True, slots=True)
class XlaLossParams:
    """Config of a forward pass.

    Attributes:
      block_tokens: tokens of a block, from which ignored tokens are left out; ``None`` for all tokens as they lie,
        which XLA can split over devices.
      block_vocab: classes of a block.
    """

    block_tokens: int | None
    block_vocab: int

    def __post_init__(self) -> None:
        _check(self)

    @property
    def keep(self) -> bool:
        """A block of tokens keeps its logits, if gradients are computed from them."""
        return True


@stable_id("tilewright/linear_cross_entropy.XlaLossBackwardParams")
@dataclasses.dataclass(frozen=True, slots=True)
class XlaLossBackwardParams:
    """Config of a backward pass.

    Attributes:
      block_tokens, block_vocab: as forward, if logits are recomputed.
      recompute: compute logits again even where the forward pass computes gradients of a scalar loss; a compiled
        program then does not have these.
    """

    block_tokens: int | None
    block_vocab: int
    recompute: bool = True

    def __post_init__(self) -> None:
        _check(self)
        if type(self.recompute) is not bool:
            raise TypeError(f"XlaLossBackwardParams needs a bool, got {self.recompute=}")


type Params = XlaLossParams | XlaLossBackwardParams


def _check(params: Params) -> None:
    for name in ("block_tokens", "block_vocab"):
        size = getattr(params, name)
        if (size is not None or name == "block_vocab") and (type(size) is not int or size < 1):
            raise ValueError(f"{type(params).__name__} needs a positive integer, got {name}={size!r}")


def block_sizes(tokens: int, vocab: int, device: Device, *, whole: bool) -> tuple[int | None, int]:
    """Tokens and classes of a block without measurements; ``whole`` for all tokens in one."""
    elements = WORKSPACE.get(device.kind, WORKSPACE["cpu"]) // 4
    if whole:
        # The number of tokens is unknown until the exported program is called; this one bounds most calls' memory.
        count = 4096 if is_symbolic(tokens) else max(tokens, 1)
        return None, _multiple(elements // count, vocab)
    size = 256 if device.kind == "cpu" else 2048
    while size > 64 and size * vocab > elements:
        size //= 2
    # On a CPU a block's logits stay in its caches.
    return size, _multiple(4096 if device.kind == "cpu" else elements // size, vocab)


def candidate_sizes(tokens: int, vocab: int, device: Device, *, whole: bool) -> list[tuple[int | None, int]]:
    """Sizes that are worth measuring, the heuristic's first."""
    best_tokens, best_vocab = block_sizes(tokens, vocab, device, whole=whole)
    # Smaller blocks of the vocabulary fit a cache; more tokens in a block read the matrix less often.
    found = [(best_tokens, best_vocab)]
    for change in (2, 4):
        found += [(best_tokens, _multiple(best_vocab // change, vocab))]
        if best_tokens is not None:
            found += [(best_tokens * change, best_vocab), (max(16, best_tokens // change), best_vocab)]
    return list(dict.fromkeys(found))


def _multiple(size: int, vocab: int) -> int:
    rounded = max(MIN_VOCAB, size // MIN_VOCAB * MIN_VOCAB)
    return vocab if rounded >= vocab else rounded
