"""Packed queries over latents against attention with the keys and values that a model would decompress."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.kernels.paged_attention.conformance import causal_bits
from tests.support.draws import draw
from tilewright.kernels import kernel
from tilewright.modules import mla_decode, mla_ragged_page_attention, update_pages
from tilewright.ops.utils.datacarrier import FwdParams

HEADS, NOPE, ROPE, RANK, VALUES, PAGE = 4, 12, 8, 24, 10, 8
"""Sizes of a layer: a head's elements without and with rotation, the latent's rank, a value's elements."""

SCALE = float((NOPE + ROPE) ** -0.5)


class Layer:
    """Queries, latents in shuffled pages, and the up-projections of a layer; the rest of the pages is NaN."""

    def __init__(self, counts: Sequence[int], lengths: Sequence[int], columns: int, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.counts, self.lengths, tokens = counts, lengths, sum(counts)
        self.query = random.normal(size=(tokens, HEADS, NOPE))
        self.rotated = random.normal(size=(tokens, HEADS, ROPE))
        self.up_keys = random.normal(size=(HEADS, NOPE, RANK)) / NOPE**0.5
        self.up_values = random.normal(size=(HEADS, RANK, VALUES)) / RANK**0.5
        self.latents = [random.normal(size=(max(length, 0), RANK + ROPE)) for length in lengths]
        pages = np.full((len(lengths) * columns + 2, PAGE, RANK + ROPE), np.nan)
        table = random.permutation(len(pages))[: len(lengths) * columns].reshape(len(lengths), columns)
        for row, latents in zip(table, self.latents, strict=True):
            for position, latent in enumerate(latents):
                pages[row[position // PAGE], position % PAGE] = latent
        self.pages, self.table = pages, table

    def arguments(self, dtype: Any = jnp.float32) -> tuple[jax.Array, ...]:
        absorbed = np.einsum("thn,hnr->thr", self.query, self.up_keys)
        floats = (jnp.asarray(each, dtype) for each in (absorbed, self.rotated, self.pages))
        integers = (self.table, np.maximum(self.lengths, 0), np.append(0, np.cumsum(self.counts)))
        return *floats, *(jnp.asarray(each, jnp.int32) for each in integers)

    def decompressed(
        self, window: tuple[int, int] | None = None, causal: bool = True, sinks: Any = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Values and the log-sum-exp by the definition, in float64, from keys and values of every head."""
        out, lse, token = [], [], 0
        for count, length, latents in zip(self.counts, self.lengths, self.latents, strict=True):
            keys = np.einsum("kr,hnr->khn", latents[:, :RANK], self.up_keys)
            shared = np.broadcast_to(latents[:, None, RANK:], (*keys.shape[:2], ROPE))
            keys = np.concatenate([keys, shared], axis=2)
            values = np.einsum("kr,hrv->khv", latents[:, :RANK], self.up_values)
            for position in range(length - count, length):
                query = np.concatenate([self.query[token], self.rotated[token]], axis=1)
                logits = SCALE * np.einsum("hd,khd->hk", query, keys)
                ahead = np.arange(len(latents)) - position
                seen = ahead <= 0 if causal else np.ones(len(latents), bool)
                if window is not None:
                    seen &= (-ahead <= window[0]) & (ahead <= window[1])
                weights = np.where(seen, np.exp(logits), 0.0)
                total = weights.sum(1) + (0.0 if sinks is None else np.exp(np.asarray(sinks, np.float64)))
                out.append(np.einsum("hk,khv->hv", weights, values) / np.where(total == 0, 1, total)[:, None])
                with np.errstate(divide="ignore"):
                    lse.append(np.log(total))
                token += 1
        return np.asarray(out), np.asarray(lse)

    def values(self, out: jax.Array) -> np.ndarray:
        """Results as a model goes on with them: times the up-projection of values."""
        return np.einsum("thr,hrv->thv", np.asarray(out, np.float64), self.up_values)


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "not causal": {"causal": False},
    "window": {"sliding_window": (9, 0)},
    "sinks": {"softmax_aux": draw(HEADS, seed=7)},
}
BATCHES: dict[str, tuple[Sequence[int], Sequence[int], int]] = {
    "mixed": ((1, 13, 1, 5), (30, 13, 1, 21), 4),
    "around a page": ((1, 1, 1, 3, 3, 3), (PAGE - 1, PAGE, PAGE + 1, PAGE - 1, PAGE, PAGE + 1), 2),
    "none and one": ((0, 1, 0, 2, 0), (0, 1, 20, 2, PAGE), 3),
    "fewer tokens in the cache than new ones": ((4, 1), (2, 0), 1),
    "a prompt": ((37,), (37,), 5),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", OPTIONS)
def test_attention_with_decompressed_keys(batch: str, name: str):
    """What nobody may see is NaN: rows beyond the lengths, and pages of no sequence."""
    layer, options = Layer(*BATCHES[batch]), OPTIONS[name]
    call = jax.jit(lambda *x: mla_ragged_page_attention(*x, softmax_scale=SCALE, return_lse=True, **options))
    out, lse = call(*layer.arguments())
    want, want_lse = layer.decompressed(
        options.get("sliding_window"), options.get("causal", True), options.get("softmax_aux")
    )
    np.testing.assert_allclose(layer.values(out), want, atol=3e-5)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)


@pytest.mark.usefixtures("unoptimised")
@pytest.mark.parametrize("batch", ["mixed", "none and one"])
def test_attention_with_decompressed_keys_in_triton(batch: str):
    pytest.importorskip("triton")
    from tilewright.kernels.triton.interpreter import interpret_triton

    layer = Layer(*BATCHES[batch])
    inputs = kernel("mla_ragged_page_attention").prepare(*layer.arguments(jnp.bfloat16), softmax_scale=SCALE)
    backend = next(each for each in kernel("mla_ragged_page_attention").backends.usable if each.name == "triton")
    params = FwdParams(q_blocksize=4, kv_blocksize=16, num_key_splits=2, num_warps=4, num_stages=2)
    with interpret_triton():
        out, lse = jax.block_until_ready(jax.jit(lambda inputs: backend.forward(inputs, params))(inputs))
    want, want_lse = layer.decompressed()
    # Three roundings to bfloat16, of operands and of the output, through the projection.
    np.testing.assert_allclose(layer.values(out), want, atol=0.06)
    np.testing.assert_allclose(lse, want_lse, atol=0.03)


def test_equally_many_new_tokens_are_a_call_of_mla_decode():
    q_nope, q_rope, pages, table, lengths, cum = Layer((3, 3), (20, 11), 3).arguments()
    out, lse = mla_ragged_page_attention(q_nope, q_rope, pages, table, lengths, cum, return_lse=True)
    query = jnp.concatenate([q_nope, q_rope], axis=2).reshape(2, 3, HEADS, RANK + ROPE)
    want, want_lse = mla_decode(query, pages, table, lengths, kv_lora_rank=RANK, return_lse=True)
    np.testing.assert_allclose(out, want.reshape(out.shape), atol=1e-6)
    np.testing.assert_allclose(lse, want_lse.reshape(lse.shape), atol=1e-6)


def test_a_token_does_not_depend_on_the_batch():
    """Alone as among others, with whose tokens a tile of its own ends."""
    batch = Layer((1, 13, 1, 5), (30, 13, 1, 21), 4)
    q_nope, q_rope, pages, table, lengths, cum = batch.arguments()
    together = mla_ragged_page_attention(q_nope, q_rope, pages, table, lengths, cum, softmax_scale=SCALE)
    for row, (first, end) in enumerate(itertools.pairwise(cum)):
        alone = mla_ragged_page_attention(
            q_nope[first:end], q_rope[first:end], pages, table[row : row + 1], lengths[row : row + 1],
            jnp.asarray([0, end - first]), softmax_scale=SCALE,
        )  # fmt: skip
        np.testing.assert_allclose(together[first:end], alone, atol=1e-6)


def test_tokens_of_no_sequence():
    """Before the first boundary and behind the last one."""
    layer = Layer((3, 5), (20, 11), 3)
    q_nope, q_rope, *rest, cum = layer.arguments()
    around = [jnp.concatenate([x[:2], x, x[:1]]) for x in (q_nope, q_rope)]
    out, lse = mla_ragged_page_attention(*around, *rest, cum + 2, softmax_scale=SCALE, return_lse=True)
    np.testing.assert_allclose(layer.values(out[2:-1]), layer.decompressed()[0], atol=3e-5)
    for outside in (slice(0, 2), slice(-1, None)):
        assert not np.any(out[outside])
        assert np.all(np.isneginf(lse[outside]))


def test_bits_of_new_tokens():
    """Causal bits are causality, and a token without any sees only what came before the new ones."""
    layer = Layer((5, 2), (20, 11), 3)
    arguments = layer.arguments()
    bits = causal_bits((5, 2), 1)
    same = mla_ragged_page_attention(*arguments, softmax_scale=SCALE, tree_mask=jnp.asarray(bits))
    np.testing.assert_allclose(layer.values(same), layer.decompressed()[0], atol=3e-5)
    bits[4] = 0
    blind = mla_ragged_page_attention(*arguments, softmax_scale=SCALE, tree_mask=jnp.asarray(bits))
    before = Layer((5, 2), (20, 11), 3)
    before.counts, before.lengths, before.latents = (5,), (20,), [layer.latents[0][:15]]
    want, _ = before.decompressed(causal=False)
    np.testing.assert_allclose(layer.values(blind)[4], want[4], atol=3e-5)
    np.testing.assert_array_equal(np.delete(blind, 4, 0), np.delete(same, 4, 0))


def test_new_latents_are_written_and_attended_to():
    layer = Layer((1, 13), (30, 13), 4)
    q_nope, q_rope, pages, table, lengths, cum = layer.arguments()
    new = np.concatenate([layer.latents[0][-1:], layer.latents[1]])
    places = [(table[0, 29 // PAGE], 29 % PAGE), *((table[1, p // PAGE], p % PAGE) for p in range(13))]
    emptied = pages.at[tuple(np.asarray(places).T)].set(jnp.nan)

    @jax.jit
    def step(pages: jax.Array) -> jax.Array:
        pages = update_pages(pages, None, jnp.asarray(new, jnp.float32), None, table, lengths, cum)
        return mla_ragged_page_attention(q_nope, q_rope, pages, table, lengths, cum, softmax_scale=SCALE)

    np.testing.assert_allclose(layer.values(step(emptied)), layer.decompressed()[0], atol=3e-5)


def test_pages_of_a_layer_in_a_pool():
    layer = Layer((1, 13), (30, 13), 4)
    q_nope, q_rope, pages, *rest = layer.arguments()
    pool = jnp.concatenate([jnp.full_like(pages, jnp.nan), pages])
    out = mla_ragged_page_attention(q_nope, q_rope, pool, *rest, softmax_scale=SCALE, page_offset=len(pages))
    np.testing.assert_allclose(layer.values(out), layer.decompressed()[0], atol=3e-5)


def test_heads_over_an_explicit_mesh():
    """Latents are whole on every device."""
    layer = Layer((1, 13), (30, 13), 4)
    q_nope, q_rope, *rest = layer.arguments()
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    call = jax.jit(lambda *x: mla_ragged_page_attention(*x, softmax_scale=SCALE, return_lse=True))
    with jax.set_mesh(mesh):
        split = [jax.device_put(x, NamedSharding(mesh, P(None, "heads"))) for x in (q_nope, q_rope)]
        compiled = call.lower(*split, *rest).compile()
        out, lse = compiled(*split, *rest)
        assert not any(name in compiled.as_text() for name in ("all-gather", "all-reduce", "all-to-all"))
        assert jax.typeof(out).sharding.spec[1] == jax.typeof(lse).sharding.spec[1] == "heads"
        by_token = [jax.device_put(x, NamedSharding(mesh, P("heads"))) for x in (q_nope, q_rope)]
        with pytest.raises(ValueError, match=r"mla_ragged_page_attention: .*cannot be split by tokens"):
            mla_ragged_page_attention(*by_token, *rest)
        by_page = jax.device_put(rest[0], NamedSharding(mesh, P("heads")))
        with pytest.raises(ValueError, match=r"mla_ragged_page_attention: .*reshard the cache, or give each device"):
            mla_ragged_page_attention(q_nope, q_rope, by_page, *rest[1:])
    np.testing.assert_allclose(layer.values(out), layer.decompressed()[0], atol=3e-5)


CALL = Layer((1, 5), (20, 11), 3).arguments()
WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "rank": (lambda: mla_ragged_page_attention(CALL[0][None], *CALL[1:]), ValueError, "q_nope must be"),
    "tokens": (lambda: mla_ragged_page_attention(CALL[0], CALL[1][1:], *CALL[2:]), ValueError, "q_rope must be"),
    "heads": (lambda: mla_ragged_page_attention(CALL[0][:, 1:], *CALL[1:]), ValueError, "q_rope must be"),
    "dtypes": (
        lambda: mla_ragged_page_attention(CALL[0], CALL[1].astype(jnp.bfloat16), *CALL[2:]), TypeError, "one dtype",
    ),
    "integers": (lambda: mla_ragged_page_attention(CALL[0].astype(int), *CALL[1:]), TypeError, "q_nope must be float"),
    "width of latents": (
        lambda: mla_ragged_page_attention(*CALL[:2], CALL[2][..., 1:], *CALL[3:]), ValueError, "32 together",
    ),
    "heads of latents": (
        lambda: mla_ragged_page_attention(*CALL[:2], jnp.stack([CALL[2]] * 2, 2), *CALL[3:]), ValueError, "one latent",
    ),
    "boundaries": (lambda: mla_ragged_page_attention(*CALL[:5], CALL[5][1:]), ValueError, "cum_q_lens must be"),
    "bits": (
        lambda: mla_ragged_page_attention(*CALL, tree_mask=jnp.zeros((5, 1), jnp.uint32)), ValueError, "tree_mask must",
    ),
    "key_scale": (lambda: mla_ragged_page_attention(*CALL, key_scale=1.0), TypeError, "key_scale"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_one_clear_error(name: str):
    call, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        call()
