"""The Triton backend of ``sample``, on NVIDIA GPUs."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp

from tilewright.kernels.op.backend import InferenceBackend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.sampling.inputs import GROUP, Draw, SampleInputs
from tilewright.kernels.sampling.triton.launches import (
    DTYPES,
    MAX_VOCAB,
    Maybe,
    as_batch,
    best_of_rows,
    group_structs,
    groups_of,
    or_absent,
    struct,
)
from tilewright.kernels.triton import launch, unavailable
from tilewright.kernels.triton.batching import over_batch
from tilewright.kernels.triton.limits import power_of_two
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.stable_ids import stable_id

MAX_ROWS = 1 << 24
"""Rows, of which 32 bits count the key words and, in chunks, the programs."""

KEPT = 32
"""Elements of a tile that a thread may hold; more would spill."""


@stable_id("tilewright/sampling.TritonSampleParams")
@dataclasses.dataclass(frozen=True, slots=True)
class TritonSampleParams:
    """Config of the kernels; no token depends on it.

    Attributes:
      groups, num_warps: groups of a tile and warps of a program in the pass over all logits.
      chosen_groups, row_warps: the same in the draw from what limits leave, with one program a row.
    """

    groups: int
    num_warps: int
    chosen_groups: int
    row_warps: int

    def __post_init__(self) -> None:
        for name, maximum in (("groups", 128), ("num_warps", 16), ("chosen_groups", 128), ("row_warps", 32)):
            value = getattr(self, name)
            if type(value) is not int or value & (value - 1) or not 1 <= value <= maximum:
                raise ValueError(f"{name} must be a power of two from 1 to {maximum}, got {self}")


class TritonSample(InferenceBackend[SampleInputs, Draw, TritonSampleParams]):
    """Serves float32, bfloat16 and float16; repeats bit for bit, with any config."""

    name: ClassVar[str] = "triton"
    platform: ClassVar[Platform] = Platform.TRITON
    forward_params: ClassVar[type] = TritonSampleParams
    late_import: ClassVar[str] = "triton"
    keeps_lowering: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset({"temperature", "top_k", "top_p", "min_p"})

    def forward_reasons(self, inputs: SampleInputs, device: Device) -> list[str]:
        reasons = unavailable(device)
        if inputs.logits.dtype.name not in DTYPES:
            reasons.append(f"logits must be one of {DTYPES}, not {inputs.logits.dtype}")
        for name, size, maximum in (("vocab", inputs.vocab, MAX_VOCAB), ("rows", inputs.rows, MAX_ROWS)):
            if size > maximum:
                reasons.append(f"{name}={size} must be at most {maximum}")
        return reasons

    def candidates(self, inputs: SampleInputs, device: Device, direction: Direction) -> Iterable[TritonSampleParams]:
        groups = groups_of(inputs.vocab)
        most = power_of_two(groups)
        # 16 elements of each thread are 64 bytes in flight; half of it where there would be few programs.
        tiles = [(32, 8), (16, 4), (32, 4), (64, 8), (16, 8), (8, 4)]
        if inputs.rows * groups < 64 * max(device.cores, 1):
            tiles = [(8, 4), (16, 4), (16, 8), (32, 8)]
        # Of counts alone 16 warps are given too few registers by ptxas.
        draws = [(64, 8), (64, 16), (32, 16)] if inputs.top_p is None else [(64, 16), (64, 8), (32, 16)]
        draws = draws if inputs.is_limited else draws[:1]
        listed = [(*tile, *draws[0]) for tile in tiles] + [(*tiles[0], *draw) for draw in draws[1:]]
        found = (TritonSampleParams(min(a, most), b, min(c, most), d) for a, b, c, d in listed)
        return list(dict.fromkeys(found))

    def config_reasons(
        self, inputs: SampleInputs, device: Device, direction: Direction, params: TritonSampleParams
    ) -> list[str]:
        tiles = ((params.groups, params.num_warps), (params.chosen_groups, params.row_warps))
        kept = max(groups * GROUP // (32 * warps) for groups, warps in tiles)
        return [f"{kept} elements of each thread do not fit into registers"] if kept > KEPT else []

    def forward(self, inputs: SampleInputs, params: TritonSampleParams) -> Draw:
        limits = (inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p)
        arrays = (inputs.logits, inputs.key, *limits)
        mapped = [None if x is None else as_batch(x, inputs.leading) for x in arrays]
        call = functools.partial(_run, params=params, log_probs=inputs.return_log_probs)
        found = [x.reshape(inputs.leading) for x in over_batch(call, mapped, None)]
        return Draw(found[0], found[1] if inputs.return_log_probs else None)


def _run(mapped: Sequence[Maybe], _: None, params: TritonSampleParams, log_probs: bool) -> list[jax.Array]:
    """The tokens, and with ``log_probs`` their log-probabilities, both ``[batch, rows]``."""
    logits, key, temperature, top_k, top_p, min_p = (None if x is None else x.reshape(-1, *x.shape[2:]) for x in mapped)
    assert mapped[0] is not None
    assert logits is not None
    assert key is not None
    inputs = SampleInputs(logits, key, temperature, top_k, top_p, min_p, return_log_probs=log_probs)
    draw = _limited_draw if inputs.is_limited else _draw
    return [x.reshape(mapped[0].shape[:2]) for x in draw(inputs, params)]


def _groups(inputs: SampleInputs, params: TritonSampleParams, *, draws: bool, mass: bool) -> tuple[jax.Array, ...]:
    """The first pass: the largest logit of each group of tokens, and with ``draws`` its best token."""
    from tilewright.kernels.sampling.triton import kernels

    groups = groups_of(inputs.vocab)
    chunks = -(-groups // params.groups)
    return launch(
        kernels.best_tokens,
        [inputs.logits, inputs.key, or_absent(inputs.temperature)],
        group_structs(inputs.rows, groups, draws=draws, mass=mass),
        grid=[inputs.rows * chunks],
        scalars={"chunks": chunks},
        constants={**_constants(inputs), "DRAWS": draws, "MASS": mass, "BLOCK": params.groups},
        num_warps=params.num_warps,
        num_stages=1,
    )


def _constants(inputs: SampleInputs) -> dict[str, int]:
    return {
        "VOCAB": inputs.vocab,
        "GROUPS": groups_of(inputs.vocab),
        "HAS_TEMPERATURE": inputs.temperature is not None,
    }


def _draw(inputs: SampleInputs, params: TritonSampleParams) -> tuple[jax.Array, ...]:
    found = _groups(inputs, params, draws=True, mass=inputs.return_log_probs)
    return best_of_rows(found, inputs.temperature, log_probs=inputs.return_log_probs)


def _limited_draw(inputs: SampleInputs, params: TritonSampleParams) -> tuple[jax.Array, ...]:
    from tilewright.kernels.sampling.triton import kernels

    rows, groups, has_p = inputs.rows, groups_of(inputs.vocab), inputs.top_p is not None
    top, *_, mass = _groups(inputs, params, draws=False, mass=has_p)
    options = [or_absent(x) for x in (inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p)]
    constants = _constants(inputs) | {
        "HAS_K": inputs.top_k is not None,
        "HAS_P": has_p,
        "HAS_MIN_P": inputs.min_p is not None,
        "LOG_PROBS": inputs.return_log_probs,
    }
    chosen = launch(
        kernels.chosen_groups,
        [top, mass, *options],
        [
            struct(jnp.int32, rows, groups),
            struct(jnp.int32, rows),
            struct(jnp.uint32, rows),
            struct(jnp.uint32, rows),
            struct(jnp.float32, rows, is_used=has_p),
        ],
        grid=[rows],
        constants=constants | {"BLOCK": power_of_two(groups)},
        num_warps=8,
        num_stages=1,
    )
    scratch = max(groups, kernels.LISTED.value)
    drawn = launch(
        kernels.limited_draw,
        [inputs.logits, inputs.key, *options, *chosen, top],
        [
            struct(jnp.int32, rows),
            struct(jnp.float32, rows, is_used=inputs.return_log_probs),
            struct(jnp.uint32, rows, scratch),
            struct(jnp.int32, rows, scratch),
            struct(jnp.float32, rows, scratch),
        ],
        grid=[rows],
        constants=constants | {"BLOCK": params.chosen_groups, "ROW_BLOCK": power_of_two(groups), "SCRATCH": scratch},
        num_warps=params.row_warps,
        num_stages=1,
    )
    return drawn[: 1 + inputs.return_log_probs]
