"""Conformance of the backends of attention over a cache: cases, and calls that nobody should make."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.conformance import QUICK, ContainedConformance, Found, Poisoned
from tests.kernels.conformance import check as checked
from tests.kernels.flash_attention.conformance import pairwise
from tilewright.kernels import kernel
from tilewright.kernels.paged_attention.cases import ServingCase
from tilewright.kernels.paged_attention.inputs import PagedInputs
from tilewright.kernels.paged_attention.ops.decode_attention import DecodeCase
from tilewright.kernels.paged_attention.ops.mla_decode import MlaCase
from tilewright.kernels.paged_attention.ops.mla_ragged_page_attention import MlaRaggedPageCase
from tilewright.kernels.paged_attention.ops.ragged_decode_attention import RaggedDecodeCase
from tilewright.kernels.paged_attention.ops.ragged_page_attention import RaggedPageCase
from tilewright.kernels.paged_attention.reference import paged_reference
from tilewright.ops.utils.device import current_device

FACTORS: dict[str, Sequence[Any]] = {
    "layout": ["dense", "paged", "range", "packed", "packed and written", "latent"],
    "heads": [(4, 4), (4, 2), (6, 1)],
    "dims": [(16, 16), (24, 8), (5, 20)],
    "dtype": ["float32", "bfloat16", "float16"],
    "kv_dtype": [None, "int8", "float8_e4m3fn", "float8_e5m2"],
    "scale": ["tensor", "head", "page", "token"],
    "page_size": [1, 3, 16, 64, 256],
    "kv_length": [1, 7, 50, 300],
    "window": [None, 6, (3, None), (None, 2), (0, 40)],
    "causal": [True, False],
    "soft_cap": [None, 4.0],
    "sinks": [0, 1, 3],
    "alibi": [False, True],
    "q_lengths": [(1,), (1, 0, 5), (33, 2)],
    "softmax_scale": [None, 0.7],
}

PACKED_LATENTS: dict[str, Sequence[Any]] = FACTORS | {
    "layout": ["packed latents"], "heads": [(1, 1), (6, 1)], "scale": ["tensor", "page", "token"],
    "page_size": [1, 3, 64], "kv_length": [7, 50, 300], "window": [None, 6, (None, 2)],
}  # fmt: skip
"""A table of their own: a layout more in the one above would draw all of its rows anew."""


def as_case(index: int, row: Mapping[str, Any]) -> tuple[str, ServingCase]:
    """A row's op and case; what an op has no place for stays its default."""
    layout, (heads, kv_heads), (head_dim, value_dim) = row["layout"], row["heads"], row["dims"]
    fields: dict[str, Any] = {
        "name": f"pairwise_{index}", "sequences": 3, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim,
        "value_dim": value_dim, "dtype": row["dtype"], "kv_dtype": row["kv_dtype"],
        "scale": row["scale"] if row["kv_dtype"] else None, "page_size": row["page_size"],
        "kv_length": row["kv_length"], "sliding_window": row["window"], "logits_soft_cap": row["soft_cap"],
        "sinks": row["sinks"], "alibi": row["alibi"], "softmax_scale": row["softmax_scale"],
    }  # fmt: skip
    if layout in ("dense", "paged"):
        return "decode_attention", DecodeCase(paged=layout == "paged", **fields)
    if layout == "range":
        return "ragged_decode_attention", RaggedDecodeCase(**fields)
    if layout == "latent":
        latent = {"kv_heads": 1, "value_dim": min(head_dim, value_dim), "q_lengths": (max(row["q_lengths"]) % 30,)}
        return "mla_decode", MlaCase(**fields | latent, causal=row["causal"])
    packed = {"q_lengths": row["q_lengths"], "causal": row["causal"]}
    if layout == "packed latents":
        return "mla_ragged_page_attention", MlaRaggedPageCase(
            **fields | packed | {"kv_heads": 1, "value_dim": min(head_dim, value_dim)}
        )
    return "ragged_page_attention", RaggedPageCase(**fields, **packed, write=layout == "packed and written")


CASES = [as_case(index, row) for index, row in enumerate([*pairwise(FACTORS), *pairwise(PACKED_LATENTS)])]


def describe(op_and_case: tuple[str, ServingCase]) -> str:
    op, case = op_and_case
    changed = (f for f in dataclasses.fields(case) if f.name != "name" and getattr(case, f.name) != f.default)
    return "-".join([op, *(f"{f.name}={getattr(case, f.name)}".replace(" ", "") for f in changed)])


def inputs_of(op: str, case: ServingCase, seed: int = 0) -> PagedInputs:
    """What a backend gets of a case."""
    positional, keywords = case.arguments(seed)
    inputs: PagedInputs = kernel(op).prepare(*positional, **keywords)
    # Compiled as one: what is written costs dozens of small programs otherwise.
    return jax.jit(kernel(op).completed)(inputs) if inputs.writes else inputs


def structs_of(op: str, case: ServingCase) -> PagedInputs:
    """What selection sees of a case."""
    return jax.eval_shape(lambda: inputs_of(op, case))


PACKED_ON_HOPPER: dict[str, Any] = {
    "sequences": 3, "kv_length": 300, "heads": 32, "kv_heads": 8, "head_dim": 128, "page_size": 64, "dtype": "bfloat16",
    "q_lengths": (1, 40),
}  # fmt: skip
"""Sizes of packed queries that every kernel for them on Hopper takes."""


def packed_structs(**fields: Any) -> PagedInputs:
    """Of sizes that every kernel for packed queries on Hopper takes, but for the fields that are given."""
    return structs_of("ragged_page_attention", RaggedPageCase("", **PACKED_ON_HOPPER | fields))


@functools.partial(jax.jit, static_argnames="dtype", compiler_options=QUICK)
def _oracle(inputs: PagedInputs, dtype: Any) -> Any:
    with jax.default_matmul_precision("highest" if dtype is None else None):
        return paged_reference(inputs, dtype)


def check(got: Any, inputs: PagedInputs, factor: float = 2.0) -> None:
    """Compares ``(out, lse)`` with the oracle."""
    checked(dict(zip(("out", "lse"), got, strict=True)), *oracles(inputs), factor)


def oracles(inputs: PagedInputs) -> tuple[Found, Found | None]:
    """The oracle's results, exact and in the dtype of the query, if that is another one."""
    exact = dict(zip(("out", "lse"), _oracle(inputs, None), strict=True))
    narrow = inputs.query.dtype.name
    if narrow == "float32" and current_device().kind == "cpu":  # elsewhere its products are less than exact
        return exact, None
    return exact, dict(zip(("out", "lse"), _oracle(inputs, narrow), strict=True))


def hostile(inputs: PagedInputs, seed: int, lengths: list[int], own: int, first: int = 0) -> PagedInputs:
    """Any page numbers and lengths; what is in no page that a table names is NaN, and pages before ``first`` are."""
    draw = np.random.default_rng(seed)
    assert inputs.page_table is not None
    count, table = inputs.key.shape[0], np.maximum(np.asarray(inputs.page_table), first)
    wild = [-1, -(2**31), count, 2**31 - 1, own, own]
    table = np.where(draw.random(table.shape) < 0.4, draw.choice(wild, table.shape), table)
    unused = jnp.asarray(sorted(set(range(count)) - set(table.ravel().tolist())), jnp.int32)
    pages = {name: x.at[unused].set(jnp.nan) for name in ("key", "value") if (x := getattr(inputs, name)) is not None}
    drawn = draw.choice(lengths, len(table))
    return inputs.replace(page_table=jnp.asarray(table, jnp.int32), kv_lengths=jnp.asarray(drawn, jnp.int32), **pages)


def with_unseen_keys(inputs: PagedInputs, seen: int = 1 << 30) -> PagedInputs:
    """NaN in all keys and values beyond the lengths, and before so many that end there."""
    table = np.arange(len(inputs.kv_lengths))[:, None] if inputs.page_table is None else np.asarray(inputs.page_table)
    dirty, position = np.zeros(inputs.key.shape[:2], bool), np.arange(inputs.capacity).reshape(table.shape[1], -1)
    for row, length in enumerate(np.asarray(inputs.kv_lengths)):
        dirty[table[row]] = (position >= length) | (position < length - seen)
    arrays = {name: x for name in ("key", "value") if (x := getattr(inputs, name)) is not None}
    return inputs.replace(**{n: jnp.where(jnp.asarray(dirty)[..., None, None], jnp.nan, x) for n, x in arrays.items()})


def check_rows_without_keys(found: Found, lengths: Sequence[int], q_length: int = 1) -> None:
    """Results of sequences without keys are zeros, and their log-sum-exp is -inf."""
    for row, length in enumerate(lengths):
        if length <= 0:
            tokens = slice(row * q_length, (row + 1) * q_length)
            assert not np.any(np.asarray(found["out"][tokens]))
            assert np.all(np.isneginf(np.asarray(found["lse"][tokens])))


FAR_WINDOWS = [(2**31 - 1, 2**31 - 1), (None, 2**40)]
LENGTHS = [[0, 0, 0], [0, 72, 1], [72, 73, 1 << 30], [-5, 2**31 - 1, -(2**31)]]
TREES: dict[str, dict[str, Any]] = {
    "rows": {},
    "two words": {"q_lengths": (37, 0, 5)},
    "a key head": {"kv_heads": 1, "page_size": 3, "dtype": "bfloat16"},
    "window and sinks": {"sliding_window": 9, "sinks": 2},
    "cap and slopes": {"logits_soft_cap": 4.0, "alibi": True},
    "int8": {"dtype": "bfloat16", "kv_dtype": "int8", "scale": "token"},
    "written": {"write": True, "page_size": 16},
}
PAGED: dict[str, Any] = {
    "sequences": 3, "kv_length": 70, "heads": 4, "kv_heads": 2, "head_dim": 16, "page_size": 8
}  # fmt: skip


def causal_bits(q_lengths: Sequence[int], words: int) -> np.ndarray:
    """The words of a ``tree_mask`` in which every new token sees itself and those before it."""
    seen = np.concatenate([np.tri(count, 32 * words, dtype=bool) for count in q_lengths])
    return np.packbits(seen, axis=1, bitorder="little").view("<u4").astype(np.uint32)


def ragged(**fields: Any) -> PagedInputs:
    """Inputs of packed queries over small pages."""
    return inputs_of("ragged_page_attention", RaggedPageCase("", **PAGED | fields))


class CacheConformance(ContainedConformance[Any, PagedInputs]):
    """A backend of attention over a cache, which has no gradients."""

    def cotangents(self, inputs: PagedInputs) -> None:
        return None

    @staticmethod
    def named(results: Any, gradients: dict[str, Any]) -> Found:
        return dict(zip(("out", "lse"), results, strict=True))

    def dtypes(self, inputs: PagedInputs) -> dict[str, Any]:
        return {"out": inputs.query.dtype, "lse": jnp.promote_types(inputs.query.dtype, jnp.float32)}

    def oracle(self, inputs: PagedInputs, cotangents: Any) -> tuple[Found, Found | None]:
        return oracles(inputs)

    def run_on_hostile(self, inputs: PagedInputs) -> None:
        assert np.isfinite(np.asarray(self.run_and_check(inputs)["out"], np.float32)).all()


class PagedConformance(CacheConformance):
    """A backend of the ops over any cache; ``params`` should make several tiles of a few dozen keys."""

    cases = CASES
    repeated = ("ragged_page_attention", RaggedPageCase("", **PAGED, q_lengths=(1, 9, 2)))
    poisons = ("dense", "paged")

    @staticmethod
    def describe(case: Any) -> str:
        return describe(case)

    def inputs(self, case: tuple[str, ServingCase]) -> PagedInputs:
        return inputs_of(*case)

    def factor(self, case: tuple[str, ServingCase]) -> float:
        return case[1].tolerance_factor

    def params_of(self, inputs: PagedInputs) -> tuple[Any, Any]:
        return self.params(inputs), None

    def poisoned(self, poison: str) -> Poisoned:
        """What lies beyond the lengths is not looked at."""
        inputs = inputs_of("decode_attention", DecodeCase("", **PAGED | {"kv_length": 72}, paged=poison == "paged"))
        return Poisoned((inputs, None), (with_unseen_keys(inputs), None))

    @pytest.mark.parametrize("page_size", [2, 8, 32, 128])
    def test_page_sizes(self, page_size: int):
        self.run_and_check(ragged(page_size=page_size, kv_length=130, q_lengths=(1, 20, 0)))

    @pytest.mark.parametrize("lengths", LENGTHS)
    def test_lengths_of_zero_and_beyond_the_table(self, lengths: list[int]):
        inputs = inputs_of("decode_attention", DecodeCase("", **PAGED, paged=True))
        found = self.run_and_check(inputs.replace(kv_lengths=jnp.asarray(lengths, jnp.int32)))
        check_rows_without_keys(found, lengths)

    def test_starts_with_a_page_table(self):
        """What lies before a start is not looked at; a start below 0 is 0, one beyond the length leaves no key."""
        positional, given = DecodeCase("", **PAGED, paged=True, sinks=1).arguments()
        query, key, value, _ = positional
        table, lengths, starts = given["page_table"], jnp.asarray([60, 33, 9]), jnp.asarray([37, -5, 11])
        before = np.arange(key.shape[1]) < 37 - np.arange(table.shape[1])[:, None] * key.shape[1]
        at = np.asarray(table[0])
        key, value = (
            array.at[at].set(jnp.where(before[..., None, None], jnp.nan, array[at])) for array in (key, value)
        )
        inputs = kernel("page_attention").prepare(
            query, key, value, table, lengths, starts, softmax_aux=given["softmax_aux"]
        )
        out = self.run_and_check(inputs)["out"]
        assert np.isfinite(np.asarray(out)).all()
        assert not np.any(np.asarray(out[2]))

    @pytest.mark.parametrize("seed", range(6))
    def test_hostile_tables(self, seed: int):
        """Any page numbers, lengths and boundaries."""
        inputs = ragged(q_lengths=(3, 1, 14), sliding_window=(None, 30)[seed % 2])
        cum = [[2, 1, 40, 9], [0, 3, 3, 17], [-7, 2**31 - 1, -(2**31), 5]][seed % 3]
        inputs = hostile(inputs, seed, [0, 5, 71, 1000, -3, 2**31 - 1], own=7)
        self.run_on_hostile(inputs.replace(cum_q_lens=jnp.asarray(cum, jnp.int32)))

    @pytest.mark.parametrize("name", TREES)
    def test_trees_of_new_tokens(self, name: str):
        case = RaggedPageCase("", **PAGED | {"q_lengths": (5, 12, 1), "tree": True} | TREES[name])
        self.run_and_check(inputs_of("ragged_page_attention", case), case.tolerance_factor)

    @pytest.mark.parametrize("seed", range(3))
    def test_hostile_trees(self, seed: int):
        """Any bits, tables, lengths and boundaries; fewer bits than new tokens."""
        inputs = ragged(q_lengths=(40, 1, 14), tree=True)
        bits = np.random.default_rng(seed).integers(0, 1 << 32, (55, 1), np.uint32)
        inputs = hostile(inputs, seed, [0, 5, 71, 1000, -3, 2**31 - 1], own=7)
        cum = [[0, 40, 41, 55], [2, 1, 50, 9], [-7, 2**31 - 1, -(2**31), 5]][seed]
        self.run_on_hostile(inputs.replace(cum_q_lens=jnp.asarray(cum, jnp.int32), tree_mask=jnp.asarray(bits)))

    def test_causal_bits_are_causality(self):
        inputs = ragged(q_lengths=(5, 40, 1), sliding_window=30)
        assert (inputs.left, inputs.right) == (30, 0)
        bits = jnp.asarray(causal_bits((5, 40, 1), 2))
        want = self.compiled(inputs)(inputs, None)
        inputs = inputs.replace(tree_mask=bits, right=None)
        got = self.compiled(inputs)(inputs, None)
        for name in ("out", "lse"):
            np.testing.assert_array_equal(got[name], want[name])

    @pytest.mark.parametrize("scale", [10.0, -10.0])
    def test_large_logits(self, scale: float):
        self.run_and_check(ragged(q_lengths=(1, 9, 2), softmax_scale=scale, sinks=1), 3.0)

    def test_values_whose_sum_float16_cannot_hold(self):
        """Sums of values have a wider dtype than these, until they are divided by the sum of weights."""
        sizes = PAGED | {"kv_length": 64}
        inputs = inputs_of("decode_attention", DecodeCase("", **sizes, dtype="float16", ragged=False, paged=True))
        inputs = inputs.replace(query=jnp.zeros_like(inputs.query), value=jnp.full_like(inputs.value, 3e4))
        np.testing.assert_array_equal(self.compiled(inputs)(inputs, None)["out"], np.float16(3e4))

    def test_biases_of_far_keys(self):
        """Distances that a narrow dtype rounds, with slopes that leave these keys their weights."""
        sizes = PAGED | {"sequences": 1, "kv_length": 600}
        inputs = inputs_of("decode_attention", DecodeCase("", **sizes, ragged=False, paged=False, alibi=True))
        self.run_and_check(inputs.replace(alibi_slopes=inputs.alibi_slopes / 64))

    def test_more_heads_of_a_key_head_than_a_tile_has_rows(self):
        """Also values of no power of two, behind which another row begins, in two parts of keys."""
        sizes = PAGED | {"sequences": 1, "kv_length": 30, "heads": 72, "kv_heads": 1}
        self.run_and_check(inputs_of("decode_attention", DecodeCase("", **sizes, value_dim=20, paged=False)))

    @pytest.mark.parametrize("window", FAR_WINDOWS)
    def test_windows_beyond_every_length(self, window: Any):
        inputs = ragged(q_lengths=(1, 9, 2), causal=False, sliding_window=window)
        self.run_and_check(inputs.replace(kv_lengths=jnp.asarray([2**31 - 1, 60, 2**30], jnp.int32)))

    @pytest.mark.parametrize("shape", [(0, 40), (3, 0)])
    def test_nothing_at_all(self, shape: tuple[int, int]):
        sequences, kv_length = shape
        case = DecodeCase("", **PAGED | {"sequences": sequences, "kv_length": kv_length}, sinks=2, paged=False)
        found = self.run_and_check(inputs_of("decode_attention", case))
        assert found["out"].shape == (sequences, 4, 16)
        assert found["lse"].shape == (sequences, 4)

    @pytest.mark.parametrize(("q_lengths", "window"), list(itertools.product([(1,), (5, 12, 1)], [None, (9, 0)])))
    def test_against_jax_on_dense_caches(self, q_lengths: tuple[int, ...], window: Any):
        """Each sequence by ``jax.nn.dot_product_attention``, on a dense copy of its pages."""
        case = RaggedPageCase("", **PAGED, q_lengths=q_lengths, sliding_window=window)
        inputs = inputs_of("ragged_page_attention", case, seed=3)
        out = self.compiled(inputs)(inputs, None)["out"]
        peer = jax.jit(lambda *x: jax.nn.dot_product_attention(*x, is_causal=True, local_window_size=window))
        cum = np.asarray(inputs.cum_q_lens)
        for row, length in enumerate(np.asarray(inputs.kv_lengths)):
            new = slice(cum[row], cum[row + 1])
            table = np.asarray(inputs.page_table)[row]
            key, value = (np.concatenate(np.asarray(pages)[table]) for pages in (inputs.key, inputs.value))
            # Queries for all positions: JAX counts from the first, and none sees those after it.
            query = np.zeros((inputs.capacity, *inputs.query.shape[1:]), np.float32)
            first = length - (new.stop - new.start)
            query[first:length] = np.asarray(inputs.query)[new]
            with jax.default_matmul_precision("highest"):  # a GPU's default for float32 is TF32
                want = peer(*(jnp.asarray(x)[None] for x in (query, key, value)))
            np.testing.assert_allclose(out[new], want[0, first:length], atol=2e-6, rtol=1e-5)
