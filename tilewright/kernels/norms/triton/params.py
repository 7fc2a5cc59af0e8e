"""Configs of the norms' Triton kernels: params, heuristics, and candidates for tuning."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator

from tilewright.kernels.norms.inputs import NormInputs
from tilewright.kernels.op.footprint import Footprint, launch_reasons, max_shared_bytes
from tilewright.kernels.triton.limits import power_of_two
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.stable_ids import stable_id

VECTOR_BYTES = 16
"""Bytes that a thread loads with one instruction."""

MAX_KEPT = {"forward": 64, "backward": 36}
"""Elements of rows that a thread may hold in registers: more would spill."""

MAX_KEPT_BYTES = {"forward": 64 << 10, "backward": 32 << 10}
"""Bytes of a program's rows: 1024 threads forward, 512 backward, with registers for 64 bytes of each array."""

STAGED_BYTES = 64 << 10
"""Bytes of x and d_out that an SM of an H100 must have in flight to reach its memory bandwidth."""

MAX_CANDIDATES = 40

MIN_PROGRAMS = 5
"""SMs per program, at most, backward with few rows; more programs would mean more partial sums to add up."""

_NOT_POWERS_OF_TWO = ("num_programs", "num_stages")


def power_below(size: float) -> int:
    """The largest power of two that is at most ``size``; at least 1."""
    return 1 << max(int(size).bit_length() - 1, 0)


def _check(params: "NormForwardParams | NormBackwardParams", **limits: int) -> None:
    """Raises a ValueError unless each field is an integer within its limit and, where needed, a power of two."""
    for field in dataclasses.fields(params):
        value, maximum = getattr(params, field.name), limits.get(field.name, 1 << 20)
        if type(value) is not int or not 1 <= value <= maximum:
            raise ValueError(
                f"{type(params).__name__} needs an integer from 1 to {maximum}, got {field.name}={value!r}"
            )
        if field.name not in _NOT_POWERS_OF_TWO and value & (value - 1):
            raise ValueError(f"{type(params).__name__} needs a power of two, got {field.name}={value}")


@stable_id("tilewright/norms.NormForwardParams")
@dataclasses.dataclass(frozen=True, slots=True)
class NormForwardParams:
    """Config of the forward kernel.

    Attributes:
      rows_per_program: rows that a program norms at once.
      block_columns: columns of a block; with one pass all blocks of a row are in registers, with two one at a time.
      num_warps: warps of a program.
      passes: 1 holds a program's rows in registers, 2 reads them twice.
    """

    rows_per_program: int
    block_columns: int
    num_warps: int
    passes: int = 1

    def __post_init__(self) -> None:
        _check(self, num_warps=32, passes=2)


@stable_id("tilewright/norms.NormBackwardParams")
@dataclasses.dataclass(frozen=True, slots=True)
class NormBackwardParams:
    """Config of the backward kernels.

    Attributes:
      rows_per_program, block_columns, num_warps, passes: as forward.
      num_programs: persistent programs over which rows are spread, each with partial gradients of weight and bias.
      num_stages: tiles that are in flight or in use; with 1 there is no pipeline.
    """

    rows_per_program: int
    block_columns: int
    num_programs: int
    num_warps: int
    num_stages: int
    passes: int = 1

    def __post_init__(self) -> None:
        _check(self, num_warps=32, num_stages=8, passes=2)


def kept_elements(inputs: NormInputs, params: NormForwardParams | NormBackwardParams) -> int:
    """Elements of rows in the registers of a thread, with one pass."""
    blocks = -(-inputs.columns // params.block_columns)
    return -(-params.rows_per_program * blocks * params.block_columns // (32 * params.num_warps))


def params_reasons(
    inputs: NormInputs, direction: Direction, params: NormForwardParams | NormBackwardParams
) -> list[str]:
    """Reasons why params cannot serve a problem: with one pass, a program's rows must fit into registers."""
    reasons = []
    kept, maximum = kept_elements(inputs, params), MAX_KEPT[direction]
    if params.passes == 1 and kept > maximum:
        reasons.append(f"{kept} elements of rows of each thread do not fit into registers; at most {maximum} do")
    row_bytes, maximum = params.rows_per_program * inputs.row_bytes, MAX_KEPT_BYTES[direction]
    if params.passes == 1 and row_bytes > maximum:
        reasons.append(f"{row_bytes} bytes of rows do not fit into the registers of a program; at most {maximum} do")
    if params.passes == 2 and direction == "forward" and params.rows_per_program > 1:
        reasons.append(f"with {params.passes=} a program norms one row, got {params.rows_per_program=}")
    return reasons


def footprint(inputs: NormInputs, direction: Direction, params: NormForwardParams | NormBackwardParams) -> Footprint:
    """Threads of a block; backward also its shared memory: the tiles in flight and scratch of the reductions."""
    threads = 32 * params.num_warps
    if not isinstance(params, NormBackwardParams):
        return Footprint(threads=threads)
    blocks = -(-inputs.columns // params.block_columns) if params.passes == 1 else 1
    arrays = 3 if inputs.residual is not None else 2
    # The tile in use is in registers; the others wait in shared memory. A reduction takes a float32 of each thread.
    tile = params.rows_per_program * blocks * params.block_columns * inputs.x.dtype.itemsize
    return Footprint(threads=threads, shared_bytes=(params.num_stages - 1) * arrays * tile + 4 * threads)


def forward_params(inputs: NormInputs, device: Device) -> NormForwardParams:
    """Heuristic: one 16-byte load per thread for rows of up to 4 KB, two up to 16 KB; more for few or wide rows."""
    vector, sms = VECTOR_BYTES // inputs.x.dtype.itemsize, max(device.cores, 1)
    vectors = max(inputs.columns / vector, 1)
    if inputs.row_bytes > MAX_KEPT_BYTES["forward"]:
        return NormForwardParams(1, 32 * 32 * vector, 32, passes=2)
    # Vectors over the 32 threads of a warp, times the loads of a thread: four for few rows, else one or two.
    if inputs.rows <= sms:
        warps = min(power_below(vectors / 128), 16)
    elif vectors <= 256:
        warps = power_below(vectors / 32)
    else:
        warps = min(max(power_below(vectors / 64), 8), 16)
    if vectors > 128 * warps:
        warps = min(power_of_two(math.ceil(vectors / 128)), 32)
    rows = 1
    # Narrow rows: at most two loads of a warp. Of 128 bfloat16, 64 rows a program took 12.6 µs, 32 rows 13.6.
    if vectors <= 64:
        rows = power_below(128 / vectors) * (1 if vectors >= 32 else 8)
        # At least four programs for each SM.
        while rows > 1 and inputs.rows < 4 * sms * rows:
            rows //= 2
        warps = min(power_of_two(math.ceil(rows * vectors / 32)), 4)
    return NormForwardParams(rows, _block_columns(inputs, rows, warps), warps)


def _block_columns(inputs: NormInputs, rows: int, warps: int) -> int:
    """A block that covers the columns; where padding it to a power of two would idle many threads, one load of each."""
    block, vector = power_of_two(inputs.columns), VECTOR_BYTES // inputs.x.dtype.itemsize
    if block < (1.25 if rows == 1 else 1.5) * inputs.columns:
        return block
    return min(block, max(32 * warps * vector // rows, 16))


def backward_params(inputs: NormInputs, device: Device) -> NormBackwardParams:
    """Heuristic: tiles of 16 KB of x for each SM, in one program or several, and as many stages as memory needs."""
    size, sms = inputs.x.dtype.itemsize, max(device.cores, 1)
    if inputs.row_bytes > MAX_KEPT_BYTES["backward"]:
        return _balanced(NormBackwardParams(1, 2048 // size, sms, 2, 2, passes=2), inputs, sms)
    per_sm = min(power_below(8192 / inputs.row_bytes), 8)
    rows = power_below(16384 / (per_sm * inputs.row_bytes))
    while rows > 1 and inputs.rows * MIN_PROGRAMS < sms * rows:
        rows //= 2
    if inputs.kind == "layer" and inputs.row_bytes <= 512:
        # A layer norm waits for one more reduction: more programs hide it, and smaller tiles leave registers for them.
        rows, per_sm = max(rows // 2, 1), 2 * per_sm
    warps = power_of_two(math.ceil(rows * inputs.columns / 640))  # 10 to 20 elements per thread
    return _backward_params(inputs, device, rows, per_sm, min(max(warps, 2), 16))


def _backward_params(inputs: NormInputs, device: Device, rows: int, per_sm: int, warps: int) -> NormBackwardParams:
    """Params for a tile of ``rows``, with the blocks and stages that go with them; ``per_sm`` programs share an SM."""
    block, sms = _block_columns(inputs, rows, warps), max(device.cores, 1)
    tile_bytes = 2 * per_sm * rows * inputs.row_bytes
    stages = min(max(1 + round(STAGED_BYTES / tile_bytes), 3), 5)
    params = _balanced(NormBackwardParams(rows, block, per_sm * sms, warps, stages), inputs, per_sm * sms)
    # An SM has 228 KB, and each CTA takes 1 KB of it for the system; a CTA has 99 KB of it where an SM has 100.
    most = min((224 << 10) // per_sm, max_shared_bytes(device, 224 << 10))
    while (footprint(inputs, "backward", params).shared_bytes or 0) > most and params.num_stages > 2:
        params = dataclasses.replace(params, num_stages=params.num_stages - 1)
    return params


def _balanced(params: NormBackwardParams, inputs: NormInputs, programs: int) -> NormBackwardParams:
    """Lowers ``num_programs`` as far as no program gets more tiles: fewer partial sums, and programs end together.

    Programs of one tile have nothing to prefetch: they get one stage.
    """
    tiles = max(-(-inputs.rows // params.rows_per_program), 1)
    each = -(-tiles // programs)
    stages = 1 if each == 1 else params.num_stages
    return dataclasses.replace(params, num_programs=-(-tiles // each), num_stages=stages)


def candidates(
    inputs: NormInputs, device: Device, direction: Direction
) -> list[NormForwardParams] | list[NormBackwardParams]:
    """Params that are worth measuring beside the heuristic's, those nearest to it first."""

    def nearest[P: (NormForwardParams, NormBackwardParams)](best: P, found: Iterable[P]) -> list[P]:
        able = [
            params
            for params in dict.fromkeys(found)
            if params != best
            and not params_reasons(inputs, direction, params)
            and not launch_reasons([footprint(inputs, direction, params)], device)
        ]
        return sorted(able, key=lambda params: _distance(best, params))[:MAX_CANDIDATES]

    if direction == "forward":
        return nearest(forward_params(inputs, device), _forward_candidates(inputs))
    return nearest(backward_params(inputs, device), _backward_candidates(inputs, device))


def _distance(best: NormForwardParams | NormBackwardParams, params: NormForwardParams | NormBackwardParams) -> float:
    """Number of doublings or halvings of fields between two params."""
    pairs = zip(dataclasses.astuple(best), dataclasses.astuple(params), strict=True)
    return sum(abs(math.log2(left / right)) for left, right in pairs)


def _forward_candidates(inputs: NormInputs) -> Iterator[NormForwardParams]:
    """Params with one to eight loads of each thread, and with two passes for rows beyond 16 KB."""
    vector = VECTOR_BYTES // inputs.x.dtype.itemsize
    for rows, warps in itertools.product((1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8, 16, 32)):
        if rows > 1 and inputs.rows <= rows:
            continue
        params = NormForwardParams(rows, _block_columns(inputs, rows, warps), warps)
        if vector <= kept_elements(inputs, params) <= min(8 * vector, MAX_KEPT["forward"]):
            yield params
    if inputs.row_bytes > 16 << 10:
        for loads, warps in itertools.product((1, 2), (8, 16, 32)):
            yield NormForwardParams(1, loads * 32 * warps * vector, warps, passes=2)


def _backward_candidates(inputs: NormInputs, device: Device) -> Iterator[NormBackwardParams]:
    """Params with other tiles, programs per SM, warps and stages."""
    sms, size = max(device.cores, 1), inputs.x.dtype.itemsize
    if inputs.row_bytes <= MAX_KEPT_BYTES["backward"]:
        for rows, per_sm, warps in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16, 32)):
            sm_bytes = rows * per_sm * inputs.row_bytes
            per_thread = rows * inputs.columns / (32 * warps)
            if sm_bytes > max(1 << 15, inputs.row_bytes) or sm_bytes < 1 << 12 or not 4 <= per_thread <= 32:
                continue
            if rows > 1 and inputs.rows < rows:
                continue
            base = _backward_params(inputs, device, rows, per_sm, warps)
            for stages in dict.fromkeys((base.num_stages, 1, 2, 3, 4)):
                if base.num_stages > 1 or stages == 1:
                    yield dataclasses.replace(base, num_stages=stages)
    if inputs.row_bytes >= MAX_KEPT_BYTES["backward"]:
        for rows, columns, warps, stages in itertools.product((1, 2), (1024, 2048), (2, 4), (2, 3)):
            params = NormBackwardParams(rows, columns * 2 // size, sms, warps, stages, passes=2)
            yield _balanced(params, inputs, sms)
