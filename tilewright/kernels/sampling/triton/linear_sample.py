"""The Triton backend of ``linear_sample``, on NVIDIA GPUs: a matmul whose tiles keep their best tokens alone."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp

from tilewright.kernels.op.backend import InferenceBackend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.op.footprint import Footprint, launch_reasons
from tilewright.kernels.sampling.inputs import GROUP, Draw, LinearSampleInputs
from tilewright.kernels.sampling.triton.launches import (
    DTYPES,
    MAX_VOCAB,
    Maybe,
    as_batch,
    best_of_rows,
    group_structs,
    groups_of,
    or_absent,
)
from tilewright.kernels.triton import launch, unavailable
from tilewright.kernels.triton.batching import over_batch
from tilewright.kernels.triton.limits import MIN_DOT, power_of_two
from tilewright.kernels.triton.matmul import TritonTile, tl_precision
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.stable_ids import stable_id

TOGETHER = 8
"""Tiles of rows whose programs are beside each other for the same tokens."""

_NARROW = ((64, 128, 64, 8, 4), (64, 128, 64, 8, 3), (64, 128, 128, 8, 3), (128, 128, 64, 16, 3), (64, 256, 64, 16, 3))
_FLOAT32 = ((64, 128, 32, 8, 3), (32, 128, 32, 4, 3), (64, 128, 32, 8, 2))
"""With 32 logits of a thread: with 64 the noise spills."""


@stable_id("tilewright/sampling.TritonLinearSampleParams")
@dataclasses.dataclass(frozen=True, slots=True)
class TritonLinearSampleParams:
    """Config of a call; ``tile`` is that of the matmul, whose columns are whole groups of tokens."""

    tile: TritonTile

    def __post_init__(self) -> None:
        if self.tile.columns % GROUP:
            raise ValueError(f"the columns of a tile must be a multiple of {GROUP}, got {self}")


class TritonLinearSample(InferenceBackend[LinearSampleInputs, Draw, TritonLinearSampleParams]):
    """Serves x and weight of one dtype: float32, bfloat16 or float16."""

    name: ClassVar[str] = "triton"
    platform: ClassVar[Platform] = Platform.TRITON
    forward_params: ClassVar[type] = TritonLinearSampleParams
    late_import: ClassVar[str] = "triton"
    keeps_lowering: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset({"bias", "temperature", "vocab_first", "logits_soft_cap"})

    def forward_reasons(self, inputs: LinearSampleInputs, device: Device) -> list[str]:
        reasons = unavailable(device)
        dtypes = {"x": inputs.x.dtype, "weight": inputs.weight.dtype}
        reasons += [f"{name} must be one of {DTYPES}, got {x}" for name, x in dtypes.items() if x.name not in DTYPES]
        if inputs.x.dtype != inputs.weight.dtype:
            reasons.append(f"x and weight must have one dtype, got {inputs.x.dtype} and {inputs.weight.dtype}")
        if not inputs.d:
            reasons.append("its kernels need columns of x, got d=0")
        if inputs.vocab > MAX_VOCAB:
            reasons.append(f"vocab={inputs.vocab} must be at most {MAX_VOCAB}")
        return reasons

    def candidates(
        self, inputs: LinearSampleInputs, device: Device, direction: Direction
    ) -> Iterable[TritonLinearSampleParams]:
        listed = _FLOAT32 if inputs.x.dtype.itemsize == 4 else _NARROW
        most = power_of_two(inputs.rows, MIN_DOT)
        tiles = (_with_rows(TritonTile(*each), most) for each in listed)
        found = [TritonLinearSampleParams(tile) for tile in dict.fromkeys(tiles)]
        fits = (each for each in found if not launch_reasons(self.footprints(inputs, device, direction, each), device))
        return list(fits) or found[:1]

    def footprints(
        self, inputs: LinearSampleInputs, device: Device, direction: Direction, params: TritonLinearSampleParams
    ) -> Sequence[Footprint]:
        tile = params.tile
        blocks = -(-inputs.rows // tile.rows) * -(-inputs.vocab // tile.columns)
        return [Footprint(blocks, 32 * tile.num_warps, tile.shared_bytes(inputs.x.dtype.itemsize))]

    def forward(self, inputs: LinearSampleInputs, params: TritonLinearSampleParams) -> Draw:
        mapped = [inputs.x, inputs.key, inputs.temperature]
        batches = [None if x is None else as_batch(x, inputs.leading) for x in mapped]
        shared = [None if x is None else x[None] for x in (inputs.weight, inputs.bias)]
        call = functools.partial(_run, inputs=inputs.structs, tile=params.tile)
        return Draw(*(x.reshape(inputs.leading) for x in over_batch(call, batches, shared)))


def _with_rows(tile: TritonTile, most: int) -> TritonTile:
    """A tile of at most so many rows, with as many logits of a thread."""
    warps = max(tile.num_warps * min(tile.rows, most) // tile.rows, 4)
    return dataclasses.replace(tile, rows=min(tile.rows, most), num_warps=warps)


def _run(
    mapped: Sequence[Maybe], shared: Sequence[Maybe], inputs: LinearSampleInputs, tile: TritonTile
) -> list[jax.Array]:
    """The tokens and their log-probabilities, ``[batch, rows]``."""
    assert mapped[0] is not None
    assert shared[0] is not None
    batch = mapped[0].shape[:2]
    if shared[0].shape[0] > 1:  # each element of the batch has a matrix of its own

        def one(arrays: tuple[Sequence[Maybe], Sequence[Maybe]]) -> list[jax.Array]:
            of_one, matrix = jax.tree.map(lambda x: x[None], arrays)
            return [x[0] for x in _run(of_one, matrix, inputs, tile)]

        every: list[jax.Array] = jax.lax.map(one, (mapped, shared))
        return every
    x, key, temperature = (None if each is None else each.reshape(-1, *each.shape[2:]) for each in mapped)
    weight, bias = (None if each is None else each[0] for each in shared)
    rows = inputs.replace(x=x, key=key, temperature=temperature, weight=weight, bias=bias)
    return [each.reshape(batch) for each in _draw(rows, tile)]


def _draw(inputs: LinearSampleInputs, tile: TritonTile) -> tuple[jax.Array, ...]:
    from tilewright.kernels.sampling.triton import linear_kernels

    d, vocab, rows, bias = inputs.d, inputs.vocab, inputs.rows, inputs.bias
    row_tiles, groups = -(-rows // tile.rows), groups_of(vocab)
    found = launch(
        linear_kernels.best_of_tiles,
        [
            inputs.x,
            inputs.weight,
            or_absent(None if bias is None else bias.astype(jnp.float32)),
            inputs.key,
            or_absent(inputs.temperature),
        ],
        group_structs(rows, groups, draws=True, mass=True),
        grid=[row_tiles * -(-vocab // tile.columns)],
        scalars={"rows": rows, "tiles": row_tiles},
        constants={
            "D": d,
            "VOCAB": vocab,
            "D_STRIDE": 1 if inputs.vocab_first else vocab,
            "VOCAB_STRIDE": d if inputs.vocab_first else 1,
            "BIAS": bias is not None,
            "CAP": inputs.logits_soft_cap or 0.0,
            "HAS_TEMPERATURE": inputs.temperature is not None,
            "GROUPS": groups,
            "BLOCK_ROWS": tile.rows,
            "BLOCK_V": tile.columns,
            "BLOCK_K": min(tile.depth, power_of_two(d, MIN_DOT)),
            "TOGETHER": TOGETHER,
            "PRECISION": tl_precision(),
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return best_of_rows(found, inputs.temperature, log_probs=True)
