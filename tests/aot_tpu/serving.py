"""Attention over a cache as programs for TPUs: the backend's calls, and twins of its kernels without data.

The simulator follows arithmetic on the grid's indices and constants, but knows no numbers in arrays: in a twin lengths,
pages and steps are constants, and every block is whole.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from tests.kernels.paged_attention.conformance import structs_of
from tilewright.kernels.paged_attention.ops.decode_attention import DecodeCase
from tilewright.kernels.paged_attention.ops.mla_decode import MlaCase
from tilewright.kernels.paged_attention.ops.ragged_page_attention import RaggedPageCase
from tilewright.kernels.paged_attention.tpu import chunk, decode
from tilewright.kernels.paged_attention.tpu.backend import TpuPagedAttention
from tilewright.kernels.paged_attention.tpu.pages import Blocks, Reader, Step, Work
from tilewright.kernels.tpu.device import LANES
from tilewright.ops.utils.known_devices import find_device

BACKEND = TpuPagedAttention()

# A cache that does not fit the VMEM: XLA would bring a smaller one there as a whole.
KINDS = {"decode_attention": DecodeCase, "mla_decode": MlaCase, "ragged_page_attention": RaggedPageCase}

SIZES: dict[str, Any] = {
    "sequences": 32, "kv_length": 2048, "heads": 32, "kv_heads": 8, "head_dim": 128, "page_size": 64,
    "dtype": "bfloat16",
}  # fmt: skip


def call(op: str, **fields: Any) -> tuple[Callable[..., Any], list[Any]]:
    """A call of the backend as its heuristic has it, with whatever its lengths and pages are."""
    if op == "decode_attention":
        fields["paged"] = True
    if op == "ragged_page_attention":
        fields["q_lengths"] = (*(1,) * 31, 512)
    inputs = structs_of(op, KINDS[op]("", **SIZES | fields))
    params = BACKEND.heuristic(inputs, find_device("TPU v6e").device, "forward")
    leaves, tree = jax.tree.flatten(inputs)
    return lambda *arrays: BACKEND.forward(jax.tree.unflatten(tree, arrays), params), leaves


@contextlib.contextmanager
def _constants(module: Any, length: int, field: Callable[[Step, str], Any], copies: bool) -> Iterator[None]:
    """Every step reads all tokens of its sequence, whose pages follow those of the one before."""

    def pages_of(step: Step, block: Any) -> Any:
        return block * step.blocks.pages, step.blocks.pages

    def without_scalars(body: Callable[..., None], *operands: Any, scalars: int, **options: Any) -> Any:
        # The simulator ends at copies to SMEM on a v5e.
        return run_kernel(lambda *refs: body(None, None, *refs), *operands[scalars:], **options)

    run_kernel = module.run_kernel
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (Step, "low", 0),
            (Step, "end", length),
            (Step, "first_page", 0),
            (Step, "last_page", property(lambda step: length // step.blocks.tokens)),
            (Step, "count", property(lambda step: length // step.blocks.block_k)),
            (Step, "pages_of", pages_of),
            (Step, "field", field),
            (Reader, "page", lambda reader, step, column: step.number * reader.blocks.columns + column),
            (module, "run_kernel", without_scalars),
            *([] if copies else [(Reader, name, lambda *_: None) for name in ("start", "wait")]),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def decoding(
    block_rows: int = 4096,
    copies: bool = False,
    sequences: int = 4,
    length: int = 2048,
    kv_heads: int = 8,
    dim: int = 128,
) -> tuple[Callable[..., Any], list[Any]]:
    """A token of each of 4 sequences, with 32 heads; by default without the copies of pages."""
    tokens, rows = 64, 32
    blocks = Blocks(tokens, kv_heads, block_rows // (tokens * kv_heads), length // tokens, sequences)
    made = decode.DecodeCall(blocks, rows, dim, dim, False, None, None, dim**-0.5, False, None, False)

    def field(step: Step, name: str) -> Any:
        return step.number + 1 if name == "next" else {"sequence": 0, "holes": 0, "first": length - 1}[name]

    def run(query: Any, numbers: Any, table: Any, key: Any, value: Any) -> Any:
        work = Work(*[jnp.zeros(sequences, jnp.int32)] * 6)
        with _constants(decode, length, field, copies):
            return decode.decode(made, query, numbers, table, work, key, value)

    pages = jax.ShapeDtypeStruct((sequences * length // tokens, tokens * kv_heads, dim), jnp.bfloat16)
    query = jax.ShapeDtypeStruct((sequences, rows, dim), jnp.bfloat16)
    numbers = jax.ShapeDtypeStruct((rows, LANES), jnp.float32)
    table = jax.ShapeDtypeStruct((sequences, length // tokens), jnp.int32)
    return run, [query, numbers, table, pages, pages]


def prefilling(tile_rows: int = 4096, block_k: int = 512, length: int = 2048) -> tuple[Callable[..., Any], list[Any]]:
    """A tile of queries, with 32 heads over 8 of keys, that see all keys."""
    kv_heads, groups, dim, tokens = 8, 4, 128, 64
    count = tile_rows // (kv_heads * groups)
    blocks = Blocks(tokens, kv_heads, block_k // tokens, length // tokens, 1, (*Work._fields, *chunk.TileWork._fields))
    made = chunk.ChunkCall(blocks, count * groups, dim, dim, False, None, None, dim**-0.5, False, None, False, groups)

    def field(step: Step, name: str) -> Any:
        known = {"next": 1, "tokens": count, "opens": 1, "closes": 1, "first": length - count}
        return known.get(name, 0)

    def run(query: Any, numbers: Any, table: Any, key: Any, value: Any) -> Any:
        zeros = jnp.zeros(1, jnp.int32)
        spec = chunk.pl.BlockSpec

        def of_first(shape: Any = None, index: Any = None, **options: Any) -> Any:
            """A specification whose index map reads no field of a step."""
            return spec(**options) if shape is None else spec(shape, lambda *_: (0,) * len(shape), **options)

        with _constants(chunk, length, field, copies=True), mock.patch.object(chunk.pl, "BlockSpec", of_first):
            return chunk.attend_chunks(
                made, query, numbers, table, Work(*[zeros] * 6), chunk.TileWork(*[zeros] * 5), key, value
            )

    pages = jax.ShapeDtypeStruct((length // tokens, tokens * kv_heads, dim), jnp.bfloat16)
    query = jax.ShapeDtypeStruct((kv_heads, count * groups, dim), jnp.bfloat16)
    numbers = jax.ShapeDtypeStruct((kv_heads, count * groups, LANES), jnp.float32)
    table = jax.ShapeDtypeStruct((1, length // tokens), jnp.int32)
    return run, [query, numbers, table, pages, pages]
