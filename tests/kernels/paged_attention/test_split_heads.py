"""The serving functions with their heads split over four devices: the numbers of one device, and no collectives."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tilewright import modules

DEVICES, HEADS, KV_HEADS, DIM, PAGES, PAGE_SIZE = 4, 8, 4, 16, 16, 8
WHOLE, BY_HEAD, ROWS, CACHE = P(), P("t"), P(None, "t"), P(None, None, "t")
COLLECTIVES = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


@dataclasses.dataclass(frozen=True)
class Call:
    """A call by names, and how each of its arrays is split.

    Attributes:
      out: the specs of the results inside ``shard_map``.
      options: of the call, without arrays.
    """

    function: Callable[..., Any]
    arrays: dict[str, tuple[jax.Array, P]]
    out: tuple[P, ...] = (ROWS, ROWS)
    options: dict[str, Any] = dataclasses.field(default_factory=lambda: {"return_lse": True})

    def run(self, *arrays: jax.Array) -> Any:
        found = self.function(**dict(zip(self.arrays, arrays, strict=True)), **self.options)
        return found if isinstance(found, tuple) else (found,)


def integers(*values: Any) -> tuple[jax.Array, P]:
    return jnp.asarray(values, jnp.int32), WHOLE


TABLE = (jnp.asarray(np.random.default_rng(3).permutation(PAGES)[:12].reshape(3, 4), jnp.int32), WHOLE)
LENGTHS, BOUNDARIES = integers(7, 30, 0), integers(0, 5, 6, 6)
KEYS, VALUES = ((draw(PAGES, PAGE_SIZE, KV_HEADS, DIM, seed=seed), CACHE) for seed in (1, 2))
DENSE_KEYS, DENSE_VALUES = ((draw(3, 32, KV_HEADS, DIM, seed=seed), CACHE) for seed in (4, 5))
ONE_EACH, PACKED = (draw(3, HEADS, DIM), ROWS), (draw(6, HEADS, DIM), ROWS)
NEW_KEYS, NEW_VALUES = ((draw(6, KV_HEADS, DIM, seed=seed), ROWS) for seed in (6, 7))
SINKS, SLOPES = (draw(HEADS, 2, seed=8), BY_HEAD), (jnp.exp2(-jnp.arange(1.0, HEADS + 1)), BY_HEAD)
SCALES = (jnp.linspace(0.5, 2.0, KV_HEADS).reshape(1, 1, -1), CACHE)
TOKEN_SCALES = (jnp.exp(draw(PAGES, PAGE_SIZE, KV_HEADS, seed=9)), CACHE)
STORED_KEYS, STORED_VALUES = (((64 * x).astype(jnp.int8), spec) for x, spec in (KEYS, VALUES))

PAGED = {"query": ONE_EACH, "key_pages": KEYS, "value_pages": VALUES, "page_table": TABLE, "lengths": LENGTHS}
DENSE = {"query": ONE_EACH, "key": DENSE_KEYS, "value": DENSE_VALUES}
RAGGED = {
    "query": PACKED, "key_pages": KEYS, "value_pages": VALUES, "page_table": TABLE, "kv_lengths": LENGTHS,
    "cum_q_lens": BOUNDARIES,
}  # fmt: skip
VLLM = {"query": PACKED, "key_cache": KEYS, "value_cache": VALUES, "block_table": TABLE}
WRITTEN = {
    "key_pages": KEYS, "value_pages": VALUES, "key": NEW_KEYS, "value": NEW_VALUES, "page_table": TABLE,
    "kv_lengths": LENGTHS, "cum_q_lens": BOUNDARIES,
}  # fmt: skip
STORED = {"key_pages": STORED_KEYS, "value_pages": STORED_VALUES}
CALLS = {
    "page_attention": Call(modules.page_attention, {**PAGED, "softmax_aux": SINKS, "alibi_slopes": SLOPES}),
    "page_attention, scales": Call(
        modules.page_attention, {**PAGED, **STORED, "key_scale": SCALES, "value_scale": TOKEN_SCALES}
    ),
    "decode_attention": Call(modules.decode_attention, {**DENSE, "lengths": LENGTHS, "alibi_slopes": SLOPES}),
    "ragged_decode_attention": Call(
        modules.ragged_decode_attention, {**DENSE, "starts": integers(2, 9, 0), "ends": LENGTHS, "softmax_aux": SINKS}
    ),
    "ragged_page_attention": Call(
        modules.ragged_page_attention, {**RAGGED, "new_key": NEW_KEYS, "new_value": NEW_VALUES, "softmax_aux": SINKS},
        out=(ROWS, ROWS, CACHE, CACHE),
    ),
    "ragged_page_attention, scales": Call(
        modules.ragged_page_attention,
        {
            **RAGGED, **STORED, "new_key": NEW_KEYS, "new_value": NEW_VALUES, "key_scale": SCALES,
            "value_scale": TOKEN_SCALES,
        },
        out=(ROWS, ROWS, CACHE, CACHE, CACHE, CACHE),
    ),
    "unified_attention": Call(
        modules.unified_attention,
        {**VLLM, "cu_seqlens_q": BOUNDARIES, "seqused_k": LENGTHS, "sinks": SINKS, "alibi_slopes": SLOPES},
        options={"window_size": (9, 0), "softcap": 3.0, "return_lse": True},
    ),
    "chunked_prefill_paged_decode": Call(
        modules.chunked_prefill_paged_decode,
        {**VLLM, "key": NEW_KEYS, "value": NEW_VALUES, "seq_lens": LENGTHS, "query_start_loc": BOUNDARIES},
        out=(ROWS, ROWS, CACHE, CACHE),
    ),
    "mla_decode": Call(
        modules.mla_decode,
        {
            "query": (draw(3, 2, HEADS, 24), CACHE), "latent_pages": (draw(PAGES, PAGE_SIZE, 24, seed=6), WHOLE),
            "page_table": TABLE, "lengths": LENGTHS, "softmax_aux": SINKS,
        },
        out=(CACHE, CACHE),
        options={"kv_lora_rank": 16, "return_lse": True},
    ),
    "update_pages": Call(modules.update_pages, WRITTEN, out=(CACHE, CACHE), options={}),
    "update_pages, scales": Call(
        modules.update_pages, {**WRITTEN, **STORED, "key_scale": SCALES, "value_scale": TOKEN_SCALES},
        out=(CACHE,) * 4, options={},
    ),
}  # fmt: skip
SPLITS = {"explicit axes": None, "shard_map": False, "shard_map, check_vma": True}
QUICK = ["page_attention", "update_pages, scales"]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", CALLS)
def test_heads_split_over_devices_give_the_numbers_of_one_device_without_collectives(name: str, split: str):
    call, check_vma = CALLS[name], SPLITS[split]
    axis_type = AxisType.Explicit if check_vma is None else AxisType.Auto
    mesh = jax.make_mesh((DEVICES,), ("t",), axis_types=(axis_type,), devices=jax.devices()[:DEVICES])
    arrays, specs = zip(*call.arrays.values(), strict=True)
    want = call.run(*arrays)
    run: Callable[..., Any] = call.run
    if check_vma is not None:
        run = jax.shard_map(call.run, mesh=mesh, in_specs=specs, out_specs=call.out, check_vma=check_vma)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
        compiled = jax.jit(run).lower(*placed).compile()
        got = compiled(*placed)
    assert not re.search(COLLECTIVES, compiled.as_text())
    for ours, theirs, spec in zip(got, want, call.out, strict=True):
        assert NamedSharding(mesh, spec).is_equivalent_to(ours.sharding, ours.ndim)
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, atol=2e-6)
