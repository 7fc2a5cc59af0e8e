"""What engines need beside attention, on a GPU: rotating and writing at once, and prefixes that sequences share."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.kernels import kernel
from tilewright.kernels.paged_attention.ops.rope_update_pages import RopeUpdateCase
from tilewright.kernels.paged_attention.triton.rotating import TritonRopeUpdatePages
from tilewright.modules import page_attention, rope_update_pages, shared_prefix_page_attention
from tilewright.ops.utils.device import current_device

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")

REAL: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "kv_length": 2048}
ROTATED: dict[str, dict[str, Any]] = {
    "decode": {"sequences": 64, "q_lengths": (1,)},
    "mixed": {"sequences": 9, "q_lengths": (1, 1, 300)},
    "interleaved": {"sequences": 9, "q_lengths": (5, 1), "interleaved": True, "fraction": 0.5},
    "float16, any heads": {"sequences": 3, "q_lengths": (70,), "dtype": "float16", "heads": 21, "kv_heads": 3},
    "float32": {"sequences": 3, "q_lengths": (70,), "dtype": "float32", "scaling": "yarn"},
    "int8": {"sequences": 9, "q_lengths": (1, 40), "kv_dtype": "int8", "scale": "token"},
    "int8, interleaved": {"sequences": 5, "kv_dtype": "int8", "scale": "page", "interleaved": True},
    "fp8": {"sequences": 9, "q_lengths": (1, 40), "kv_dtype": "float8_e4m3fn", "scale": "head"},
    "e5m2": {"sequences": 9, "q_lengths": (1, 40), "kv_dtype": "float8_e5m2", "positions": True},
}
STEP = {"int8": 0.0, "float8_e4m3fn": 0.13, "float8_e5m2": 0.26}


@pytest.mark.parametrize("name", ROTATED)
def test_rotating_and_writing(name: str) -> None:
    """Every candidate, against XLA on the same device; bit for bit in every run."""
    case = RopeUpdateCase("", **REAL | ROTATED[name])
    positional, keywords = case.arguments()
    op, backend = kernel("rope_update_pages"), TritonRopeUpdatePages()
    inputs = op.prepare(*positional, **keywords)
    want = rope_update_pages(*positional, **keywords, platform="xla")
    for params in backend.candidates(inputs, current_device(), "forward"):
        run = jax.jit(lambda inputs, params=params: backend.forward(inputs, params))
        got = op.outputs(inputs, run(inputs))
        for ours, again in zip(got, op.outputs(inputs, run(inputs)), strict=True):
            assert bool(jnp.array_equal(ours, again)), params
        for index, (ours, theirs) in enumerate(zip(got, want, strict=True)):
            stored = index in (1, 2)
            rtol = STEP.get(case.kv_dtype or "", 0.01) if stored else 0.01
            atol = 1.0 if stored and case.kv_dtype == "int8" else 2e-3
            ours, theirs = (np.asarray(x.astype(jnp.float32)) for x in (ours, theirs))
            np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol, err_msg=str(params))
            if stored:
                assert np.mean(ours != theirs) < 0.02


def test_donated_pages_are_written_in_place() -> None:
    case = RopeUpdateCase("", sequences=4, **REAL)
    (query, key_pages, value_pages, *rest), _ = case.arguments()
    step = jax.jit(lambda pages, query: rope_update_pages(query, *pages, *rest, platform="triton"), donate_argnums=0)
    pages = key_pages + 0, value_pages + 0
    addresses = [each.unsafe_buffer_pointer() for each in pages]
    _, *new = step(pages, query)
    assert [each.unsafe_buffer_pointer() for each in new] == addresses
    want = rope_update_pages(query, key_pages, value_pages, *rest, platform="xla")[1:]
    for ours, theirs in zip(new, want, strict=True):
        np.testing.assert_allclose(np.asarray(ours, np.float32), np.asarray(theirs, np.float32), atol=0.02, rtol=0.02)


PREFIXES: dict[str, dict[str, Any]] = {
    "one of all": {"sequences": 64, "prefix": 4096, "own": 256},
    "of a few": {"sequences": 3, "prefix": 8192, "own": 64},
    "groups": {"sequences": 40, "prefix": 1024, "own": 128, "groups": 5},
    "sinks and a cap": {
        "sequences": 16,
        "prefix": 512,
        "own": 512,
        "groups": 2,
        "softmax_aux": 1,
        "logits_soft_cap": 20.0,
    },
    "int8": {"sequences": 32, "prefix": 1024, "own": 128, "kv_dtype": "int8"},
    "empty prefix": {"sequences": 32, "prefix": 0, "own": 128},
}


@pytest.mark.parametrize("name", PREFIXES)
def test_shared_prefix(name: str) -> None:
    """Against one call over tables that begin with the prefix, and the same bits in every run."""
    fields = {"groups": 1, "kv_dtype": "bfloat16", "softmax_aux": 0, "logits_soft_cap": None, **PREFIXES[name]}
    sequences, groups, page = fields["sequences"], fields["groups"], 16
    prefix_pages, own_pages = fields["prefix"] // page, fields["own"] // page
    random = np.random.default_rng(0)
    count = max(groups * prefix_pages + sequences * own_pages, 1)
    order = random.permutation(count).astype(np.int32)
    prefix_table = order[: groups * prefix_pages].reshape(groups, prefix_pages)
    table = order[groups * prefix_pages :].reshape(sequences, own_pages)
    group = random.integers(0, groups, sequences)
    lengths = random.integers(1, fields["own"] + 1, sequences)
    keys = jax.random.split(jax.random.key(1), 4)
    query = jax.random.normal(keys[0], (sequences, 32, 128), jnp.bfloat16)
    pages = [(20 * jax.random.normal(key, (count, page, 8, 128))).astype(fields["kv_dtype"]) for key in keys[1:3]]
    options: dict[str, Any] = {"logits_soft_cap": fields["logits_soft_cap"], "return_lse": True, "key_scale": 0.05}
    options |= {"value_scale": 0.05}
    if fields["softmax_aux"]:
        options["softmax_aux"] = jax.random.normal(keys[3], (32, fields["softmax_aux"]))

    @jax.jit
    def run(query: Any, pages: Any, group: Any) -> Any:
        return shared_prefix_page_attention(
            query, *pages, jnp.asarray(prefix_table), jnp.full(groups, fields["prefix"]), jnp.asarray(table),
            jnp.asarray(lengths), prefix_group=group, **options,
        )  # fmt: skip

    whole = jnp.asarray(np.concatenate([prefix_table[group], table], axis=1))
    want = page_attention(query, *pages, whole, jnp.asarray(lengths + fields["prefix"]), **options)
    got = run(query, pages, jnp.asarray(group))
    for ours, theirs in zip(got, want, strict=True):
        ours, theirs = (np.asarray(x, np.float32) for x in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, atol=0.02, rtol=0.02)
    for ours, again in zip(got, run(query, pages, jnp.asarray(group)), strict=True):
        assert bool(jnp.array_equal(ours, again))
