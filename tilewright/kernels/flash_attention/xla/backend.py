"""Flash attention in plain XLA: the backend for every device."""

import math
from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import numpy as np
from jaxtyping import Array

from tilewright.kernels.flash_attention.inputs import AttentionInputs
from tilewright.kernels.flash_attention.results import Results, empty_backward, empty_forward
from tilewright.kernels.flash_attention.xla.backward import attention_backward
from tilewright.kernels.flash_attention.xla.forward import attention_forward
from tilewright.kernels.flash_attention.xla.tiles import Tiling
from tilewright.kernels.masks import Mask, TileClass, TileGrid, reduce_classes
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import Platform
from tilewright.ops.kernel.arrays import at_most, is_symbolic
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.datacarrier import BwdParams, FwdParams

SCORE_COST = {512: 1.0, 256: 1.17, 128: 1.5}
"""Relative time per score by the tile's side, on a CPU with 2 MB of L2 per core; 1024 is no faster.

Smaller tiles pay if the mask empties enough of them: causal masks up to a length of about 1024, and windows.
"""

MAX_ROW = 4096
"""Maximum keys per tile, if there are too few queries to fill a tile of the usual height."""

MODELLED_TILES = 1 << 20
"""Number of tiles beyond which finer tiles are not considered: counting their cost takes too long."""

STEP_SCORES = 1 << 20
"""Scores of all heads processed at once (4 MB in float32): enough for all cores, small enough for caches."""


ACCELERATOR_SCORES = 1 << 29
"""Scores of all heads processed at once on an accelerator: 2 GB in float32.

There a loop step costs more than skipped tiles save: on an H100 (causal, 4 × 4096, 16 heads of 128, bfloat16) a forward
pass takes 17.2 ms with tiles of 512 and 6.8 ms with tiles of 2048, which need no loop
(benchmarks/results/nvidia-h100-80gb-hbm3/xla_tiles.json).
"""

MIN_ACCELERATOR_BLOCK = 256

SYMBOLIC_BLOCK = 128
"""Side of a tile if the batch size or a length is a symbolic dimension: a short row wastes few scores."""


class XlaFlashAttention(Backend[AttentionInputs, Results, FwdParams, BwdParams]):
    """Serves every call; its params use ``q_blocksize``, ``kv_blocksize`` and, forward, ``blocksize_heads``.

    ``blocksize_heads`` is the number of score matrices (batch × heads) processed at once. It is ignored if the call may
    be partitioned over devices: then batch and heads stay whole axes, which the partitioner can split.
    """

    name: ClassVar[str] = "xla"
    platform: ClassVar[Platform] = Platform.XLA
    forward_mode: ClassVar[bool] = True
    symbolic_dimensions: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset(
        {"bias", "position_bias", "mask", "softmax_aux", "dropout_seed", "dropout_prob", "logits_soft_cap", "precision"}
    )

    def reasons(self, inputs: AttentionInputs, device: Device, direction: Direction) -> list[str]:
        return []

    def heuristic(self, inputs: AttentionInputs, device: Device, direction: Direction) -> FwdParams | BwdParams:
        matrices = inputs.batch * inputs.heads
        if is_symbolic(matrices, inputs.q_length, inputs.kv_length):
            blocks = at_most(inputs.q_length, SYMBOLIC_BLOCK), at_most(inputs.kv_length, SYMBOLIC_BLOCK)
        elif device.kind == "cpu":
            blocks = _default_blocks(inputs.q_length, inputs.kv_length, matrices, inputs.mask)
        else:
            blocks = _accelerator_blocks(inputs.q_length, inputs.kv_length, matrices)
        return _params(direction, *blocks)

    def candidates(
        self, inputs: AttentionInputs, device: Device, direction: Direction
    ) -> Iterable[FwdParams | BwdParams]:
        best = self.heuristic(inputs, device, direction)
        targets: tuple[tuple[int, int], ...]
        if device.kind == "cpu":
            targets = (
                (512, 512), (256, 512), (256, 256), (512, 1024), (1024, 512), (1024, 1024), (128, 512), (128, 128),
            )  # fmt: skip
        else:
            targets = ((256, 256), (512, 512), (1024, 1024), (2048, 2048), (4096, 4096))
        others = [
            _params(direction, _balanced(inputs.q_length, rows), _balanced(inputs.kv_length, columns))
            for rows, columns in targets
        ]
        return list(dict.fromkeys([best, *others]))

    def forward(self, inputs: AttentionInputs, params: FwdParams) -> Results:
        """``(out, lse)``; lse is float32, or float64 for float64 inputs."""
        if _is_empty(inputs):
            return empty_forward(inputs)
        return attention_forward(
            inputs, _tiling(inputs, params.q_blocksize, params.kv_blocksize, params.blocksize_heads)
        )

    def backward(
        self,
        inputs: AttentionInputs,
        results: Results,
        cotangents: tuple[Array, Array | None],
        params: BwdParams,
    ) -> dict[str, Any]:
        """Gradients for query, key, value, bias and softmax_aux, from any backend's ``(out, lse)``."""
        if _is_empty(inputs):
            return empty_backward(inputs, *results, *cotangents)
        tiling = _tiling(inputs, params.q_blocksize, params.kv_blocksize, None)
        return attention_backward(inputs, *results, *cotangents, tiling)


def _params(direction: Direction, q_block: int, kv_block: int) -> FwdParams | BwdParams:
    kind = FwdParams if direction == "forward" else BwdParams
    return kind(q_blocksize=q_block, kv_blocksize=kv_block)


def _is_empty(inputs: AttentionInputs) -> bool:
    return 0 in (*inputs.query.shape[:3], *inputs.value.shape)


def _balanced(length: int, target: int) -> int:
    """The block size that splits ``length`` into the fewest tiles of at most ``target``, with little padding."""
    if length <= target:
        return max(length, 1)
    tiles = math.ceil(length / target)
    return min(math.ceil(math.ceil(length / tiles) / 16) * 16, target)


def _default_blocks(q_length: int, kv_length: int, matrices: int, mask: Mask | None) -> tuple[int, int]:
    if min(q_length, kv_length, matrices) == 0:
        return 1, 1
    block = min(SCORE_COST, key=lambda block: _cost(q_length, kv_length, block, mask))
    q_block, columns = _balanced(q_length, block), block
    # Few queries, as in decoding: tiles as wide as the scores of a step allow, for a loop of fewer steps.
    if q_block < min(SCORE_COST):
        columns = max(columns, min(STEP_SCORES // (q_block * matrices), MAX_ROW))
    return q_block, _balanced(kv_length, columns)


def _accelerator_blocks(q_length: int, kv_length: int, matrices: int) -> tuple[int, int]:
    """Tiles of half the length, so that a causal mask empties one of four, unless memory requires smaller ones."""
    if min(q_length, kv_length, matrices) == 0:
        return 1, 1
    # The largest power of two whose tiles, of all heads at once, have no more than ACCELERATOR_SCORES.
    side = 1 << max(math.isqrt(max(ACCELERATOR_SCORES // matrices, 1)).bit_length() - 1, 0)
    side = max(side, MIN_ACCELERATOR_BLOCK)
    q_half, kv_half = (max(math.ceil(length / 2), MIN_ACCELERATOR_BLOCK) for length in (q_length, kv_length))
    return _balanced(q_length, min(side, q_half)), _balanced(kv_length, min(side, kv_half))


def _cost(q_length: int, kv_length: int, block: int, mask: Mask | None) -> float:
    """Cost of one score matrix, in scores of the cheapest tiles; arrays in the mask are assumed to empty no tile."""
    grid = TileGrid(q_length, kv_length, _balanced(q_length, block), _balanced(kv_length, block))
    tiles = grid.q_tiles * grid.kv_tiles
    if tiles > MODELLED_TILES:
        # Only the coarsest tiles are left.
        return math.inf if block != max(SCORE_COST) else 0.0
    if mask is not None:
        tiles = int(np.count_nonzero(reduce_classes(mask.classify(grid, static_only=True)) != TileClass.EMPTY))
    return SCORE_COST[block] * tiles * grid.block_q * grid.block_k


def _tiling(inputs: AttentionInputs, q_block: int | None, kv_block: int | None, heads_at_once: int | None) -> Tiling:
    batch, q_length, heads, _ = inputs.query.shape
    _, kv_length, kv_heads, _ = inputs.key.shape
    symbolic = is_symbolic(batch, q_length, kv_length)
    if symbolic:
        q_block, kv_block = at_most(q_length, q_block or SYMBOLIC_BLOCK), at_most(kv_length, kv_block or SYMBOLIC_BLOCK)
    else:
        defaults = _default_blocks(q_length, kv_length, batch * heads, inputs.mask)
        q_block = min(q_block or defaults[0], max(q_length, 1))
        kv_block = min(kv_block or defaults[1], max(kv_length, 1))
    grid = TileGrid(q_length, kv_length, q_block, kv_block)
    group = heads // max(kv_heads, 1)
    if symbolic or _may_be_partitioned():
        return Tiling(batch, kv_heads, group, grid, batch, kv_heads)
    target_heads = max((heads_at_once or STEP_SCORES // (q_block * kv_block)) // max(group, 1), 1)
    # A step has some heads of one batch element, or all heads of several: either is one slice of the arrays. Sizes
    # divide, since all steps of a scan have one shape.
    head_size = _divisor(kv_heads, target_heads)
    batch_size = _divisor(batch, target_heads // kv_heads) if head_size == kv_heads else 1
    return Tiling(batch, kv_heads, group, grid, batch_size, head_size)


def _divisor(number: int, at_most: int) -> int:
    """The largest divisor up to ``at_most``, at least 1."""
    return max(part for part in range(1, number + 1) if number % part == 0 and (part <= at_most or part == 1))


def _may_be_partitioned() -> bool:
    """True if a partitioner may split this program along batch or heads, which a loop over them would gather."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        # Inside of a shard_map its axes are split already.
        manual = set(mesh.manual_axes)
        return any(size > 1 for name, size in mesh.shape.items() if name not in manual)
    # Without a mesh the arguments' shardings are not known before the program is compiled.
    return jax.device_count() > 1
