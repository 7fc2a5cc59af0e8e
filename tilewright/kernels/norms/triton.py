"""The norms in Triton, on NVIDIA GPUs: one pass over memory forward, one backward."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tilewright.kernels.norms.inputs import NormInputs, NormOptions, NormProblem, NormResults, normed
from tilewright.kernels.registry import Implementation, Platform
from tilewright.kernels.triton_bridge import launch, unavailable
from tilewright.ops.core.types import Device, Direction
from tilewright.ops.utils.device import current_device

MAX_WHOLE_COLUMNS = {"forward": 32768, "backward": 16384}
"""Columns of a row that is kept in registers; wider rows are read twice, a block of columns after the other."""

WIDE_COLUMNS = 4096
"""Columns of a block of such a row."""

MAX_ROWS = 1 << 30
"""Rows are counted in 32 bits."""


def _check(params: Any, **limits: int) -> None:
    for field in dataclasses.fields(params):
        value, most = getattr(params, field.name), limits.get(field.name, 1 << 20)
        if type(value) is not int or not 1 <= value <= most:
            raise ValueError(f"{type(params).__name__} needs an integer from 1 to {most}, got {field.name}={value!r}")
        if field.name not in ("num_programs", "num_stages") and value & (value - 1):
            raise ValueError(f"{type(params).__name__} needs a power of two, got {field.name}={value}")


@dataclasses.dataclass(frozen=True, slots=True)
class NormForwardParams:
    """How the forward kernel is launched.

    Attributes:
      block_columns: no fewer than there are columns, or else a row is read twice.
    """

    rows_per_program: int
    block_columns: int
    num_warps: int

    def __post_init__(self) -> None:
        _check(self, num_warps=32)


@dataclasses.dataclass(frozen=True, slots=True)
class NormBackwardParams:
    """How the backward kernels are launched.

    Attributes:
      block_columns: as forward.
      num_programs: programs that share all rows, each with its own part of the gradients of weight and bias.
      num_stages: tiles that are loaded ahead, and the one at work.
    """

    rows_per_program: int
    block_columns: int
    num_programs: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        _check(self, num_warps=32, num_stages=8)


class TritonNorm(Implementation):
    """Float16, bfloat16 and float32; sums are in float32, in one order."""

    platform: ClassVar[Platform] = Platform.TRITON
    forward_params: ClassVar[type] = NormForwardParams
    backward_params: ClassVar[type] = NormBackwardParams

    def not_supported_reasons(self, problem: NormProblem, device: Device, direction: Direction) -> list[str]:
        why = unavailable(device)
        dtypes = {"x": problem.dtype, "weight": problem.weight_dtype, "bias": problem.bias_dtype}
        for name, dtype in dtypes.items():
            if dtype is not None and dtype.name not in ("float16", "bfloat16", "float32"):
                why.append(f"{name} must be float16, bfloat16 or float32, not {dtype}")
        if problem.rows > MAX_ROWS:
            why.append(f"{problem.rows=} must be at most {MAX_ROWS}")
        return why

    def heuristic(
        self, problem: NormProblem, device: Device, direction: Direction
    ) -> NormForwardParams | NormBackwardParams:
        if direction == "forward":
            return _forward_params(problem, device)
        return _backward_params(problem, device)

    def candidates(self, problem: NormProblem, device: Device, direction: Direction) -> Iterable[Any]:
        best = self.heuristic(problem, device, direction)
        found = _forward_candidates(problem) if direction == "forward" else _backward_candidates(problem, device)
        return [params for params in dict.fromkeys(found) if params != best]

    def config_reasons(self, problem: NormProblem, device: Device, direction: Direction, params: Any) -> list[str]:
        """A row that is kept whole must fit into registers; one that is not is alone in its program."""
        why = []
        per_thread = params.rows_per_program * params.block_columns / (32 * params.num_warps)
        most = 64 if direction == "forward" else 32
        if per_thread > most:
            why.append(f"{per_thread:g} elements of each thread do not fit into registers; at most {most} do")
        if direction == "forward" and params.block_columns < problem.columns and params.rows_per_program > 1:
            why.append(f"{params.rows_per_program=} must be 1 where {params.block_columns=} does not cover the columns")
        return why

    def forward(self, inputs: NormInputs, params: NormForwardParams) -> NormResults:
        shape, columns = inputs.x.shape, inputs.x.shape[-1]
        by_row = [None if x is None else x.reshape(1, -1, columns) for x in (inputs.x, inputs.residual)]
        shared = [None if x is None else x[None] for x in (inputs.weight, inputs.bias)]
        found = _over_groups(functools.partial(_forward, options=inputs.options, params=params), by_row, shared)
        out, total = found
        return NormResults(out.reshape(shape), None if total is None else total.reshape(shape))

    def backward(
        self, inputs: NormInputs, results: NormResults, cotangents: NormResults, params: NormBackwardParams
    ) -> dict[str, Any]:
        """One array is the gradient of x and of the residual."""
        shape, columns = inputs.x.shape, inputs.x.shape[-1]
        arrays = (normed(inputs, results), cotangents.out, cotangents.total)
        by_row = [None if x is None else x.reshape(1, -1, columns) for x in arrays]
        shared = [None if x is None else x[None] for x in (inputs.weight, inputs.bias)]
        found = _over_groups(functools.partial(_backward, options=inputs.options, params=params), by_row, shared)
        d_x, d_weight, d_bias = found
        gradients = {"x": d_x.reshape(shape)}
        if inputs.residual is not None:
            gradients["residual"] = gradients["x"]
        if inputs.weight is not None:
            gradients["weight"] = d_weight[0]
        if inputs.bias is not None:
            gradients["bias"] = d_bias[0]
        return gradients


def _leaves(cotangents: NormResults) -> tuple[Any, Any]:
    return cotangents.out, cotangents.total


def _over_groups(run: Callable[[Any, Any], Any], by_row: Any, shared: Any) -> Any:
    """``run(by_row, shared)``, of which every array has groups as its first axis; under ``vmap`` there are more.

    What ``shared`` holds has one group for all or as many as there are.
    """

    @jax.custom_batching.custom_vmap
    def call(by_row: Any, shared: Any) -> Any:
        return run(by_row, shared)

    @call.def_vmap
    def _(size: int, batched: Any, by_row: Any, shared: Any) -> Any:
        groups = by_row[0].shape[1 if batched[0][0] else 0]

        def merged(array: Any, is_batched: bool) -> Any:
            array = array if is_batched else array[None]
            return jnp.broadcast_to(array, (size, groups, *array.shape[2:])).reshape(-1, *array.shape[2:])

        by_row = jax.tree.map(merged, by_row, batched[0])
        if any(jax.tree.leaves(batched[1])) or any(x.shape[0] > 1 for x in jax.tree.leaves(shared)):
            shared = jax.tree.map(merged, shared, batched[1])
        found = _over_groups(run, by_row, shared)
        found = jax.tree.map(lambda x: x.reshape(size, groups, *x.shape[1:]), found)
        return found, jax.tree.map(lambda _: True, found)

    return call(by_row, shared)


def _struct(shape: tuple[int, ...], dtype: Any, wanted: bool = True) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape if wanted else (0,), dtype)


def _forward(by_row: Any, shared: Any, options: NormOptions, params: NormForwardParams) -> Any:
    from tilewright.kernels.norms import triton_kernels

    (x, residual), (weight, bias) = by_row, shared
    shape = x.shape
    if all(array.shape[0] == 1 for array in jax.tree.leaves(shared)):  # of one weight all rows are of one group
        x, residual = jax.tree.map(lambda array: array.reshape(1, -1, shape[2]), (x, residual))
    groups, rows, columns = x.shape
    if shape[0] > 1:  # params are for one of them
        problem = NormProblem.of(NormInputs(x, residual, weight, bias, options))
        params = _forward_params(problem, current_device())
    whole = params.block_columns >= columns
    absent = jnp.zeros((0,), x.dtype)
    tiles = -(-rows // params.rows_per_program)
    out, total = launch(
        triton_kernels.forward if whole else triton_kernels.forward_wide,
        [x, *(absent if array is None else array for array in (residual, weight, bias))],
        [_struct(x.shape, x.dtype), _struct(x.shape, x.dtype, residual is not None)],
        grid=[groups * tiles],
        scalars={"rows": rows, "tiles": tiles},
        constants={
            "columns": columns,
            "block_rows": params.rows_per_program,
            "block_columns": params.block_columns,
            "layer": options.kind == "layer",
            "has_residual": residual is not None,
            "has_weight": weight is not None,
            "has_bias": bias is not None,
            "eps": float(options.eps),
            "weight_offset": float(options.weight_offset),
            "weight_stride": columns if groups > 1 else 0,
        },
        num_warps=params.num_warps,
        num_stages=2,
    )
    return out.reshape(shape), None if residual is None else total.reshape(shape)


def _backward(by_row: Any, shared: Any, options: NormOptions, params: NormBackwardParams) -> Any:
    from tilewright.kernels.norms import triton_kernels

    (x, d_out, d_total), (weight, bias) = by_row, shared
    groups, rows, columns = x.shape
    if groups > 1:
        problem = NormProblem.of(NormInputs(x, None, weight, bias, options))
        params = _backward_params(problem, current_device())
    tiles = -(-rows // params.rows_per_program)
    programs = max(min(params.num_programs // groups, tiles), 1)
    whole, layer, f32 = params.block_columns >= columns, options.kind == "layer", jnp.float32
    absent = jnp.zeros((0,), f32)
    weight_stride = 0 if weight is None or weight.shape[0] == 1 else columns
    common = {
        "columns": columns,
        "block_columns": params.block_columns,
        "layer": layer,
        "has_weight": weight is not None,
        "eps": float(options.eps),
        "weight_offset": float(options.weight_offset),
        "weight_stride": weight_stride,
    }
    scale = absent if weight is None else weight
    sums = absent
    if not whole:
        (sums,) = launch(
            triton_kernels.row_sums,
            [x, scale, d_out],
            [_struct((5, groups, rows), f32)],
            grid=[groups * rows],
            scalars={"rows": rows},
            constants=common,
            num_warps=8,
        )
    parts = (groups, programs, columns)
    d_x, d_weight, d_bias = launch(
        triton_kernels.backward,
        [x, scale, d_out, absent if d_total is None else d_total, sums],
        [
            _struct(x.shape, x.dtype),
            *(
                _struct(parts, f32, False) if array is None else _struct(parts, f32 if programs > 1 else array.dtype)
                for array in (weight, bias)
            ),
        ],
        grid=[groups * programs, 1 if whole else -(-columns // params.block_columns)],
        scalars={"rows": rows, "programs": programs},
        constants=common
        | {
            "grouped": groups > 1,
            "block_rows": params.rows_per_program,
            "has_bias": bias is not None,
            "has_d_total": d_total is not None,
            "stages": params.num_stages,
        },
        num_warps=params.num_warps,
        num_stages=params.num_stages,
    )
    if programs > 1 and (weight is not None or bias is not None):
        block_columns = min(max(_power(columns) // 128, 16), 64)
        d_weight, d_bias = launch(
            triton_kernels.sum_partials,
            [d_weight, d_bias],
            [
                _struct((groups, columns), f32, False) if array is None else _struct((groups, columns), array.dtype)
                for array in (weight, bias)
            ],
            grid=[-(-columns // block_columns), groups],
            constants={
                "columns": columns,
                "programs": programs,
                "block_programs": min(_power(programs), 64),
                "block_columns": block_columns,
                "has_weight": weight is not None,
                "has_bias": bias is not None,
            },
            num_warps=4,
        )
    return (
        d_x,
        None if weight is None else d_weight.reshape(groups, columns),
        None if bias is None else d_bias.reshape(groups, columns),
    )


def _forward_params(problem: NormProblem, device: Device) -> NormForwardParams:
    """Four loads of 16 bytes for each thread, one where there are fewer rows than multiprocessors."""
    block, vector, cores = _power(problem.columns), 16 // problem.dtype.itemsize, max(device.cores, 1)
    if block > MAX_WHOLE_COLUMNS["forward"]:
        return NormForwardParams(1, WIDE_COLUMNS, 8)
    per_thread = vector if problem.rows <= cores else 4 * vector
    if block >= 32 * vector:  # a row is for one warp at least: no more rows than fill the threads of one
        warps = min(max(block // (32 * per_thread), 1), 32)
        rows = max(32 * per_thread // block, 1)
    else:
        warps = 4 if problem.rows * block >= 8 * cores * 128 * per_thread else 1
        rows = 32 * warps * per_thread // block
    while rows > 1 and problem.rows < 4 * cores * rows:
        rows //= 2
    return NormForwardParams(rows, block, warps)


def _backward_params(problem: NormProblem, device: Device) -> NormBackwardParams:
    block, cores = _power(problem.columns), max(device.cores, 1)
    if block > MAX_WHOLE_COLUMNS["backward"]:
        return _balanced(problem, 4, 1024, 2 * cores, 4, 2)
    warps = min(max(block // 512, 4), 16)
    rows = max(32 * warps * 16 // block, 1)
    while rows > 1 and problem.rows < 2 * cores * rows:
        rows //= 2
    return _balanced(problem, rows, block, cores * max(16 // warps, 1), warps, 3 if block >= 512 else 2)


def _balanced(
    problem: NormProblem, rows: int, block: int, programs: int, warps: int, stages: int
) -> NormBackwardParams:
    """With as few programs as have no more tiles each: fewer shares are to be added, and programs end together."""
    tiles = max(-(-problem.rows // rows), 1)
    programs = -(-tiles // -(-tiles // programs))
    return NormBackwardParams(rows, block, programs, warps, stages)


def _forward_candidates(problem: NormProblem) -> Iterable[NormForwardParams]:
    block, vector = _power(problem.columns), 16 // problem.dtype.itemsize
    if block > MAX_WHOLE_COLUMNS["forward"]:
        for wide, warps in itertools.product((2048, 4096, 8192, 16384), (4, 8, 16, 32)):
            if wide in (32 * warps * vector, 64 * warps * vector):
                yield NormForwardParams(1, wide, warps)
        return
    for rows, warps in itertools.product((1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8, 16, 32)):
        per_thread = rows * block // (32 * warps)
        if vector <= per_thread <= 8 * vector and per_thread <= 64 and (rows == 1 or problem.rows > rows):
            yield NormForwardParams(rows, block, warps)


def _backward_candidates(problem: NormProblem, device: Device) -> Iterable[NormBackwardParams]:
    block, cores = _power(problem.columns), max(device.cores, 1)
    whole = block <= MAX_WHOLE_COLUMNS["backward"]
    for columns in (block,) if whole else (512, 1024, 2048):
        for rows, warps in itertools.product((1, 2, 4, 8, 16, 32), (2, 4, 8, 16, 32)):
            if not 8 <= rows * columns / (32 * warps) <= 32 or (rows > 1 and problem.rows <= rows):
                continue
            for share, stages in itertools.product((1, 2, 4, 8, 16), (2, 3)):
                if 8 <= share * warps <= 32 or share == 1:
                    yield _balanced(problem, rows, columns, share * cores, warps, stages)


def _power(size: int) -> int:
    """The least power of two that is not below."""
    return 1 << max(size - 1, 0).bit_length()
