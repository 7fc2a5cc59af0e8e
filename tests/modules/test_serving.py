"""The serving functions: signatures, errors, what they have in common, transformations, tuning."""

import inspect
import re
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tilewright
from tilewright import modules
from tilewright.errors import UnsupportedError
from tilewright.kernels import OPS, function, kernel
from tilewright.kernels.op.signatures import short
from tilewright.kernels.paged_attention.op import PagedAttentionKernel
from tilewright.kernels.paged_attention.ops.decode_attention import DecodeCase
from tilewright.kernels.paged_attention.ops.mla_decode import MlaCase
from tilewright.kernels.paged_attention.ops.ragged_page_attention import RaggedPageCase
from tilewright.kernels.paged_attention.ops.rope_update_pages import RopeUpdatePages
from tilewright.kernels.paged_attention.ops.update_pages import UpdatePages
from tilewright.modules import (
    PageAttention,
    chunked_prefill_paged_decode,
    decode_attention,
    flash_mla,
    mla_decode,
    page_attention,
    ragged_decode_attention,
    ragged_page_attention,
    unified_attention,
    update_pages,
)
from tilewright.ops import ConfigSelectorChain, Executor, Tuner, from_json, to_json
from tilewright.ops.utils.datacarrier import FwdParams

SERVING = PagedAttentionKernel | UpdatePages | RopeUpdatePages
FUNCTIONS = {name: function(name) for name in OPS if isinstance(kernel(name), SERVING)}
every_function = pytest.mark.parametrize("name", FUNCTIONS)


def draw(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


QUERY, KEY_PAGES, VALUE_PAGES = draw(3, 4, 16), draw(12, 8, 2, 16, seed=1), draw(12, 8, 2, 16, seed=2)
TABLE = jnp.asarray(np.random.default_rng(3).permutation(12).reshape(3, 4), jnp.int32)
LENGTHS = jnp.asarray([5, 32, 17], jnp.int32)
CALL = (QUERY, KEY_PAGES, VALUE_PAGES, TABLE, LENGTHS)


@every_function
def test_the_signature_is_that_of_prepare_and_every_argument_is_documented(name: str):
    function, op = FUNCTIONS[name], kernel(name)
    ours = list(inspect.signature(function).parameters.values())
    prepare = [p.replace(annotation=short(p.annotation)) for p in inspect.signature(op.prepare).parameters.values()]
    own = [p for p in prepare if p.kind is not p.VAR_KEYWORD]
    assert ours[: len(own)] == own
    for p in prepare[len(own) :]:
        (options,) = typing.get_args(p.annotation)
        shared = ours[len(own) :]
        assert {p.name: p.annotation for p in shared} == {n: short(kind) for n, kind in options.__annotations__.items()}
        assert {p.name: p.default for p in shared if p.default is not None} == {"return_lse": False}
    assert ours[-1].name == "cfg"
    assert {p.kind for p in ours[len(own) :]} <= {inspect.Parameter.KEYWORD_ONLY}
    documented = inspect.getdoc(function) or ""
    for parameter in inspect.signature(function).parameters:
        assert f"  {parameter}: " in documented, parameter


def test_names_of_kernels_and_functions():
    assert flash_mla is mla_decode
    for name in FUNCTIONS:
        kind = "".join(part.capitalize() for part in name.split("_"))
        assert isinstance(kernel(name), getattr(modules, kind))


def test_one_problem_in_all_layouts():
    options: dict[str, Any] = {"sliding_window": 20, "softmax_aux": jnp.ones(4), "return_lse": True}
    want = page_attention(*CALL, **options)
    dense = [pages[TABLE].reshape(3, 32, 2, 16) for pages in (KEY_PAGES, VALUE_PAGES)]
    cum = jnp.arange(4)
    new = [pages[TABLE[jnp.arange(3), (LENGTHS - 1) // 8], (LENGTHS - 1) % 8] for pages in (KEY_PAGES, VALUE_PAGES)]
    vllm = {"window_size": (20, -1), "sinks": jnp.ones(4), "return_lse": True}
    found = {
        "paged": decode_attention(QUERY, KEY_PAGES, VALUE_PAGES, LENGTHS, TABLE, **options),
        "by name": page_attention(
            query=QUERY, key_pages=KEY_PAGES, value_pages=VALUE_PAGES, lengths=LENGTHS, page_table=TABLE, **options
        ),
        "dense": decode_attention(QUERY, *dense, LENGTHS, **options),
        "range": ragged_decode_attention(QUERY, *dense, jnp.zeros(3, int), LENGTHS, **options),
        "ragged": ragged_page_attention(*CALL, cum, **options),
        "unified": unified_attention(QUERY, KEY_PAGES, VALUE_PAGES, cum, LENGTHS, TABLE, **vllm),
        "chunked": chunked_prefill_paged_decode(QUERY, *new, KEY_PAGES, VALUE_PAGES, TABLE, LENGTHS, cum, **options),
    }
    for name, (out, lse, *pages) in found.items():
        np.testing.assert_allclose(out, want[0], atol=1e-6, err_msg=name)
        np.testing.assert_allclose(lse, want[1], atol=1e-6, err_msg=name)
        for ours, before in zip(pages, (KEY_PAGES, VALUE_PAGES), strict=False):
            np.testing.assert_array_equal(ours, before)


def by_hand(q_lengths: tuple[int, ...], **options: Any) -> np.ndarray:
    """What packed queries give, row by row in float64; options as `ragged_page_attention` has them."""
    causal, window = options.get("causal", True), options.get("sliding_window", (None, None))
    scale, cap = options.get("softmax_scale", 0.25), options.get("logits_soft_cap")
    slopes, sinks = (np.asarray(options.get(name, np.zeros((4, 0)))) for name in ("alibi_slopes", "softmax_aux"))
    token, results = 0, []
    for sequence, count in enumerate(q_lengths):
        length = int(LENGTHS[sequence])
        keys, values = (
            np.asarray(pages, np.float64)[np.asarray(TABLE[sequence])].reshape(-1, 2, 16)[:length]
            for pages in (KEY_PAGES, VALUE_PAGES)
        )
        for position in range(length - count, length):
            ahead = np.arange(length) - position
            seen = (ahead <= 0) if causal else np.ones(length, bool)
            seen &= (window[0] is None or -ahead <= window[0]) & (window[1] is None or ahead <= window[1])
            for head in range(4):
                logits = scale * keys[:, head // 2] @ np.asarray(PACKED[token, head], np.float64)
                logits = logits + (slopes[head] * ahead if slopes.ndim == 1 else 0)
                logits = np.where(seen, logits if cap is None else cap * np.tanh(logits / cap), -np.inf)
                weights = np.exp(logits)
                results.append(weights @ values[:, head // 2] / (weights.sum() + np.exp(sinks[head]).sum()))
            token += 1
    return np.stack(results).reshape(token, 4, 16)


PACKED = draw(8, 4, 16, seed=6)
PACKED_OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "not causal": {"causal": False},
    "window": {"sliding_window": (3, 0)},
    "window on both sides": {"causal": False, "sliding_window": (3, 2)},
    "scale": {"softmax_scale": -0.7},
    "cap": {"logits_soft_cap": 0.5},
    "sinks": {"softmax_aux": draw(4, 2, seed=7)},
    "slopes": {"alibi_slopes": jnp.asarray([0.5, -0.1, 0.0, 2.0])},
}


@pytest.mark.parametrize("name", PACKED_OPTIONS)
def test_every_option_reaches_the_kernel(name: str):
    """Written out here: backends and their oracle are both told what prepare makes of a call."""
    got = ragged_page_attention(PACKED, *CALL[1:], jnp.asarray([0, 2, 7, 8]), **PACKED_OPTIONS[name])
    np.testing.assert_allclose(got, by_hand((2, 5, 1), **PACKED_OPTIONS[name]), atol=1e-5)


def test_tokens_of_no_sequence_see_nothing_and_are_not_written():
    """Before the first boundary and behind the last one."""
    cum = jnp.asarray([2, 4, 6, 7])
    out, lse = ragged_page_attention(PACKED, *CALL[1:], cum, return_lse=True)
    want = ragged_page_attention(PACKED[2:7], *CALL[1:], cum - 2)
    np.testing.assert_allclose(out[2:7], want, atol=1e-6)
    for outside in (slice(0, 2), slice(7, 8)):
        assert not np.any(out[outside])
        assert np.all(np.isneginf(lse[outside]))
    new = draw(8, 2, 16, seed=8)
    ours = update_pages(*CALL[1:3], new, new, TABLE, LENGTHS, cum)
    theirs = update_pages(*CALL[1:3], new[2:7], new[2:7], TABLE, LENGTHS, cum - 2)
    for got, wanted in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_latents_are_keys_whose_first_part_is_the_value():
    latents, query = draw(12, 8, 24, seed=4), draw(3, 2, 4, 24, seed=5)
    got = mla_decode(query, latents, TABLE, LENGTHS, kv_lora_rank=20, softmax_scale=0.2)
    pages = latents[:, :, None]
    packed = query.reshape(6, 4, 24)
    want = ragged_page_attention(packed, pages, pages[..., :20], TABLE, LENGTHS, jnp.arange(0, 7, 2), softmax_scale=0.2)
    np.testing.assert_allclose(got, want.reshape(3, 2, 4, 20), atol=1e-6)


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "rank of query": (lambda: page_attention(QUERY[None], *CALL[1:]), ValueError, "query must be"),
    "heads": (lambda: page_attention(draw(3, 5, 16), *CALL[1:]), ValueError, "must divide the query heads"),
    "head dim": (lambda: page_attention(draw(3, 4, 8), *CALL[1:]), ValueError, "same head dim"),
    "dtype": (lambda: page_attention(QUERY.astype(jnp.bfloat16), *CALL[1:]), TypeError, "query's dtype"),
    "integer query": (lambda: page_attention(QUERY.astype(int), *CALL[1:]), TypeError, "query must be float16"),
    "dtypes of pages": (
        lambda: page_attention(QUERY, KEY_PAGES, VALUE_PAGES.astype(jnp.float16), TABLE, LENGTHS),
        TypeError, "one dtype",
    ),
    "pages that differ": (lambda: page_attention(QUERY, KEY_PAGES, VALUE_PAGES[:5], *CALL[3:]), ValueError, "agree in"),
    "no values": (lambda: page_attention(QUERY, KEY_PAGES, None, *CALL[3:]), TypeError, "value_pages"),
    "too short a table": (lambda: page_attention(*CALL[:3], TABLE[:2], LENGTHS), ValueError, "page_table must be"),
    "a table of floats": (lambda: page_attention(*CALL[:3], TABLE * 1.0, LENGTHS), TypeError, "integers"),
    "lengths": (lambda: page_attention(*CALL[:4], LENGTHS[:2]), ValueError, "lengths must be"),
    "boundaries": (lambda: ragged_page_attention(*CALL, jnp.arange(3)), ValueError, "cum_q_lens must be"),
    "int8 without scales": (
        lambda: page_attention(QUERY, *(p.astype(jnp.int8) for p in CALL[1:3]), *CALL[3:]), TypeError, "need scales",
    ),
    "shape of scales": (lambda: page_attention(*CALL, key_scale=jnp.ones((12, 7, 1))), ValueError, "rank 3"),
    "sinks": (lambda: page_attention(*CALL, softmax_aux=jnp.ones(3)), ValueError, "softmax_aux"),
    "slopes": (lambda: page_attention(*CALL, alibi_slopes=jnp.ones(3)), ValueError, "alibi_slopes"),
    "window": (lambda: page_attention(*CALL, sliding_window=-1), ValueError, "sliding_window"),
    "cap": (lambda: page_attention(*CALL, logits_soft_cap=0.0), ValueError, "logits_soft_cap"),
    "unknown option": (lambda: page_attention(*CALL, causal=True), TypeError, "causal"),
    "half of the new": (lambda: ragged_page_attention(*CALL, jnp.arange(4), new_key=QUERY), TypeError, "go together"),
    "shape of the new": (
        lambda: ragged_page_attention(*CALL, jnp.arange(4), new_key=QUERY, new_value=QUERY), ValueError, "kv_heads",
    ),
    "dense caches": (lambda: decode_attention(QUERY, KEY_PAGES, VALUE_PAGES, LENGTHS), ValueError, "page_table"),
    "latents with heads": (lambda: mla_decode(QUERY, KEY_PAGES, TABLE, LENGTHS), ValueError, "one latent"),
    "rank of latents": (
        lambda: mla_decode(QUERY, KEY_PAGES[:, :, :1], TABLE, LENGTHS, kv_lora_rank=17), ValueError, "kv_lora_rank=17",
    ),
    "vLLM's window": (
        lambda: unified_attention(QUERY, *CALL[1:3], jnp.arange(4), LENGTHS, TABLE, window_size=(-2, 0)),
        ValueError, "window_size",
    ),
    "no page to write to": (
        lambda: update_pages(*CALL[1:3], KEY_PAGES[:3, 0], VALUE_PAGES[:3, 0], TABLE[:, :0], LENGTHS),
        ValueError, "columns",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_shapes_show_is_one_clear_error(name: str):
    call, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        call()


def test_a_gradient_is_refused_by_name():
    with pytest.raises(TypeError, match="page_attention is for inference"):
        jax.grad(lambda q: page_attention(q, *CALL[1:]).sum())(QUERY)
    new = KEY_PAGES[:3, 0], VALUE_PAGES[:3, 0]
    with pytest.raises(TypeError, match="update_pages is for inference"):
        jax.jit(jax.grad(lambda p: update_pages(p, VALUE_PAGES, *new, TABLE, LENGTHS)[0].sum()))(KEY_PAGES)


def test_vmap_over_anything():
    queries, lengths = jnp.stack([QUERY, -QUERY]), jnp.stack([LENGTHS, LENGTHS // 2])
    got = jax.jit(jax.vmap(page_attention, in_axes=(0, None, None, None, 0)))(queries, *CALL[1:4], lengths)
    for i in range(2):
        want = page_attention(queries[i], *CALL[1:4], lengths[i])
        np.testing.assert_allclose(got[i], want, atol=1e-6)
    caches = jnp.stack([KEY_PAGES, 2 * KEY_PAGES])
    both = jax.vmap(page_attention, in_axes=(None, 0, None, None, None))(QUERY, caches, *CALL[2:])
    np.testing.assert_allclose(both[1], page_attention(QUERY, caches[1], *CALL[2:]), atol=1e-6)


@pytest.mark.parametrize("writes", [False, True])
def test_heads_over_an_explicit_mesh(writes: bool):
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    new = {"new_key": draw(3, 2, 16, seed=7), "new_value": draw(3, 2, 16, seed=8)} if writes else {}
    options = {"softmax_aux": draw(4, seed=9), "return_lse": True}
    want = ragged_page_attention(*CALL, jnp.arange(4), **new, **options)
    with jax.set_mesh(mesh):
        rows, pages = NamedSharding(mesh, P(None, "tensor")), NamedSharding(mesh, P(None, None, "tensor"))
        placed = jax.device_put(QUERY, rows), *(jax.device_put(p, pages) for p in CALL[1:3])
        placed_new = {name: jax.device_put(array, rows) for name, array in new.items()}
        got = jax.jit(lambda *x, **k: ragged_page_attention(*x, *CALL[3:], jnp.arange(4), **k, **options))(
            *placed, **placed_new
        )
        assert jax.typeof(got[0]).sharding.spec[1] == "tensor"
        with pytest.raises(ValueError, match="split alike by heads"):
            page_attention(placed[0], *CALL[1:])
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


SEQUENCES = 8
BY_SEQUENCE, BY_SEQUENCE_AND_HEAD = P("data"), P("data", "tensor")


@pytest.mark.parametrize(
    ("name", "specs"),
    {
        "page_attention": (BY_SEQUENCE, P(), P(), BY_SEQUENCE, BY_SEQUENCE),
        "page_attention, whole tables, heads": (BY_SEQUENCE_AND_HEAD, *[P(None, None, "tensor")] * 2, P(), P()),
        "decode_attention": (BY_SEQUENCE,) * 4,
        "decode_attention, heads": (BY_SEQUENCE_AND_HEAD, *[P("data", None, "tensor")] * 2, P()),
        "ragged_decode_attention": (BY_SEQUENCE,) * 5,
        "mla_decode": (BY_SEQUENCE_AND_HEAD, P(), BY_SEQUENCE, BY_SEQUENCE),
    }.items(),
)
def test_sequences_over_an_explicit_mesh(name: str, specs: tuple[P, ...]):
    """Each device serves its sequences, without communication, whether the tables are split or whole."""
    table = jnp.asarray(np.random.default_rng(3).permutation(32).reshape(SEQUENCES, 4), jnp.int32)
    lengths = jnp.array([1, 24, 5, 0, 17, 9, 22, 8])
    query, pages = draw(SEQUENCES, 4, 16), [draw(32, 8, 2, 16, seed=seed) for seed in (1, 2)]
    contiguous = [draw(SEQUENCES, 24, 2, 16, seed=seed) for seed in (4, 5)]
    calls = {
        "page_attention": (query, *pages, table, lengths),
        "decode_attention": (query, *contiguous, lengths),
        "ragged_decode_attention": (query, *contiguous, lengths // 3, lengths),
        "mla_decode": (draw(SEQUENCES, 4, 24), draw(32, 8, 24, seed=6), table, lengths),
    }
    op, arrays = name.partition(",")[0], calls[name.partition(",")[0]]
    options = {"kv_lora_rank": 16} if op == "mla_decode" else {}
    function = lambda *x: FUNCTIONS[op](*x, return_lse=True, **options)
    want = function(*arrays)
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
        compiled = jax.jit(function).lower(*placed).compile()
        got = compiled(*placed)
    assert not re.search("all-gather|all-reduce|all-to-all|collective-permute", compiled.as_text())
    for ours, theirs in zip(got, want, strict=True):
        assert tuple(ours.sharding.spec)[: len(specs[0])] == tuple(specs[0])
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


@pytest.mark.parametrize("heads", [None, "tensor"])
def test_tokens_of_sequences_on_several_devices_are_written_to_every_copy_of_the_pages(heads: str | None):
    table = jnp.asarray(np.random.default_rng(3).permutation(32).reshape(SEQUENCES, 4), jnp.int32)
    arrays = (draw(32, 8, 2, 16), None, draw(SEQUENCES, 2, 16, seed=1), None, table, jnp.arange(1, SEQUENCES + 1))
    want = update_pages(*arrays)
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    specs = (P(None, None, heads), None, P("data", heads), None, BY_SEQUENCE, BY_SEQUENCE)
    with jax.set_mesh(mesh):
        placed = [
            None if x is None else jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(arrays, specs, strict=True)
        ]
        got = jax.jit(update_pages)(*placed)
        with pytest.raises(ValueError, match=r"^update_pages: .*by heads alone.*context_parallel_update_pages"):
            update_pages(jax.device_put(arrays[0], NamedSharding(mesh, P("data"))), *placed[1:])
    assert jax.typeof(got).sharding.spec[2] == heads
    np.testing.assert_array_equal(got, want)


def test_a_split_of_sequences_that_would_need_communication_is_one_clear_error():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    query, table = draw(4, 4, 16), jnp.arange(12, dtype=jnp.int32).reshape(4, 3)
    with jax.set_mesh(mesh):
        by_sequence = NamedSharding(mesh, P("data"))
        split, pages = jax.device_put(query, by_sequence), jax.device_put(KEY_PAGES, by_sequence)
        with pytest.raises(ValueError, match=r"page_attention: pages that a table names cannot be split"):
            page_attention(split, pages, pages, table, jnp.ones(4, int))
        with pytest.raises(ValueError, match=r"ragged_page_attention: .*cannot be split by tokens.*shard_map"):
            ragged_page_attention(split, KEY_PAGES, VALUE_PAGES, table, jnp.ones(4, int), jnp.arange(5))
        with pytest.raises(ValueError, match="split alike by sequences"):
            decode_attention(jnp.concatenate([query] * 3), pages, pages, jnp.ones(12, int))
        latents = jax.device_put(KEY_PAGES[:, :, 0], by_sequence)
        with pytest.raises(ValueError, match=r"mla_decode: .*call context_parallel_mla_decode inside"):
            mla_decode(query, latents, table, jnp.ones(4, int), kv_lora_rank=8)
        by_length = jax.device_put(KEY_PAGES, NamedSharding(mesh, P(None, "data")))
        with pytest.raises(ValueError, match=r"decode_attention: .*call flash_attention with key_value_seq_lengths"):
            decode_attention(jnp.concatenate([query] * 3), by_length, by_length, jnp.ones(12, int))


def test_explain_and_strict_platforms():
    explanation = Executor(ConfigSelectorChain()).explain(PageAttention(), *CALL, quiet=True)
    (choice,) = explanation.choices
    assert choice.config.backend == "xla"
    assert "triton" in choice.rejected
    with pytest.raises(UnsupportedError, match="cuda"):
        page_attention(*CALL, platform="cuda")


TUNED = [
    ("decode_attention", DecodeCase("", kv_length=40, heads=4, head_dim=16, kv_dtype="int8", scale="token")),
    ("ragged_page_attention", RaggedPageCase("", kv_length=40, heads=4, head_dim=16, write=True, q_lengths=(1, 5))),
    ("mla_decode", MlaCase("", kv_length=40, heads=4, head_dim=24, value_dim=16, dtype="bfloat16")),
]


@pytest.mark.parametrize(("op", "case"), TUNED)
def test_tuning_checks_every_candidate(op: str, case: Any):
    positional, keywords = case.arguments()
    chain = ConfigSelectorChain()
    run = lambda *x: Executor(chain)(kernel(op), *x, **keywords)
    (call,) = tilewright.tune(run, *positional, tuner=Tuner(1, 1), chooser=chain)
    assert {candidate.check for candidate in call.candidates} == {"passed"}
    assert from_json(to_json(call.winner.config.params), FwdParams) == call.winner.config.params


def test_tuning_without_values_draws_valid_ones():
    abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in CALL]
    chain = ConfigSelectorChain()
    (call,) = tilewright.tune(
        lambda *x: Executor(chain)(PageAttention(), *x), *abstract, tuner=Tuner(1, 1), chooser=chain
    )
    assert call.winner.check == "passed"
