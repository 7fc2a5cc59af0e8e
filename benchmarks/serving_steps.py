"""What a step of serving needs beside attention itself, each beside the calls that it replaces.

Decoding over a prefix that all sequences share, beside one call over whole tables; and rotating and writing new tokens
at once, beside ``rope`` and ``update_pages``. By the wall clock of a compiled loop of calls, each of which waits for
the one before. Results are compared before anything is timed. ``python -m benchmarks.serving_steps``
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.common import interleaved, record
from tilewright.modules import (
    page_attention,
    rope,
    rope_update_pages,
    shared_prefix_page_attention,
    update_pages,
)

HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16
PREFIXES = ["64x8192+256", "64x32768+256", "256x2048+128", "16x32768+1024", "8x1024+256"]
"""Sequences, tokens of the prefix, and tokens of each sequence after it."""
TOKENS = ["64x1", "256x1", "8x1024"]
"""Sequences, and new tokens of each."""
CAPACITY = 2048
"""Tokens that a sequence has room for, where new ones are written."""
LIMIT = 2e-2
"""Difference of two results, relative to the largest value: partial results are rounded to bfloat16."""

type Step = Callable[[Any, Any], Any]
"""Of a carry and operands, to a carry like it."""


def repeated(step: Step, calls: int) -> Callable[..., Any]:
    def run(carry: Any, operands: Any) -> Any:
        return lax.fori_loop(0, calls, lambda _, carry: step(carry, operands), carry)

    return run


def draw(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def prefix_steps(size: str) -> tuple[dict[str, Step], Any, Any]:
    """The steps, a carry of query and output, and operands."""
    sequences, prefix, own = map(int, size.replace("+", "x").split("x"))
    columns = own // PAGE
    count = prefix // PAGE + sequences * columns
    order = np.random.default_rng(0).permutation(count).astype(np.int32)
    shared, table = order[: prefix // PAGE], order[prefix // PAGE :].reshape(sequences, columns)
    whole = np.concatenate([np.broadcast_to(shared, (sequences, len(shared))), table], axis=1)
    pages = [draw(seed, count, PAGE, KV_HEADS, HEAD_DIM) for seed in (1, 2)]
    query = draw(0, sequences, HEADS, HEAD_DIM)
    tables = {"shared": shared[None], "own": table, "whole": whole}
    operands = (pages, {name: jnp.asarray(array) for name, array in tables.items()})

    def after(carry: Any) -> Any:
        return lax.optimization_barrier(carry)[0]

    def at_once(carry: Any, operands: Any) -> Any:
        query, ((keys, values), tables) = after(carry), operands
        lengths = jnp.full(sequences, prefix + own, jnp.int32)
        return query, page_attention(query, keys, values, tables["whole"], lengths)

    def cascade(carry: Any, operands: Any) -> Any:
        query, ((keys, values), tables) = after(carry), operands
        lengths = jnp.full(sequences, own, jnp.int32)
        return query, shared_prefix_page_attention(
            query, keys, values, tables["shared"], jnp.asarray([prefix]), tables["own"], lengths
        )

    return {"page_attention": at_once, "shared prefix": cascade}, (query, jnp.zeros_like(query)), operands


def writing_steps(size: str) -> tuple[dict[str, Step], Any, Any]:
    """The steps, a carry of pages and the rotated query, and operands."""
    sequences, new = map(int, size.split("x"))
    count = sequences * CAPACITY // PAGE
    table = np.random.default_rng(0).permutation(count).astype(np.int32).reshape(sequences, -1)
    pages = tuple(jnp.zeros((count, PAGE, KV_HEADS, HEAD_DIM), jnp.bfloat16) for _ in range(2))
    query, key, value = (
        draw(seed, sequences * new, heads, HEAD_DIM) for seed, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
    )
    lengths = jnp.full(sequences, CAPACITY - 7, jnp.int32)
    bounds = jnp.arange(sequences + 1, dtype=jnp.int32) * new
    places = jnp.tile(CAPACITY - 7 - new + jnp.arange(new, dtype=jnp.int32), sequences)
    operands = (query, key, value, jnp.asarray(table), lengths, bounds, places)

    def apart(carry: Any, operands: Any) -> Any:
        ((keys, values), _), (query, key, value, table, lengths, bounds, places) = lax.optimization_barrier(
            (carry, operands)
        )
        rotated, key = rope(query, places), rope(key, places)
        return update_pages(keys, values, key, value, table, lengths, bounds), rotated

    def at_once(platform: str) -> Step:
        def step(carry: Any, operands: Any) -> Any:
            ((keys, values), _), (query, key, value, table, lengths, bounds, _) = lax.optimization_barrier(
                (carry, operands)
            )
            rotated, keys, values = rope_update_pages(
                query, keys, values, key, value, table, lengths, bounds, platform=platform
            )
            return (keys, values), rotated

        return step

    steps = {"rope, update_pages": apart, "at once, xla": at_once("xla")}
    if jax.default_backend() == "gpu":
        steps["at once, triton"] = at_once("triton")
    return steps, (pages, jnp.zeros_like(query)), operands


def measured(kind: str, size: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one size; the first step is the one that others are compared with."""
    steps, carry, operands = (prefix_steps if kind == "prefix" else writing_steps)(size)
    programs: dict[str, Callable[[], Any]] = {}
    wanted: Any = None
    for name, step in steps.items():
        program = jax.jit(repeated(step, arguments.calls)).lower(carry, operands).compile()
        programs[name] = lambda program=program: program(carry, operands)  # type: ignore[misc]
        found = [np.asarray(x, np.float32) for x in jax.tree.leaves(programs[name]())]
        wanted = found if wanted is None else wanted
        for ours, theirs in zip(found, wanted, strict=True):
            if not (difference := np.abs(ours - theirs).max() / np.abs(theirs).max()) <= LIMIT:
                raise ArithmeticError(f"{kind} by {name} is wrong at {size}: {difference=}")
    first, rows = 0.0, []
    for name, timing in interleaved(programs, arguments.rounds).items():
        seconds = timing.median / arguments.calls
        first = first or seconds
        rows.append(
            {"kind": kind, "size": size, "name": name, "us": 1e6 * seconds, "speedup": first / seconds,
             "calls": arguments.calls, "timing": timing.to_json()}
        )  # fmt: skip
        print(f"{kind:8s} {size:14s} {name:20s} {1e6 * seconds:9.1f} us {first / seconds:6.2f}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--prefixes", nargs="*", default=PREFIXES, help="sequences x prefix + tokens after it")
    parser.add_argument("--tokens", nargs="*", default=TOKENS, help="sequences x new tokens")
    parser.add_argument("--calls", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    sizes = [("prefix", size) for size in arguments.prefixes] + [("writing", size) for size in arguments.tokens]
    rows = [row for kind, size in sizes for row in measured(kind, size, arguments)]
    shapes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "page": PAGE, "capacity": CAPACITY}
    print(record("serving_steps", {**shapes, "dtype": "bfloat16", "rows": rows}))


if __name__ == "__main__":
    main()
