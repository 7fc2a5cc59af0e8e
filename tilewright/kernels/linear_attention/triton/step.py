"""A step of linear attention in Triton, on NVIDIA GPUs: every state is read once and written once, in place."""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp

from tilewright.kernels.linear_attention.step_inputs import StepInputs, Stepped
from tilewright.kernels.op.backend import InferenceBackend
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.state_pools import exists
from tilewright.kernels.triton import launch, unavailable
from tilewright.kernels.triton.batching import over_batch
from tilewright.kernels.triton.limits import power_of_two
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.stable_ids import stable_id

DTYPES = ("float16", "bfloat16", "float32")

POOL_DTYPES = ("bfloat16", "float32")

KEPT = 128
"""Elements of a state that a thread may hold in registers; more would spill."""

MAX_KEY_DIM = 2048
"""Elements of a key, all of which one program has: its sums over them are complete."""

MAX_PROGRAMS = (1 << 31) - 1

PER_THREAD = 64
"""Elements of a state of each thread: a step is bound by instructions as much as by memory, and with more elements of a
thread its own sums are longer, and those over threads fewer."""

TILE_ELEMENTS = {4: 8192, 2: 4096}
"""Elements of a state of a program, by the bytes of one, of 256 rows on a Hopper GPU: 0.93 and 0.86 of a copy's speed.
With half as many or twice as many threads for a tile it is 0.71 to 0.87, and 0.76 to 0.81."""

SECTOR_BYTES = 32
"""Bytes that memory is read in: rows of a tile are not shorter."""


@stable_id("tilewright/linear_attention.TritonStepParams")
@dataclasses.dataclass(frozen=True, slots=True)
class TritonStepParams:
    """Config of the kernel.

    Attributes:
      block_v: elements of the value dimension of a program.
      num_warps: warps of a program.
    """

    block_v: int
    num_warps: int

    def __post_init__(self) -> None:
        for name, maximum in (("block_v", 1024), ("num_warps", 16)):
            value = getattr(self, name)
            if type(value) is not int or value & (value - 1) or not 1 <= value <= maximum:
                raise ValueError(f"{name} must be a power of two from 1 to {maximum}, got {self}")


class TritonLinearAttentionStep(InferenceBackend[StepInputs, Stepped, TritonStepParams]):
    """Serves float16, bfloat16 and float32, and pools of bfloat16 and float32; repeats bit for bit."""

    name: ClassVar[str] = "triton"
    platform: ClassVar[Platform] = Platform.TRITON
    forward_params: ClassVar[type] = TritonStepParams
    late_import: ClassVar[str] = "triton"
    keeps_lowering: ClassVar[bool] = True
    serves: ClassVar[frozenset[str]] = frozenset(
        {
            "log_decay", "beta", "removal_read", "removal_write", "bonus", "state_indices", "write_indices",
            "qk_l2norm", "l2norm_eps", "state_layout",
        }
    )  # fmt: skip

    def forward_reasons(self, inputs: StepInputs, device: Device) -> list[str]:
        reasons = unavailable(device)
        for name, array in inputs.arrays.items():
            if array is None or name.endswith("indices"):
                continue
            served = POOL_DTYPES if name == "state_pool" else DTYPES
            if array.dtype.name not in served:
                reasons.append(f"{name} must have one of the dtypes {served}, not {array.dtype}")
        if inputs.key_dim > MAX_KEY_DIM:
            reasons.append(f"key_dim={inputs.key_dim} must be at most {MAX_KEY_DIM}")
        if inputs.batch * inputs.value_heads * inputs.value_dim > MAX_PROGRAMS:
            reasons.append(f"{inputs.batch} rows of {inputs.value_heads} heads are more programs than a launch has")
        return reasons

    def heuristic(self, inputs: StepInputs, device: Device, direction: Direction) -> TritonStepParams:
        """Tiles of ``TILE_ELEMENTS``, or shorter ones where there would be fewer programs than SMs have room for."""
        size, block_k = inputs.state_pool.dtype.itemsize, power_of_two(inputs.key_dim)
        most = power_of_two(inputs.value_dim)
        least = min(most, SECTOR_BYTES // size if inputs.state_layout == "kv" else 4)
        block_v = min(max(TILE_ELEMENTS[size] // block_k, least), most)
        programs = inputs.batch * inputs.value_heads * -(-inputs.value_dim // block_v)
        while programs < 2 * device.cores and block_v > least:
            block_v, programs = block_v // 2, programs * 2
        return TritonStepParams(block_v, min(max(block_k * block_v // (32 * PER_THREAD), 1), 16))

    def candidates(self, inputs: StepInputs, device: Device, direction: Direction) -> Iterable[TritonStepParams]:
        best = self.heuristic(inputs, device, direction)
        block_k, most = power_of_two(inputs.key_dim), power_of_two(inputs.value_dim)
        found = [best]
        for block_v, warps in itertools.product((4, 8, 16, 32, 64, 128), (1, 2, 4, 8)):
            if block_v <= most and 4 <= block_k * block_v // (32 * warps) <= KEPT:
                found.append(TritonStepParams(block_v, warps))
        return list(dict.fromkeys(found))

    def config_reasons(
        self, inputs: StepInputs, device: Device, direction: Direction, params: TritonStepParams
    ) -> list[str]:
        kept = power_of_two(inputs.key_dim) * params.block_v // (32 * params.num_warps)
        return [f"{kept} elements of each thread do not fit into registers; {KEPT} do"] if kept > KEPT else []

    def forward(self, inputs: StepInputs, params: TritonStepParams) -> Stepped:
        """The output, and the pool, which is updated in place if it is donated."""
        if inputs.is_empty():
            return jnp.zeros(inputs.value.shape, inputs.value.dtype), inputs.state_pool
        arrays = inputs.arrays
        by_head = ["bonus", "log_decay"] if inputs.gate == "head" else ["bonus"]
        names = [name for name, x in arrays.items() if x is not None and name not in by_head]
        shared = {name: arrays[name][None] for name in by_head if arrays[name] is not None}
        call = functools.partial(_run, names=names, inputs=inputs.structs, params=params)
        out, pool = over_batch(call, [arrays[name][None] for name in names], shared)
        return out[0], pool[0]


def _run(
    mapped: Sequence[jax.Array],
    shared: dict[str, jax.Array],
    names: Sequence[str],
    inputs: StepInputs,
    params: TritonStepParams,
) -> tuple[jax.Array, jax.Array]:
    """The results of several calls, whose arrays have a first axis of calls, as one launch over all their rows."""
    from tilewright.kernels.linear_attention.triton import step_kernels

    calls, rows, slots = mapped[0].shape[0], inputs.batch, inputs.slots
    given = {name: x.reshape(-1, *x.shape[2:]) for name, x in zip(names, mapped, strict=True)}
    given |= shared
    if calls > 1:
        for name in {"state_indices", "write_indices"} & given.keys():
            first = jnp.repeat(jnp.arange(calls, dtype=jnp.int32) * slots, rows)
            given[name] = jnp.where(exists(given[name], slots), given[name] + first, -1)
    pool, value = given.pop("state_pool"), given["value"]
    absent = jnp.zeros((0,), jnp.float32)
    order = ("query", "key", "value", "log_decay", "beta", "removal_read", "removal_write", "bonus")
    operands = [*(given.get(name, absent) for name in order)]
    operands += [given.get(name, absent.astype(jnp.int32)) for name in ("state_indices", "write_indices")]
    blocks = -(-inputs.value_dim // params.block_v)
    out, pool = launch(
        step_kernels.step,
        [*operands, pool],
        [jax.ShapeDtypeStruct(value.shape, value.dtype), jax.ShapeDtypeStruct(pool.shape, pool.dtype)],
        grid=[calls * rows * inputs.value_heads * blocks],
        scalars={"slots": calls * slots, "rows_each": rows},
        constants={
            "tokens": inputs.tokens, "heads": inputs.heads, "value_heads": inputs.value_heads,
            "key_dim": inputs.key_dim, "value_dim": inputs.value_dim, "scale": inputs.scale, "eps": inputs.l2norm_eps,
            "gate": inputs.gate, "has_beta": "beta" in given, "has_removal": inputs.removal is not None,
            "has_bonus": "bonus" in given, "has_state_indices": "state_indices" in given,
            "has_write_indices": "write_indices" in given, "l2norm": inputs.qk_l2norm,
            "values_first": inputs.state_layout == "vk", "repeated": any(x.shape[0] > 1 for x in shared.values()),
            "block_k": power_of_two(inputs.key_dim), "block_v": params.block_v,
        },
        in_place={1: len(operands)},
        num_warps=params.num_warps,
    )  # fmt: skip
    return out.reshape(calls, rows, *value.shape[1:]), pool.reshape(calls, slots, *pool.shape[1:])
