"""Decoding over a cache that is split over all devices, by pages and by heads, beside one device with the whole cache.

By the wall clock of a compiled loop of calls, each of which waits for the one before. Results are compared with one
device's before anything is timed. ``python -m benchmarks.split_pages``
"""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from benchmarks.common import interleaved, record
from tilewright.modules import context_parallel_mla_decode, context_parallel_page_attention, mla_decode, page_attention

ALONE = "one device"
AXIS = "x"
HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 64
LATENT_HEADS, LATENT, LORA_RANK = 128, 576, 512
SIZES = [(1, 16384), (1, 131072), (1, 1048576), (8, 32768), (64, 8192)]
"""Sequences, and the tokens of each."""
LIMIT = 2e-2
"""Difference of two results, relative to the largest value: partial results are rounded to bfloat16."""


WHOLE, BY_PAGE, BY_HEAD, BY_KV_HEAD = P(), P(AXIS), P(None, AXIS), P(None, None, AXIS)


@dataclasses.dataclass(frozen=True)
class Split:
    """A way to split a call.

    Attributes:
      attend: of query, pages, table and lengths.
      query, pages: how they are split.
    """

    attend: Callable[..., jax.Array]
    query: P
    pages: P

    @property
    def dealt(self) -> bool:
        """True if the pages of a device stand together."""
        return self.pages == BY_PAGE


def attention(query: Any, pages: Any, table: Any, lengths: Any) -> jax.Array:
    found: jax.Array = page_attention(query, pages[0], pages[1], table, lengths)
    return found


def attention_by_pages(query: Any, pages: Any, table: Any, lengths: Any) -> jax.Array:
    found: jax.Array = context_parallel_page_attention(query, pages[0], pages[1], table, lengths, axis_name=AXIS)
    return found


def latents(query: Any, pages: Any, table: Any, lengths: Any) -> jax.Array:
    found: jax.Array = mla_decode(query, pages[0], table, lengths, kv_lora_rank=LORA_RANK)
    return found


def latents_by_pages(query: Any, pages: Any, table: Any, lengths: Any) -> jax.Array:
    found: jax.Array = context_parallel_mla_decode(
        query, pages[0], table, lengths, axis_name=AXIS, kv_lora_rank=LORA_RANK
    )
    return found


OPS: dict[str, dict[str, Split]] = {
    "page_attention": {
        ALONE: Split(attention, WHOLE, WHOLE),
        "pages": Split(attention_by_pages, WHOLE, BY_PAGE),
        "heads": Split(attention, BY_HEAD, BY_KV_HEAD),
    },
    "mla_decode": {
        ALONE: Split(latents, WHOLE, WHOLE),
        "pages": Split(latents_by_pages, WHOLE, BY_PAGE),
        "heads": Split(latents, BY_HEAD, WHOLE),
    },
}


def repeated(attend: Callable[..., jax.Array], calls: int) -> Callable[..., jax.Array]:
    """So many calls, each with a query that depends on the result of the call before."""

    def run(query: Any, pages: Any, table: Any, lengths: Any) -> jax.Array:
        def one(_: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            query, _out = lax.optimization_barrier(carry)
            return query, attend(query, pages, table, lengths)

        return lax.fori_loop(1, calls, one, (query, attend(query, pages, table, lengths)))[1]

    return run


def operands(op: str, sequences: int, tokens: int, shards: int) -> tuple[Any, Any, dict[bool, np.ndarray], Any]:
    """Query, pages in the order of the sequences, the tables of whole and of dealt pages, and lengths."""
    keys, count = jax.random.split(jax.random.key(tokens), 3), sequences * tokens // PAGE

    def draw(key: jax.Array, *shape: int) -> jax.Array:
        return jax.random.normal(key, shape, jnp.bfloat16)

    if op == "mla_decode":
        query, pages = draw(keys[0], sequences, LATENT_HEADS, LATENT), [draw(keys[1], count, PAGE, 1, LATENT)]
    else:
        query = draw(keys[0], sequences, HEADS, HEAD_DIM)
        pages = [draw(key, count, PAGE, KV_HEADS, HEAD_DIM) for key in keys[1:]]
    whole = np.arange(count, dtype=np.int32).reshape(sequences, -1)
    columns = np.arange(whole.shape[1], dtype=np.int32)
    dealt = np.arange(sequences, dtype=np.int32)[:, None] * (whole.shape[1] // shards) + columns // shards
    return query, pages, {False: whole, True: dealt}, jnp.full(sequences, tokens, jnp.int32)


def measured(op: str, sequences: int, tokens: int, mesh: Mesh, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one size."""
    shards = mesh.size
    query, pages, tables, lengths = operands(op, sequences, tokens, shards)
    order = np.concatenate([tables[False][:, device::shards].ravel() for device in range(shards)])
    functions: dict[str, Callable[[], Any]] = {}
    wanted: Any = None
    for name, split in OPS[op].items():
        given = [page[order] if split.dealt else page for page in pages]
        run = repeated(split.attend, arguments.calls)
        specs = (split.query, [split.pages] * len(pages), WHOLE, WHOLE)
        places: Any = SingleDeviceSharding(mesh.devices[0])
        if name != ALONE:
            places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
            run = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=split.query)
        placed = jax.device_put((query, given, jnp.asarray(tables[split.dealt]), lengths), places)
        program = jax.jit(run).lower(*placed).compile()
        functions[name] = lambda program=program, placed=placed: program(*placed)  # type: ignore[misc]
        found = np.asarray(functions[name](), np.float32)
        wanted = found if wanted is None else wanted
        if not (difference := np.abs(found - wanted).max() / np.abs(wanted).max()) <= LIMIT:
            raise ArithmeticError(f"{op} by {name} is wrong at {sequences} x {tokens}: {difference=}")
        del given
    nbytes = sum(page.nbytes for page in pages)
    alone, rows = 0.0, []
    for name, timing in interleaved(functions, arguments.rounds).items():
        seconds = timing.median / arguments.calls
        alone = seconds if name == ALONE else alone
        rows.append(
            {"op": op, "sequences": sequences, "tokens": tokens, "name": name, "us": 1e6 * seconds,
             "speedup": alone / seconds, "tb_per_s": nbytes / seconds / 1e12, "calls": arguments.calls,
             "timing": timing.to_json()}
        )  # fmt: skip
        print(
            f"{op:15s} {sequences:3d} x {tokens:8d} {name:10s} {1e6 * seconds:9.1f} us {alone / seconds:6.2f}",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--ops", nargs="+", default=list(OPS), choices=list(OPS))
    parser.add_argument("--sizes", nargs="+", default=[f"{n}x{tokens}" for n, tokens in SIZES])
    parser.add_argument("--calls", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    sizes = [tuple(map(int, size.split("x"))) for size in arguments.sizes]
    rows = [row for op in arguments.ops for n, tokens in sizes for row in measured(op, n, tokens, mesh, arguments)]
    shapes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "latent_heads": LATENT_HEADS, "page": PAGE}
    print(record("split_pages", {**shapes, "dtype": "bfloat16", "rows": rows}))


if __name__ == "__main__":
    main()
