"""Configs of the vocabulary losses on TPUs: params, a model of their VMEM, and those worth measuring."""

import dataclasses

import jax.numpy as jnp

from tilewright.kernels.linear_cross_entropy.blocks.kept import narrow_dtype
from tilewright.kernels.linear_cross_entropy.blocks.vocabulary import even_blocks
from tilewright.kernels.linear_cross_entropy.inputs import LossInputs
from tilewright.kernels.tpu.device import LANES
from tilewright.ops.types import Direction
from tilewright.ops.utils.stable_ids import stable_id

WORKSPACE = 512 << 20
"""Bytes of the gradient of the logits of a block of the vocabulary."""

STATISTICS_TOKENS = 4096
"""Tokens of a block where only the loss is computed: ignored tokens save whole blocks."""

ROWS = 256
"""Tokens of a tile whose logits are computed at a time: a loop bounds the code that the compiler unrolls."""

PACKED = 16
"""Rows of 16 bits in a vector register."""

MAX_D = 16384
"""Elements of a row of x, of which VMEM has all."""


@stable_id("tilewright/linear_cross_entropy.TpuTile")
@dataclasses.dataclass(frozen=True, slots=True)
class TpuTile:
    """A tile of logits.

    Attributes:
      block_rows: tokens that are in VMEM while the matrix goes past them.
      block_classes: classes of a step, a multiple of the lanes of a register.
    """

    block_rows: int
    block_classes: int

    def __post_init__(self) -> None:
        rows, classes = self.block_rows, self.block_classes
        if type(rows) is not int or rows < PACKED or rows % (ROWS if rows > ROWS else PACKED):
            raise ValueError(f"TpuTile needs a multiple of {PACKED} rows, or of {ROWS}, got {self.block_rows=}")
        if type(classes) is not int or classes < LANES or classes % LANES:
            raise ValueError(f"TpuTile needs a multiple of {LANES} classes, got {self.block_classes=}")

    def rows(self, tokens: int) -> int:
        """Rows of a tile of a call with so many tokens."""
        unit = PACKED if tokens <= ROWS else ROWS
        return min(self.block_rows, -(-tokens // unit) * unit)

    def dividing(self, size: int) -> int:
        """Classes of a step, at most those of the tile, that divide a multiple of the lanes of a register."""
        return next(each for each in range(self.block_classes, 0, -LANES) if size % each == 0)

    def vmem_bytes(self, tokens: int, d: int, itemsize: int) -> int:
        """VMEM of either kernel: each block twice, and the logits of some tokens."""
        rows, classes = self.rows(tokens), self.block_classes
        blocks = (rows + classes) * -(-d // LANES) * LANES * itemsize + rows * classes * 4
        # An array of few columns has whole registers.
        vectors = 3 * rows * LANES * 4
        return 2 * (blocks + vectors) + 4 * rows * LANES * 4 + 4 * min(rows, ROWS) * classes * 4


@stable_id("tilewright/linear_cross_entropy.TpuLossParams")
@dataclasses.dataclass(frozen=True, slots=True)
class TpuLossParams:
    """Config of a forward pass.

    Attributes:
      block_tokens: tokens of a block, from which ignored tokens are left out; ``None`` for all tokens as they lie.
      block_vocab: classes of a block, of gradients that the forward pass computes.
      statistics, gradient: tiles of the kernels of statistics and of gradients.
    """

    block_tokens: int | None
    block_vocab: int
    statistics: TpuTile
    gradient: TpuTile

    def __post_init__(self) -> None:
        _check(self)

    @property
    def keep(self) -> bool:
        """Nothing is kept: the sum of the matrix's gradient would go through HBM for each block of tokens."""
        return False


@stable_id("tilewright/linear_cross_entropy.TpuLossBackwardParams")
@dataclasses.dataclass(frozen=True, slots=True)
class TpuLossBackwardParams:
    """Config of a backward pass.

    Attributes:
      block_tokens, block_vocab, gradient: as forward.
      recompute: compute logits again even where the forward pass computes gradients of a scalar loss; a compiled
        program then does not have these.
    """

    block_tokens: int | None
    block_vocab: int
    gradient: TpuTile
    recompute: bool = True

    def __post_init__(self) -> None:
        _check(self)
        if type(self.recompute) is not bool:
            raise TypeError(f"TpuLossBackwardParams needs a bool, got {self.recompute=}")


type Params = TpuLossParams | TpuLossBackwardParams


def _check(params: Params) -> None:
    for name in ("block_tokens", "block_vocab"):
        size = getattr(params, name)
        if (size is not None or name == "block_vocab") and (type(size) is not int or size < 1):
            raise ValueError(f"{type(params).__name__} needs a positive integer, got {name}={size!r}")
    if params.block_vocab % LANES:
        raise ValueError(f"{type(params).__name__} needs a multiple of {LANES} classes, got {params.block_vocab=}")


_TILES = ((1024, 512), (1024, 1024), (2048, 512), (512, 512), (512, 256), (256, 256), (256, 128))
"""With a tile of 1024 rows a v6e has twice the FLOPs for each byte of the matrix that it needs to be busy."""


def listed_params(inputs: LossInputs, direction: Direction, vmem: int) -> list[Params]:
    """Params worth measuring, best guess first, whose kernels take at most so many bytes of VMEM."""
    tokens, itemsize = inputs.tokens, inputs.x.dtype.itemsize
    every = [TpuTile(*each) for each in _TILES]
    tiles = [each for each in every if each.vmem_bytes(tokens, inputs.d, itemsize) <= vmem] or every[-1:]
    # Best guess: what leaves half of VMEM to what XLA has there.
    tiles.sort(key=lambda each: each.vmem_bytes(tokens, inputs.d, itemsize) > vmem // 2)
    found: list[Params] = []
    for tile in tiles:
        block = vocab_block(inputs, tile)
        if direction == "backward":
            found.append(TpuLossBackwardParams(None, block, tile))
        else:
            found.append(TpuLossParams(even_blocks(tokens, STATISTICS_TOKENS, ROWS), block, tile, tile))
    return found


def vocab_block(inputs: LossInputs, tile: TpuTile) -> int:
    """Classes of a block of the gradients of all tokens: a part of the vocabulary that divides it, if one does."""
    width = -(-inputs.vocab // LANES) * LANES
    itemsize = jnp.dtype(narrow_dtype(inputs.x.dtype, inputs.weight.dtype)).itemsize
    count = -(-width * inputs.tokens * itemsize // WORKSPACE)
    for each in range(count, 2 * count):
        # Steps of a register's lanes alone would leave half of a matrix unit idle.
        if width % (each * LANES) == 0 and tile.dividing(width // each) >= min(2 * LANES, width):
            return width // each
    # Of blocks that overlap XLA copies the rows or columns of the matrix and of its gradient.
    limit = max(WORKSPACE // ((inputs.tokens + inputs.d) * itemsize), tile.block_classes)
    return even_blocks(width, min(limit, max(width - 1, 1)), tile.block_classes)
