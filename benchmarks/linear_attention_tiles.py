"""The kernels of linear attention in Triton one by one on a GPU: microseconds by tile, warps and stages.

Every kernel of a call's forward and backward pass runs with the arrays that the call gives it. Tiles are ``BLOCK_K``,
``BLOCK_V``, warps and stages; 0 leaves a block as the heuristic has it. A pass that updates an array in place is timed
with a copy of that array. All are compiled first, by as many processes as there are cores. Kernels of decays of
channels take longer where decays are strong: ``--decays 25`` multiplies their logarithms by 25.

  python -m benchmarks.linear_attention_tiles [--case NAME] [--kernel NAME] [--decays FACTOR]
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks.common import interleaved, queued, record
from benchmarks.linear_attention_gpu import CASES, KERNEL, drawn
from tilewright.kernels.linear_attention import inverse
from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs, LinearAttentionResults
from tilewright.kernels.linear_attention.triton import calls, channel_calls, removal_calls
from tilewright.kernels.linear_attention.triton.backend import TritonLinearAttention, passes_of
from tilewright.kernels.triton import launch, recorded_launches
from tilewright.kernels.triton.compiler import compiled
from tilewright.kernels.triton.description import Launch
from tilewright.ops.kernel.prepared import prepared
from tilewright.ops.types import Device
from tilewright.ops.utils.device import current_device

type Tile = tuple[int, int, int, int]


def tiles(text: str) -> list[Tile]:
    """Tiles from their numbers, such as ``64,64,4,2 0,128,8,3``."""
    found = [tuple(int(number) for number in each.split(",")) for each in text.split()]
    return [(block_k, block_v, warps, stages) for block_k, block_v, warps, stages in found]


TILES: dict[str, list[Tile]] = {
    "chunk_inverse": tiles("0,0,1,2 0,0,1,1 0,0,2,2"),
    "chunk_states": tiles("0,64,4,2 0,64,4,3 0,64,4,4 0,64,8,3 0,128,8,2 0,128,8,3 0,32,4,3 0,32,4,4 0,16,4,3"),
    "chunk_outputs": tiles("64,64,4,2 64,64,4,1 64,128,4,1 64,128,8,2 128,64,4,1 128,128,4,1 128,128,8,1"),
    "local_gradients": tiles("64,64,4,1 64,64,4,2 64,64,8,1 128,64,4,1 128,128,4,1"),
    "state_gradients": tiles("0,128,8,2 0,64,4,2 0,64,4,3 0,64,8,2 0,32,4,2 0,32,4,3 0,16,4,2"),
    "pair_gradients": tiles("0,64,4,1 0,64,4,2 0,64,8,1 0,128,4,1"),
    "query_gradients": tiles("64,64,4,1 64,64,4,2 64,64,8,1 64,128,4,1 64,128,8,1 128,64,8,1"),
    "key_gradients": tiles("64,64,4,1 64,64,4,2 64,64,8,1 64,128,4,1 32,64,4,1 128,64,8,1"),
    "channel_gates": tiles("32,0,4,2 64,0,4,2 128,0,4,2 32,0,2,2"),
    "channel_scores": tiles("32,0,8,1 32,0,8,2 32,0,4,1 16,0,8,1 64,0,8,1"),
    "channel_scores_of_halves": tiles("32,0,8,1 32,0,8,2 32,0,4,1 64,0,8,1"),
    "invert_in_place": tiles("0,0,1,2 0,0,2,2"),
    "channel_states": tiles("0,32,4,2 0,32,4,3 0,64,4,2 0,64,8,2 0,16,4,2"),
    "channel_outputs": tiles("64,64,4,2 64,64,4,1 64,128,8,2 128,128,8,1"),
    "channel_state_gradients": tiles("0,32,4,2 0,64,8,2 0,16,4,2"),
    "channel_pair_gradients": tiles("0,32,8,1 0,64,8,1 0,64,4,1"),
    "channel_token_gradients": tiles("32,32,8,1 32,64,8,1 64,32,8,1 64,64,8,1 32,32,4,1"),
    "removal_scores": tiles("16,0,8,1 32,0,8,1 64,0,8,1 16,0,4,1"),
    "removal_scores_of_halves": tiles("16,0,8,1 32,0,8,1 64,0,8,1"),
    "removal_states": tiles("0,32,4,2 0,64,4,2 0,16,4,2"),
    "removal_outputs": tiles("64,64,4,2 64,64,4,1"),
    "removal_token_gradients": tiles("16,16,8,1 32,32,8,1 64,32,8,1 16,32,8,1"),
}
BY_CHANNELS_OF_KEYS = (
    "query_gradients",
    "key_gradients",
    "channel_gates",
    "channel_token_gradients",
    "removal_token_gradients",
)
BY_CHANNELS_OF_VALUES = (
    "chunk_states", "state_gradients", "chunk_outputs", "channel_states", "channel_outputs", "channel_state_gradients",
    "removal_states", "removal_outputs",
)  # fmt: skip


def both(inputs: LinearAttentionInputs, d_out: jax.Array, device: Device) -> None:
    """Launches what the two passes of a call launch."""
    backend = TritonLinearAttention()
    forward, backward = (backend.heuristic(inputs.structs, device, each) for each in ("forward", "backward"))
    passes = passes_of(inputs)
    passes.forward(inputs, forward)
    passes.backward(inputs, LinearAttentionResults(d_out, None), backward)


def launches(case: str, device: Device) -> dict[str, Launch]:
    """The last launch of each kernel of a call, by its name."""
    args, kwargs = CASES[case].abstract_arguments()
    inputs = KERNEL.inputs_of(prepared(KERNEL, args, kwargs, concrete=False)[0]).structs
    with recorded_launches() as found:
        jax.eval_shape(lambda inputs, d_out: both(inputs, d_out, device), inputs, inputs.value)
    return {each.name: each for each in found}


def with_tile(of_call: Launch, tile: Tile) -> Launch:
    """The launch with another tile; its grid and its shares of sums follow."""
    constants, (block_k, block_v, warps, stages) = dict(of_call.constants), tile
    dim, size = ("V", "BLOCK_V") if "V" in constants and of_call.name not in BY_CHANNELS_OF_KEYS else ("K", "BLOCK_K")
    before = -(-constants[dim] // constants[size]) if size in constants else 1
    constants |= ({"BLOCK_K": block_k} if block_k else {}) | ({"BLOCK_V": block_v} if block_v else {})
    after = -(-constants[dim] // constants[size]) if size in constants else 1
    grid, outputs = of_call.grid, of_call.outputs
    if of_call.name in (*BY_CHANNELS_OF_KEYS, *BY_CHANNELS_OF_VALUES):
        grid = grid[0] // before * after, 1, 1
    if of_call.name in BY_CHANNELS_OF_KEYS:
        outputs = tuple(x.update(shape=(after, *x.shape[1:])) if _has_shares(x, before) else x for x in outputs)
    return dataclasses.replace(
        of_call, constants=tuple(constants.items()), grid=grid, outputs=outputs, num_warps=warps, num_stages=stages
    )


def _has_shares(output: jax.ShapeDtypeStruct, blocks: int) -> bool:
    """True for [blocks of K, batch, length, HV]."""
    return output.dtype == jnp.float32 and len(output.shape) == 4 and output.shape[0] == blocks


def listed(case: str, kernels: Sequence[str], device: Device) -> Iterator[tuple[str, Tile, Launch]]:
    """The launches to time, by kernel and tile."""
    found = launches(case, device)
    for kernel in kernels:
        for tile in TILES[kernel] if kernel in found else ():
            yield kernel, tile, with_tile(found[kernel], tile)


def compile_share(work: tuple[str, Sequence[str], Device, int, int]) -> None:
    """Compiles every n-th launch of a case into Triton's cache on disk."""
    case, kernels, device, part, parts = work
    assert device.capability is not None
    for number, (_, _, each) in enumerate(listed(case, kernels, device)):
        if number % parts == part:
            compiled(each, device.capability)


def arrays_of(case: str, device: Device, decays: float) -> dict[str, tuple[jax.Array, ...]]:
    """What the call gives each kernel."""
    held: dict[str, tuple[jax.Array, ...]] = {}

    def spy(kernel: Any, inputs: Sequence[jax.Array], outputs: Any, **options: Any) -> Any:
        held[kernel.__name__] = tuple(inputs)
        return launch(kernel, inputs, outputs, **options)

    inputs = drawn(CASES[case])
    if inputs.log_decay is not None:
        inputs = inputs.replace(log_decay=decays * inputs.log_decay)
    with contextlib.ExitStack() as stack:
        for module in (calls, channel_calls, removal_calls, inverse):
            stack.enter_context(mock.patch.object(module, "launch", spy))
        both(inputs, inputs.value, device)
    return held


def program(each: Launch, arrays: Sequence[jax.Array]) -> tuple[Callable[..., Any], tuple[jax.Array, ...]]:
    """A launch as a compiled function, and its arguments; an array whose shape follows the tile is zeros."""
    given = [
        x if x.shape == struct.shape else jnp.zeros(struct.shape, struct.dtype)
        for x, struct in zip(arrays, each.inputs, strict=True)
    ]
    fresh = len(each.outputs) - len(each.in_place)
    options: dict[str, Any] = {
        "grid": each.grid,
        "constants": dict(each.constants),
        "scalars": dict(each.scalars),
        "num_warps": each.num_warps,
        "num_stages": each.num_stages,
        "in_place": {fresh + number: source for number, source in enumerate(each.in_place)},
    }
    return jax.jit(lambda *arrays: launch(each.kernel, arrays, each.outputs, **options)), tuple(given)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append", help="gated_delta_16_32_4x8192 if it is not given")
    parser.add_argument("--kernel", choices=TILES, action="append", help="of all, if it is not given")
    parser.add_argument("--decays", type=float, default=1.0, help="what multiplies the logarithms of decays")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=8, help="calls that are queued")
    given = parser.parse_args(argv)
    cases, kernels, device = given.case or ["gated_delta_16_32_4x8192"], given.kernel or list(TILES), current_device()
    cores = os.cpu_count() or 1
    work = [(case, kernels, device, part, cores) for case in cases for part in range(cores)]
    # New processes: a fork of one that holds a GPU cannot use it, and these need none.
    with (
        mock.patch.dict(os.environ, {"JAX_PLATFORMS": "cpu"}),
        concurrent.futures.ProcessPoolExecutor(cores, multiprocessing.get_context("spawn")) as pool,
    ):
        list(pool.map(compile_share, work))
    cells: list[dict[str, Any]] = []
    for case in cases:
        held = arrays_of(case, device, given.decays)
        for kernel in kernels:
            runs = {}
            for _, tile, each in listed(case, [kernel], device):
                run, arrays = program(each, held[kernel])
                runs[",".join(map(str, tile))] = queued(run, arrays, given.calls)
            with concurrent.futures.ThreadPoolExecutor(cores) as threads:
                list(threads.map(lambda run: run(), runs.values()))
            for name, timing in interleaved(runs, given.rounds).items():
                seconds = timing.minimum / given.calls
                cells.append({"case": case, "kernel": kernel, "tile": name, "seconds": seconds})
                print(f"{case:26} {kernel:24} {name:12} {seconds * 1e6:9.1f} us", flush=True)
        record("linear_attention_tiles", {"rounds": given.rounds, "calls": given.calls, "cells": cells})


if __name__ == "__main__":
    main()
