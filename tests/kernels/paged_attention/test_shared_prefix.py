"""Attention over a prefix that sequences share: against the definition in float64, and against one call over all."""

import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tilewright
from tests.kernels.paged_attention.conformance import causal_bits
from tilewright.errors import UnsupportedError
from tilewright.kernels import kernel
from tilewright.kernels.paged_attention import shared_prefix
from tilewright.modules import page_attention, ragged_page_attention, shared_prefix_page_attention
from tilewright.ops.kernel.prepared import prepared

PAGES, SIZE, HEADS, KV_HEADS, DIM, VALUE_DIM = 40, 4, 6, 2, 16, 8


@dataclasses.dataclass(frozen=True)
class Call:
    """A call.

    Attributes:
      groups: the prefix of each sequence; ``None`` for one that all have.
      counts: new tokens of each sequence; ``None`` for one of each, without boundaries.
    """

    prefixes: tuple[int, ...] = (13,)
    groups: tuple[int, ...] | None = None
    lengths: tuple[int, ...] = (5, 1, 16, 9, 7)
    counts: tuple[int, ...] | None = None
    sinks: int = 0
    dtype: str = "float32"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


PACKED = (3, 1, 9, 0, 7)
CALLS = {
    "one prefix": Call(),
    "of whole pages": Call(prefixes=(16,)),
    "of a token": Call(prefixes=(1,), sinks=1),
    "empty prefix": Call(prefixes=(0,)),
    "no new tokens in the cache": Call(lengths=(0, 1, 0, 9, 7)),
    "nothing at all": Call(prefixes=(0,), lengths=(0, 1, 0, 9, 7)),
    "nothing but sinks": Call(prefixes=(0,), lengths=(0, 1, 0, 9, 7), sinks=2),
    "groups in any order": Call(prefixes=(13, 4, 20), groups=(2, 0, 2, 1, 0), sinks=1),
    "groups without sequences, and sequences without one": Call(prefixes=(13, 4, 20, 0), groups=(3, -1, 2, 7, 2)),
    "no prefix of any": Call(prefixes=(13,), groups=(-1,) * 5, lengths=(0, 1, 0, 9, 7)),
    "a cap": Call(prefixes=(13, 4), groups=(1, 0, 1, 0, 0), options={"logits_soft_cap": 1.5, "softmax_scale": 0.7}),
    "packed": Call(counts=PACKED),
    "packed, in groups": Call(prefixes=(13, 4, 20), groups=(2, -1, 0, 1, 2), counts=PACKED, sinks=1),
    "packed, not causal": Call(counts=PACKED, options={"causal": False}),
    "more new tokens than cached": Call(lengths=(2, 0, 4, 1, 7), counts=PACKED),
    "lengths beyond the tables": Call(prefixes=(100,), lengths=(5, -3, 70, 9, 2**31 - 1)),
    "bfloat16": Call(prefixes=(13, 4), groups=(1, 0, 1, 0, 0), dtype="bfloat16", sinks=1),
}
PREFIX_COLUMNS, COLUMNS = 6, 5


class Drawn:
    """Arrays of a call; what is in no table, or is no token, is NaN."""

    def __init__(self, call: Call) -> None:
        self.call = call
        random = np.random.default_rng(7)
        sequences, groups = len(call.lengths), len(call.prefixes)
        order = random.permutation(PAGES)
        order = np.concatenate([order] * 3)
        self.prefix_table = order[: groups * PREFIX_COLUMNS].reshape(groups, -1)
        self.table = order[groups * PREFIX_COLUMNS :][: sequences * COLUMNS].reshape(sequences, -1)
        if groups * PREFIX_COLUMNS + sequences * COLUMNS > PAGES:
            # Pages of several sequences may be the same: what they hold is anything.
            self.table[:] = self.table % PAGES
        self.pages = [
            np.array(jnp.asarray(random.standard_normal((PAGES, SIZE, KV_HEADS, dim)), call.dtype), np.float64)
            for dim in (DIM, VALUE_DIM)
        ]
        used = np.zeros((PAGES, SIZE), bool)
        for table, lengths in ((self.prefix_table, call.prefixes), (self.table, call.lengths)):
            for row, length in zip(table, lengths, strict=True):
                at = np.arange(min(max(length, 0), table.shape[1] * SIZE))
                used[row[at // SIZE], at % SIZE] = True
        for pages in self.pages:
            pages[~used] = np.nan
        self.counts = call.counts or (1,) * sequences
        self.query = np.asarray(
            jnp.asarray(random.standard_normal((sum(self.counts), HEADS, DIM)), call.dtype), np.float64
        )
        self.sinks = random.standard_normal((HEADS, call.sinks)) if call.sinks else None

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        call = self.call
        arrays = [jnp.asarray(x, call.dtype) for x in (self.query, *self.pages)]
        numbers = [jnp.asarray(x) for x in (self.prefix_table, call.prefixes, self.table, call.lengths)]
        options: dict[str, Any] = {"return_lse": True, **call.options}
        if call.counts is not None:
            options["cum_q_lens"] = jnp.asarray(np.append(0, np.cumsum(call.counts)))
        if call.groups is not None:
            options["prefix_group"] = jnp.asarray(call.groups)
        if self.sinks is not None:
            options["softmax_aux"] = jnp.asarray(self.sinks, jnp.float32)
        return (*arrays, *numbers), options

    def tokens(self, table: np.ndarray, length: int) -> list[np.ndarray]:
        at = np.arange(min(max(length, 0), len(table) * SIZE))
        return [pages[table[at // SIZE], at % SIZE] for pages in self.pages]

    def definition(self) -> tuple[np.ndarray, np.ndarray]:
        """Each sequence with all of its tokens, in float64."""
        call = self.call
        causal = call.options.get("causal", True)
        scale, cap = call.options.get("softmax_scale", DIM**-0.5), call.options.get("logits_soft_cap")
        outs, lses = [], []
        token = 0
        for row, count in enumerate(self.counts):
            group = 0 if call.groups is None else call.groups[row]
            has_prefix = 0 <= group < len(call.prefixes)
            shared = self.tokens(self.prefix_table[group], call.prefixes[group]) if has_prefix else None
            own = self.tokens(self.table[row], call.lengths[row])
            for index in range(count):
                end = max(call.lengths[row], 0) - count + index + 1 if causal else len(own[0])
                keys, values = (x[: max(end, 0)] for x in own)
                if shared is not None:
                    keys, values = np.concatenate([shared[0], keys]), np.concatenate([shared[1], values])
                for head in range(HEADS):
                    logits = scale * keys[:, head // (HEADS // KV_HEADS)] @ self.query[token, head]
                    logits = logits if cap is None else cap * np.tanh(logits / cap)
                    everything = np.append(logits, [] if self.sinks is None else self.sinks[head])
                    lse = np.logaddexp.reduce(everything) if everything.size else -np.inf
                    lses.append(lse)
                    weights = np.exp(logits - lse) if logits.size else logits
                    outs.append(weights @ values[:, head // (HEADS // KV_HEADS)])
                token += 1
        return np.reshape(outs, (token, HEADS, VALUE_DIM)), np.reshape(lses, (token, HEADS))


@pytest.mark.parametrize("name", CALLS)
def test_against_the_definition(name: str):
    drawn = Drawn(CALLS[name])
    args, options = drawn.arguments()
    out, lse = shared_prefix_page_attention(*args, **options)
    want = drawn.definition()
    narrow = CALLS[name].dtype == "bfloat16"
    assert (out.dtype, lse.dtype) == (CALLS[name].dtype, np.float32)
    np.testing.assert_allclose(np.asarray(out, np.float64), want[0], atol=0.02 if narrow else 3e-6, rtol=1e-5)
    np.testing.assert_allclose(lse, want[1], atol=0.01 if narrow else 3e-6, rtol=1e-5)
    if name == "one prefix":
        alone = shared_prefix_page_attention(*args, **options | {"return_lse": False})
        np.testing.assert_array_equal(alone, out)


def joined(args: tuple[Any, ...], pages: int) -> tuple[Any, ...]:
    """The arguments of `page_attention`, over tables that begin with the pages of the prefix."""
    query, key, value, prefix_table, _, table, lengths = args
    whole = jnp.concatenate([jnp.broadcast_to(prefix_table[:1, :pages], (len(table), pages)), table], axis=1)
    return query, key, value, whole, lengths + pages * SIZE


@pytest.mark.parametrize(
    ("kv_dtype", "scale"), [("int8", (PAGES, SIZE, KV_HEADS)), ("float8_e4m3fn", (1, 1, KV_HEADS)), ("int8", ())]
)
def test_one_call_over_all_pages(kv_dtype: str, scale: tuple[int, ...]):
    """Stored in fewer bits, with an offset of pages."""
    args, _ = Drawn(Call(prefixes=(16,))).arguments()
    query, *pages = args[:3]
    pages = [jnp.nan_to_num(8 * x).astype(kv_dtype) for x in pages]
    random = np.random.default_rng(3)
    scales = {name: jnp.asarray(random.uniform(0.1, 0.5, scale), jnp.float32) for name in ("key_scale", "value_scale")}
    options = {**scales, "return_lse": True, "page_offset": 2}
    prefix_table, prefixes, table, lengths = args[3:]
    moved = (query, *pages, prefix_table - 2, prefixes, table - 2, lengths)
    got = shared_prefix_page_attention(*moved, **options)
    for ours, theirs in zip(got, page_attention(*joined(moved, 4), **options), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-5)


def test_trees_of_drafts_behind_a_prefix():
    counts, lengths = (3, 5, 0, 4, 2), (5, 5, 16, 9, 7)
    args, options = Drawn(Call(prefixes=(16,), counts=counts, lengths=lengths)).arguments()
    causal = shared_prefix_page_attention(*args, **options)
    same = shared_prefix_page_attention(*args, **options, tree_mask=jnp.asarray(causal_bits(counts, 1)))
    bits = jnp.asarray(np.random.default_rng(0).integers(0, 1 << 32, (14, 1), np.uint32))
    got = shared_prefix_page_attention(*args, **options, tree_mask=bits)
    whole = ragged_page_attention(*joined(args, 4), **options, tree_mask=bits)
    for index in range(2):
        np.testing.assert_array_equal(causal[index], same[index])
        np.testing.assert_allclose(got[index], whole[index], atol=3e-6, rtol=1e-5)
    assert not np.allclose(got[0], causal[0], atol=1e-3)


def test_tokens_of_no_sequence():
    """Before the first and after the last boundary, with groups and without."""
    args, options = Drawn(Call(prefixes=(13,), counts=(3, 1, 9, 0, 7))).arguments()
    cum = jnp.asarray([2, 3, 3, 12, 12, 17])
    for more in ({}, {"prefix_group": jnp.zeros(5, int)}):
        out, lse = shared_prefix_page_attention(*args, **options | {"cum_q_lens": cum} | more)
        outside = np.r_[0:2, 17:20]
        assert not np.any(np.asarray(out)[outside])
        assert np.isneginf(np.asarray(lse)[outside]).all()
        assert np.isfinite(np.asarray(lse)[2:17]).all()


def test_bytes_of_the_prefix_are_those_of_one_sequence(monkeypatch: pytest.MonkeyPatch):
    """By design: one call has all queries and the prefix once, the other has no column for the prefix."""
    sequences, prefix_columns, columns = 64, 512, 8
    struct = jax.ShapeDtypeStruct
    pages = struct((8192, 16, 8, 128), jnp.bfloat16)
    args = (
        struct((sequences, 32, 128), jnp.bfloat16), pages, pages, struct((1, prefix_columns), jnp.int32),
        struct((1,), jnp.int32), struct((sequences, columns), jnp.int32), struct((sequences,), jnp.int32),
    )  # fmt: skip
    costs = {}

    def bytes_of(op: str, *args: Any, **options: Any) -> float:
        return kernel(op).cost(prepared(kernel(op), args, options, concrete=False)[0]).bytes

    for name in ("ragged_page_attention", "page_attention"):
        function = getattr(shared_prefix, name)

        def recorded(*args: Any, name: str = name, function: Any = function, **options: Any) -> Any:
            costs[name] = bytes_of(name, *args, **options)
            return function(*args, **options)

        monkeypatch.setattr(shared_prefix, name, recorded)
    jax.eval_shape(shared_prefix_page_attention, *args)
    whole = struct((sequences, prefix_columns + columns), jnp.int32)
    token, rows = 2 * 8 * 128 * 2, sequences * 32 * 256 * 2
    assert costs == {
        "ragged_page_attention": prefix_columns * 16 * token + rows,
        "page_attention": sequences * columns * 16 * token + rows,
    }
    one_call = bytes_of("page_attention", *args[:3], whole, args[6])
    assert one_call == sequences * (prefix_columns + columns) * 16 * token + rows
    with tilewright.target_device("NVIDIA H100 80GB HBM3"):
        calls = tilewright.explain(shared_prefix_page_attention, *args)
    assert [call.op for call in calls] == list(costs)


def test_groups_change_without_a_new_program():
    call = CALLS["groups in any order"]
    step = jax.jit(shared_prefix_page_attention, static_argnames="return_lse")
    for groups in ((2, 0, 2, 1, 0), (0, 0, 0, 0, 0), (-1, 2, 1, 5, 0)):
        drawn = Drawn(dataclasses.replace(call, groups=groups))
        args, options = drawn.arguments()
        np.testing.assert_allclose(step(*args, **options)[0], drawn.definition()[0], atol=3e-6, rtol=1e-5)
    assert step._cache_size() == 1


def test_maps():
    drawn = Drawn(CALLS["groups in any order"])
    args, options = drawn.arguments()
    queries = jnp.stack([args[0], 2 * args[0]])
    mapped = jax.vmap(lambda query: shared_prefix_page_attention(query, *args[1:], **options)[0])(queries)
    single = shared_prefix_page_attention(queries[1], *args[1:], **options)[0]
    np.testing.assert_allclose(mapped[1], single, atol=1e-6)


@pytest.mark.parametrize("name", ["one prefix", "groups in any order", "packed, in groups"])
def test_split_by_heads(name: str):
    args, options = Drawn(CALLS[name]).arguments()
    want = shared_prefix_page_attention(*args, **options)
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        put = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, P(*axes)))
        pages = (None, None, "heads")
        split = [put(args[0], None, "heads"), put(args[1], *pages), put(args[2], *pages), *map(put, args[3:])]
        given = {n: put(x) if isinstance(x, jax.Array) else x for n, x in options.items()}
        if "softmax_aux" in given:
            given["softmax_aux"] = put(options["softmax_aux"], "heads")
        got = jax.jit(lambda *x: shared_prefix_page_attention(*x, **given))(*split)
        assert jax.typeof(got[0]).sharding.spec[1] == "heads"
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6, rtol=1e-5)


def test_a_short_prefix_is_no_mistake(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """Of fewer tokens than there are queries, which without a mask have no place."""
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    args, options = Drawn(Call(prefixes=(1,))).arguments()
    with caplog.at_level(logging.ERROR, "tilewright.serving"):
        jax.block_until_ready(shared_prefix_page_attention(*args, **options))
        jax.effects_barrier()
    assert not caplog.records


ARGS, OPTIONS = Drawn(CALLS["groups in any order"]).arguments()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"prefix_group": None}, ValueError, "which of several prefixes.*groups=3"),
        ({"prefix_group": jnp.zeros(4, int)}, ValueError, r"prefix_group must be \[sequences\]"),
        ({"prefix_group": jnp.zeros(5)}, TypeError, "prefix_group must hold integers"),
        ({3: ARGS[3][:2]}, ValueError, r"prefix_table must be \[groups"),
        ({4: ARGS[4][:, None]}, ValueError, "prefix_lengths must be"),
        ({5: ARGS[5][:4]}, ValueError, "page_table must be"),
        ({6: ARGS[6][:4]}, ValueError, "kv_lengths must be"),
        ({0: ARGS[0][..., :8]}, ValueError, "same head dim"),
        ({"tree_mask": jnp.zeros((5, 1), jnp.uint32)}, ValueError, "which cum_q_lens must tell"),
        ({"softmax_aux": jnp.zeros(5)}, ValueError, "softmax_aux"),
        ({"sliding_window": 4}, TypeError, "sliding_window"),
        ({"platform": "cuda"}, UnsupportedError, "shared_prefix_page_attention|no backend"),
    ],
)
def test_wrong_arguments(changes: dict[Any, Any], error: type[Exception], message: str):
    call, options = list(ARGS), dict(OPTIONS)
    for where, what in changes.items():
        if isinstance(where, int):
            call[where] = what
        else:
            options[where] = what
    with pytest.raises(error, match=message):
        shared_prefix_page_attention(*call, **options)


def test_the_order_of_groups():
    """Tokens of a group stay in their order, and the bounds say where each group's are."""
    found = shared_prefix._group_order(jnp.asarray([2, 0, 2, 9, 0]), jnp.asarray([1, 3, 4, 4, 6, 8]), 9, 3)
    np.testing.assert_array_equal(found.bounds, [0, 3, 3, 5])
    np.testing.assert_array_equal(found.order, [3, 6, 7, 1, 2, 0, 4, 5, 8])
