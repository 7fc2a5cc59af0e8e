"""Attention over pages that are dealt out to devices, against the definition over whole sequences in float64."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tilewright.errors import UnsupportedError
from tilewright.kernels.paged_attention import context_parallel, split_pages
from tilewright.kernels.paged_attention.split_pages import SplitPages
from tilewright.modules import (
    context_parallel_mla_decode,
    context_parallel_page_attention,
    context_parallel_update_pages,
    page_attention,
)

DEVICES, HEADS, KV_HEADS, DIM, VALUE_DIM, PAGE_SIZE, COLUMNS = 4, 8, 2, 16, 8, 4, 10
CAPACITY = PAGE_SIZE * COLUMNS
LENGTHS = (37, 40, 0, 3, 8, 21)
"""Of which the fourth has all of its tokens on one device, and the fifth on two."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A call over whole sequences.

    Attributes:
      q_lengths: ``None`` for one token of each sequence, without boundaries.
      missing: columns of the table whose pages do not exist.
    """

    lengths: tuple[int, ...] = LENGTHS
    q_lengths: tuple[int, ...] | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    sinks: int = 0
    alibi: bool = False
    missing: tuple[int, ...] = ()
    dtype: str = "float32"
    axis_name: Any = "pages"

    @property
    def counts(self) -> tuple[int, ...]:
        return self.q_lengths or (1,) * len(self.lengths)


SHORT, LONG = (3, 1, 2, 3, 0, 4), (20, 1, 0, 3, 8, 21)
CALLS = {
    "decoding": Call(),
    "window": Call(options={"sliding_window": 9}),
    "window shorter than a page": Call(options={"sliding_window": 2}, sinks=1),
    "soft cap, sinks": Call(options={"logits_soft_cap": 1.5}, sinks=2),
    "slopes": Call(alibi=True, sinks=1),
    "slopes, window": Call(alibi=True, options={"sliding_window": 11}),
    "pages that do not exist": Call(missing=(1, 4, 9)),
    "no page exists": Call(missing=tuple(range(COLUMNS)), sinks=1),
    "lengths beyond the table": Call(lengths=(60, -3, 41, 40, 44, 1), options={"sliding_window": 12}),
    "short prefill": Call(q_lengths=SHORT),
    "short prefill, window, sinks, soft cap": Call(
        q_lengths=SHORT, options={"sliding_window": 6, "logits_soft_cap": 1.5}, sinks=2
    ),
    "short prefill, both sides": Call(q_lengths=SHORT, options={"sliding_window": (5, 2), "causal": False}),
    "short prefill, not causal": Call(q_lengths=SHORT, options={"causal": False}, sinks=1),
    "short prefill, slopes": Call(q_lengths=SHORT, alibi=True),
    "long prefill": Call(q_lengths=LONG, sinks=1),
    "long prefill, window": Call(q_lengths=LONG, options={"sliding_window": (7, 0)}),
    "more new tokens than cached": Call(q_lengths=(3, 3, 2, 5, 2, 1)),
    "bfloat16": Call(dtype="bfloat16", sinks=1),
    "two axes": Call(axis_name=("hosts", "pages")),
}
QUICK = ["decoding", "short prefill, window, sinks, soft cap"]


def definition(query: Any, key: Any, value: Any, call: Call, sinks: Any, slopes: Any) -> tuple[Any, Any]:
    """Token by token, in float64; keys and values are ``[sequences, CAPACITY, kv_heads, ...]``."""
    options = {"sliding_window": None, "causal": True, "logits_soft_cap": None, **call.options}
    window, causal = options["sliding_window"], options["causal"]
    left, right = window if isinstance(window, tuple) else (window, 0 if causal else window)
    right = 0 if causal else right
    outs, lses = [], []
    at = np.arange(CAPACITY)
    owners = [(s, i, n) for s, n in enumerate(call.counts) for i in range(n)]
    for token, (s, i, n) in enumerate(owners):
        length = max(call.lengths[s], 0)
        position = length - n + i
        seen = (at < length) & ~np.isin(at // PAGE_SIZE, call.missing)
        seen &= (left is None) | (at >= position - (left or 0))
        seen &= (right is None) | (at <= position + (right or 0))
        for head in range(HEADS):
            group = head * key.shape[2] // HEADS
            logits = key[s, seen, group] @ query[token, head] / np.sqrt(query.shape[-1])
            if slopes is not None:
                logits = logits + slopes[head] * (at[seen] - position)
            if cap := options["logits_soft_cap"]:
                logits = cap * np.tanh(logits / cap)
            everything = np.concatenate([logits, [] if sinks is None else sinks[head]])
            lse = np.logaddexp.reduce(everything) if everything.size else -np.inf
            lses.append(lse)
            outs.append(np.exp(logits - lse) @ value[s, seen, group] if seen.any() else np.zeros(value.shape[-1]))
    return np.reshape(outs, (len(owners), HEADS, -1)), np.reshape(lses, (len(owners), HEADS))


def dealt_out(dense: np.ndarray, seed: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """The pages of all devices, one device's after the other, in random order beside pages of NaN; and the table."""
    random = np.random.default_rng(seed)
    sequences, own = dense.shape[0], -(-COLUMNS // DEVICES)
    per_device = sequences * own + 2
    pages = np.full((DEVICES, per_device, PAGE_SIZE, *dense.shape[2:]), np.nan)
    table = np.zeros((sequences, COLUMNS), np.int32)
    for device in range(DEVICES):
        numbers = random.permutation(per_device)[: sequences * own].reshape(sequences, own)
        for column in range(device, COLUMNS, DEVICES):
            table[:, column] = numbers[:, column // DEVICES]
            tokens = dense[:, column * PAGE_SIZE : (column + 1) * PAGE_SIZE]
            pages[device, table[:, column]] = tokens
    return pages.reshape(-1, *pages.shape[2:]), table


def mesh_of(axis_name: Any = "pages") -> Any:
    sizes = (DEVICES,) if isinstance(axis_name, str) else (2, DEVICES // 2)
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes), devices=jax.devices()[:DEVICES])


class Drawn:
    """The arrays of a call, and what it gives by definition."""

    def __init__(self, call: Call, latent: bool = False) -> None:
        random = np.random.default_rng(1)
        kv_heads, sequences = 1 if latent else KV_HEADS, len(call.lengths)
        exact = lambda *shape: np.asarray(jnp.asarray(random.standard_normal(shape), call.dtype), np.float64)
        query = exact(sum(call.counts), HEADS, DIM)
        key = exact(sequences, CAPACITY, kv_heads, DIM)
        value = key[..., :VALUE_DIM] if latent else exact(sequences, CAPACITY, kv_heads, VALUE_DIM)
        sinks = exact(HEADS, call.sinks) if call.sinks else None
        slopes = 2.0 ** -np.arange(1.0, HEADS + 1) if call.alibi else None
        self.want = definition(query, key, value, call, sinks, slopes)
        self.pages = [jnp.asarray(dealt_out(x)[0], call.dtype) for x in (key, value)]
        table = dealt_out(key)[1]
        table[:, list(call.missing)] = 99
        self.query, self.table = jnp.asarray(query, call.dtype), jnp.asarray(table)
        self.lengths = jnp.asarray(call.lengths, jnp.int32)
        self.bounds = None if call.q_lengths is None else jnp.asarray(np.append(0, np.cumsum(call.counts)), jnp.int32)
        self.arrays = {"softmax_aux": sinks, "alibi_slopes": slopes}
        self.arrays = {name: jnp.asarray(x, jnp.float32) for name, x in self.arrays.items() if x is not None}


def check(got: Any, want: Any, dtype: str) -> None:
    atol = 2e-2 if dtype == "bfloat16" else 3e-6
    for ours, exact in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(ours, np.float64), exact, atol=atol)
    assert got[0].dtype == jnp.dtype(dtype)
    assert got[1].dtype == jnp.float32


@pytest.fixture(name="summed")
def _summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the partial results of all devices were larger than their sum by much."""
    monkeypatch.setattr(split_pages, "SECOND_COLLECTIVE_BYTES", -(1 << 40))


@pytest.mark.parametrize(("check_vma", "sums"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_whole_sequences(name: str, check_vma: bool, sums: bool, request: pytest.FixtureRequest):
    if sums:
        request.getfixturevalue("summed")
    call = CALLS[name]
    drawn = Drawn(call)

    def attend(query: Any, key: Any, value: Any, arrays: Any) -> Any:
        return context_parallel_page_attention(
            query, key, value, drawn.table, drawn.lengths, drawn.bounds,
            axis_name=call.axis_name, return_lse=True, **arrays, **call.options,
        )  # fmt: skip

    split = P(call.axis_name)
    run = jax.shard_map(
        attend, mesh=mesh_of(call.axis_name), in_specs=(P(), split, split, P()), out_specs=P(), check_vma=check_vma
    )
    compiled = jax.jit(run).lower(drawn.query, *drawn.pages, drawn.arrays).compile()
    check(compiled(drawn.query, *drawn.pages, drawn.arrays), drawn.want, call.dtype)
    found = re.findall(r"= (\S+) (all-\w+|collective-permute|reduce-scatter)(?:-start)?\(", compiled.as_text())
    sizes = [int(np.prod([int(n) for n in re.findall(r"\d+", text.partition("[")[2].partition("]")[0])]))
             for text, _ in found]  # fmt: skip
    rows = drawn.query.shape[0] * HEADS
    if sums:  # a maximum of [tokens, heads], and a sum of [tokens, heads, value_dim + 1]
        assert [name for _, name in found] == ["all-reduce"] * 2
        assert sorted(sizes) == [rows, rows * (VALUE_DIM + 1)]
        assert all(text.startswith("f32") for text, _ in found)
    else:  # the bits of results and their lse
        narrow = call.dtype == "bfloat16"
        assert [(name, text.partition("[")[0]) for text, name in found] == [("all-gather", "u16" if narrow else "u32")]
        assert sizes == [DEVICES * rows * (VALUE_DIM + (2 if narrow else 1))]


@pytest.mark.parametrize(
    ("devices", "dtype", "tokens", "sums"),
    [
        (2, "bfloat16", 10**6, False),
        (4, "bfloat16", 10**6, False),
        (8, "bfloat16", 10**6, True),
        (8, "bfloat16", 4, False),
        (2, "float32", 10**6, False),
        (4, "float32", 10**6, True),
    ],
)
def test_many_results_of_many_devices_are_summed(devices: int, dtype: str, tokens: int, sums: bool):
    split = SplitPages("pages", devices, jnp.int32(0))
    assert split.sums(jax.ShapeDtypeStruct((tokens, 32, 128), jnp.dtype(dtype))) == sums


LATENT_CALLS = {
    "decoding": (Call(), 1),
    "two tokens, sinks, soft cap": (Call(q_lengths=(2,) * 6, options={"logits_soft_cap": 1.5}, sinks=2), 2),
    "two tokens, not causal": (Call(q_lengths=(2,) * 6, options={"causal": False}), 2),
    "window": (Call(options={"sliding_window": 9}), 1),
    "slopes": (Call(alibi=True), 1),
    "more tokens than devices": (Call(q_lengths=(5,) * 6), 5),
}


@pytest.mark.parametrize("name", LATENT_CALLS)
def test_latents(name: str):
    call, q_length = LATENT_CALLS[name]
    drawn = Drawn(call, latent=True)
    query = drawn.query if q_length == 1 else drawn.query.reshape(-1, q_length, HEADS, DIM)

    def attend(query: Any, latents: Any, arrays: Any) -> Any:
        return context_parallel_mla_decode(
            query, latents, drawn.table, drawn.lengths,
            axis_name="pages", kv_lora_rank=VALUE_DIM, return_lse=True, **arrays, **call.options,
        )  # fmt: skip

    run = jax.jit(jax.shard_map(attend, mesh=mesh_of(), in_specs=(P(), P("pages"), P()), out_specs=P()))
    out, lse = run(query, drawn.pages[0][:, :, 0], drawn.arrays)
    assert out.shape == (*query.shape[:-1], VALUE_DIM)
    check((out.reshape(-1, HEADS, VALUE_DIM), lse.reshape(-1, HEADS)), drawn.want, call.dtype)


@pytest.mark.parametrize("quantised", [False, True])
def test_new_tokens_are_written_by_the_devices_that_have_their_pages(quantised: bool):
    """Two steps: a prompt that spans devices, and a token of each sequence; then all of it is attended to."""
    sequences, prompt = 3, np.array([13, 0, 6])
    random = np.random.default_rng(2)
    dense = random.standard_normal((sequences, CAPACITY, KV_HEADS, DIM)).astype(np.float32)
    empty, table = dealt_out(np.zeros_like(dense))
    pages = jnp.asarray(np.nan_to_num(empty), jnp.int8 if quantised else jnp.float32)
    scale = jnp.ones((*pages.shape[:2], KV_HEADS)) if quantised else None
    scales = {"key_scale": scale, "value_scale": scale} if quantised else {}
    packed = jnp.concatenate([dense[s, :n] for s, n in enumerate(prompt)])
    last = jnp.stack([dense[s, n] for s, n in enumerate(prompt)])
    query = jnp.asarray(random.standard_normal((sequences, HEADS, DIM)), jnp.float32)

    def serve(query: Any, key: Any, value: Any, scales: Any) -> Any:
        cache = [key, value, *scales.values()]
        steps = ((packed, prompt, jnp.asarray(np.append(0, np.cumsum(prompt)))), (last, prompt + 1, None))
        for new, lengths, bounds in steps:
            given = dict(zip(scales, cache[2:], strict=True))
            cache = context_parallel_update_pages(
                *cache[:2], new, -new, table, jnp.asarray(lengths), bounds, axis_name="pages", **given
            )
        given = dict(zip(scales, cache[2:], strict=True))
        return context_parallel_page_attention(
            query, *cache[:2], table, jnp.asarray(prompt + 1), axis_name="pages", return_lse=True, **given
        )

    specs = (P(), P("pages"), P("pages"), P("pages"))
    out, lse = jax.jit(jax.shard_map(serve, mesh=mesh_of(), in_specs=specs, out_specs=P()))(query, pages, pages, scales)
    call = Call(lengths=tuple(int(n) + 1 for n in prompt))
    want = definition(
        np.asarray(query, np.float64), dense.astype(np.float64), -dense.astype(np.float64), call, None, None
    )
    np.testing.assert_allclose(out, want[0], atol=3e-2 if quantised else 3e-6)
    np.testing.assert_allclose(lse, want[1], atol=3e-2 if quantised else 3e-6)


def test_heads_may_be_split_over_another_axis():
    drawn = Drawn(Call(sinks=2, options={"sliding_window": 9}))
    mesh = jax.make_mesh((DEVICES, 2), ("pages", "heads"), axis_types=(AxisType.Auto,) * 2)

    def attend(query: Any, key: Any, value: Any, sinks: Any) -> Any:
        return context_parallel_page_attention(
            query, key, value, drawn.table, drawn.lengths,
            axis_name="pages", softmax_aux=sinks, sliding_window=9, return_lse=True,
        )  # fmt: skip

    rows, pages = P(None, "heads"), P("pages", None, "heads")
    run = jax.shard_map(attend, mesh=mesh, in_specs=(rows, pages, pages, P("heads")), out_specs=(rows, rows))
    check(jax.jit(run)(drawn.query, *drawn.pages, drawn.arrays["softmax_aux"]), drawn.want, "float32")


@pytest.mark.parametrize("name", ["decoding", "window", "short prefill"])
def test_a_device_goes_over_its_own_pages_alone(name: str, monkeypatch: pytest.MonkeyPatch):
    drawn, columns = Drawn(CALLS[name]), []

    def recorded(query: Any, key: Any, value: Any, table: Any, *args: Any, **kwargs: Any) -> Any:
        columns.append(table.shape[1])
        return page_attention(query, key, value, table, *args, **kwargs)

    monkeypatch.setattr(context_parallel, "page_attention", recorded)

    def attend(query: Any, key: Any, value: Any) -> Any:
        return context_parallel_page_attention(
            query, key, value, drawn.table, drawn.lengths, drawn.bounds, axis_name="pages", **CALLS[name].options
        )

    run = jax.shard_map(attend, mesh=mesh_of(), in_specs=(P(), P("pages"), P("pages")), out_specs=P())
    jax.eval_shape(run, drawn.query, *drawn.pages)
    assert columns == [-(-COLUMNS // DEVICES)]


WRONG = {
    "no axis": (
        lambda d: context_parallel_page_attention(d.query, *d.pages, d.table, d.lengths, axis_name="pages"),
        ValueError, r"context_parallel_page_attention: axis_name='pages' is no axis of a surrounding jax.shard_map",
    ),
    "no axis for latents": (
        lambda d: context_parallel_mla_decode(d.query, d.pages[0], d.table, d.lengths, axis_name="x"),
        ValueError, r"context_parallel_mla_decode: axis_name='x' is no axis",
    ),
    "no axis for writing": (
        lambda d: context_parallel_update_pages(*d.pages, None, None, d.table, d.lengths, axis_name="x"),
        ValueError, r"context_parallel_update_pages: axis_name='x' is no axis",
    ),
    "a table of other sequences": (
        lambda d: inside(d, table=d.table[:-1]), ValueError,
        r"context_parallel_page_attention: page_table must be .* with sequences=6",
    ),
    "lengths of other sequences": (
        lambda d: inside(d, lengths=d.lengths[:-1]), ValueError, r"kv_lengths must be \[sequences\] with sequences=6",
    ),
    "boundaries of other sequences": (
        lambda d: inside(d, cum_q_lens=jnp.arange(3)), ValueError, r"cum_q_lens must be .* with sequences=6",
    ),
    "sinks of other heads": (
        lambda d: inside(d, softmax_aux=jnp.ones(3)), ValueError, "softmax_aux must have the shape",
    ),
    "scales of other pages": (
        lambda d: inside(d, key_scale=jnp.ones((7, 1, 1))), ValueError, "key_scale must be a number or broadcastable",
    ),
    "a platform that cannot": (
        lambda d: inside(d, platform="cuda"), UnsupportedError, "no backend of page_attention",
    ),
}  # fmt: skip


def inside(drawn: Drawn, table: Any = None, lengths: Any = None, cum_q_lens: Any = None, **options: Any) -> Any:
    def attend(query: Any, key: Any, value: Any) -> Any:
        return context_parallel_page_attention(
            query, key, value, drawn.table if table is None else table, drawn.lengths if lengths is None else lengths,
            cum_q_lens, axis_name="pages", **options,
        )  # fmt: skip

    run = jax.shard_map(attend, mesh=mesh_of(), in_specs=(P(), P("pages"), P("pages")), out_specs=P())
    return run(drawn.query, *drawn.pages)


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str):
    call, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        call(Drawn(Call()))


def test_a_gradient_is_refused():
    drawn = Drawn(Call())

    def loss(query: Any) -> Any:
        drawn.query = query
        return inside(drawn).sum()

    with pytest.raises(TypeError, match="page_attention is for inference"):
        jax.grad(loss)(drawn.query)


def test_float64_keeps_its_precision():
    with jax.enable_x64(True):
        drawn = Drawn(Call(dtype="float64", sinks=1, options={"sliding_window": 9}))
        sinks = drawn.arrays["softmax_aux"].astype(jnp.float64)
        out, lse = inside(drawn, softmax_aux=sinks, sliding_window=9, return_lse=True)
        assert out.dtype == lse.dtype == jnp.float64
        np.testing.assert_allclose(out, drawn.want[0], atol=1e-7)
        np.testing.assert_allclose(lse, drawn.want[1], atol=1e-7)


def test_under_vmap_and_scan():
    """A scan over lengths, of a vmap over two queries: calls of the same cache."""
    drawn = Drawn(Call())
    lengths = jnp.stack([drawn.lengths, drawn.lengths - 2])

    def attend(queries: Any, key: Any, value: Any) -> Any:
        def step(carry: Any, lengths: Any) -> Any:
            one = lambda query: context_parallel_page_attention(
                query, key, value, drawn.table, lengths, axis_name="pages"
            )
            return carry, jax.vmap(one)(queries)

        return jax.lax.scan(step, 0, lengths)[1]

    run = jax.shard_map(attend, mesh=mesh_of(), in_specs=(P(), P("pages"), P("pages")), out_specs=P())
    got = jax.jit(run)(jnp.stack([drawn.query, -drawn.query]), *drawn.pages)
    np.testing.assert_allclose(got[0, 0], drawn.want[0], atol=3e-6)
    drawn.query, drawn.lengths = -drawn.query, lengths[1]
    np.testing.assert_allclose(got[1, 1], inside(drawn), atol=3e-6)
