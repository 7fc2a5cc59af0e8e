"""What every backend of attention over a cache must pass: a test file subclasses ``PagedConformance``."""

import abc
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.flash_attention.conformance import judge, pairwise
from tilewright.kernels import kernel
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.paged_attention.cases import ServingCase
from tilewright.kernels.paged_attention.inputs import PagedInputs
from tilewright.kernels.paged_attention.ops.decode_attention import DecodeCase
from tilewright.kernels.paged_attention.ops.mla_decode import MlaCase
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
    return "ragged_page_attention", RaggedPageCase(**fields, **packed, write=layout == "packed and written")


CASES = [as_case(index, row) for index, row in enumerate(pairwise(FACTORS))]


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


QUICK: dict[str, bool | int | str] = {"xla_backend_optimization_level": 0}
"""Of programs that run once: most of their time is compilation, which optimising would lengthen."""


@functools.partial(jax.jit, static_argnames="dtype", compiler_options=QUICK)
def _oracle(inputs: PagedInputs, dtype: Any) -> Any:
    with jax.default_matmul_precision("highest" if dtype is None else None):
        return paged_reference(inputs, dtype)


def check(got: Any, inputs: PagedInputs, factor: float = 2.0) -> None:
    """Compares ``(out, lse)`` with the oracle."""
    out, lse = got
    assert (out.dtype, lse.dtype) == (inputs.query.dtype, jnp.promote_types(inputs.query.dtype, jnp.float32))
    exact = dict(zip(("out", "lse"), _oracle(inputs, None), strict=True))
    narrow = inputs.query.dtype.name
    same = narrow == "float32" and current_device().kind == "cpu"  # elsewhere its products are less than exact
    low = exact if same else dict(zip(("out", "lse"), _oracle(inputs, narrow), strict=True))
    judge({"out": out, "lse": lse}, exact, low, factor)


FAR_WINDOWS = [((2**31 - 1, 2**31 - 1),), ((None, 2**40),)]
LENGTHS = [[0, 0, 0], [0, 72, 1], [72, 73, 1 << 30], [-5, 2**31 - 1, -(2**31)]]
PAGED = {"sequences": 3, "kv_length": 70, "heads": 4, "kv_heads": 2, "head_dim": 16, "page_size": 8}


class PagedConformance(abc.ABC):
    """Set ``backend``, and ``machine`` to what it runs in.

    ``params`` should make several tiles of a few dozen keys.
    """

    backend: ClassVar[Backend]
    machine: ClassVar[Callable[[], AbstractContextManager[Any]]] = contextlib.nullcontext

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "op_and_case" in metafunc.fixturenames:
            metafunc.parametrize("op_and_case", CASES, ids=describe)

    @abc.abstractmethod
    def params(self, inputs: PagedInputs) -> Any:
        """What to run with."""

    def run(self, inputs: PagedInputs) -> Any:
        with type(self).machine():
            reasons = self.backend.not_supported_reasons(inputs, current_device(), "forward")
            if reasons:
                pytest.skip("; ".join(reasons))
            params = self.params(inputs)
            quick = QUICK if current_device().kind == "cpu" else None
            run = jax.jit(lambda inputs: self.backend.forward(inputs, params), compiler_options=quick)
            return jax.block_until_ready(run(inputs))

    def run_and_check(self, inputs: PagedInputs, factor: float = 2.0) -> Any:
        got = self.run(inputs)
        check(got, inputs, factor)
        return got

    def test_pairwise(self, op_and_case: tuple[str, ServingCase]):
        op, case = op_and_case
        self.run_and_check(inputs_of(op, case), case.tolerance_factor)

    @pytest.mark.parametrize("page_size", [2, 8, 32, 128])
    def test_page_sizes(self, page_size: int):
        case = RaggedPageCase("", **PAGED | {"page_size": page_size, "kv_length": 130}, q_lengths=(1, 20, 0))
        self.run_and_check(inputs_of("ragged_page_attention", case))

    @pytest.mark.parametrize("lengths", LENGTHS)
    def test_lengths_of_zero_and_beyond_the_table(self, lengths: list[int]):
        positional, _ = DecodeCase("", **PAGED, paged=True).arguments()
        *cache, _ = positional
        inputs = kernel("decode_attention").prepare(
            *cache, jnp.asarray(lengths), DecodeCase("", **PAGED, paged=True).arguments()[1]["page_table"]
        )
        out, lse = self.run_and_check(inputs)
        for row, length in enumerate(lengths):
            if length <= 0:
                assert not np.any(np.asarray(out[row]))
                assert np.all(np.isneginf(np.asarray(lse[row])))

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
        out, _ = self.run_and_check(inputs)
        assert np.isfinite(np.asarray(out)).all()
        assert not np.any(np.asarray(out[2]))

    @pytest.mark.parametrize("seed", range(6))
    def test_hostile_tables(self, seed: int):
        """Any page numbers, lengths and boundaries; what is in no page that a query sees is NaN."""
        draw = np.random.default_rng(seed)
        case = RaggedPageCase("", **PAGED, q_lengths=(3, 1, 14), sliding_window=(None, 30)[seed % 2])
        query, key, value, table, lengths, cum = case.arguments(seed)[0]
        wild = [-1, -(2**31), key.shape[0], 2**31 - 1, 7, 7]
        table = np.where(draw.random(table.shape) < 0.4, draw.choice(wild, table.shape), np.asarray(table))
        lengths = draw.choice([0, 5, 71, 1000, -3, 2**31 - 1], 3)
        cum = np.array([[2, 1, 40, 9], [0, 3, 3, 17], [-7, 2**31 - 1, -(2**31), 5]][seed % 3])
        named = set(table[(table >= 0) & (table < key.shape[0])].tolist())
        unused = [page for page in range(key.shape[0]) if page not in named]
        key, value = (array.at[jnp.asarray(unused, jnp.int32)].set(jnp.nan) for array in (key, value))
        inputs = kernel("ragged_page_attention").prepare(query, key, value, table, lengths, cum)
        out, _ = self.run_and_check(inputs)
        assert np.isfinite(np.asarray(out)).all()

    @pytest.mark.parametrize("paged", [False, True])
    def test_what_lies_beyond_the_lengths_is_not_looked_at(self, paged: bool):
        case = DecodeCase("", **PAGED | {"kv_length": 72}, paged=paged)
        inputs = inputs_of("decode_attention", case)
        table = np.arange(3)[:, None] if inputs.page_table is None else np.asarray(inputs.page_table)
        dirty = np.zeros(inputs.key.shape[:2], bool)
        position = np.arange(inputs.capacity).reshape(table.shape[1], -1)
        for row, length in enumerate(np.asarray(inputs.kv_lengths)):
            dirty[table[row]] = position >= length
        key, value = (
            jnp.where(jnp.asarray(dirty)[..., None, None], jnp.nan, array) for array in (inputs.key, inputs.value)
        )
        clean = self.run(inputs)
        for got, want in zip(self.run(dataclasses.replace(inputs, key=key, value=value)), clean, strict=True):
            np.testing.assert_array_equal(got, want)

    @pytest.mark.parametrize("scale", [10.0, -10.0])
    def test_large_logits(self, scale: float):
        case = RaggedPageCase("", **PAGED, q_lengths=(1, 9, 2), softmax_scale=scale, sinks=1)
        self.run_and_check(inputs_of("ragged_page_attention", case), 3.0)

    @pytest.mark.parametrize("window", FAR_WINDOWS)
    def test_windows_beyond_every_length(self, window: Any):
        case = RaggedPageCase("", **PAGED, q_lengths=(1, 9, 2), causal=False, sliding_window=window)
        inputs = inputs_of("ragged_page_attention", case)
        inputs = dataclasses.replace(inputs, kv_lengths=jnp.asarray([2**31 - 1, 60, 2**30], jnp.int32))
        self.run_and_check(inputs)

    @pytest.mark.parametrize("shape", [(0, 40), (3, 0)])
    def test_nothing_at_all(self, shape: tuple[int, int]):
        sequences, kv_length = shape
        case = DecodeCase("", **PAGED | {"sequences": sequences, "kv_length": kv_length}, sinks=2, paged=False)
        out, lse = self.run(inputs_of("decode_attention", case))
        assert out.shape == (sequences, 4, 16)
        assert lse.shape == (sequences, 4)
        check((out, lse), inputs_of("decode_attention", case))

    def test_a_run_repeats_bit_for_bit(self):
        inputs = inputs_of("ragged_page_attention", RaggedPageCase("", **PAGED, q_lengths=(1, 9, 2)))
        for first, second in zip(self.run(inputs), self.run(inputs), strict=True):
            np.testing.assert_array_equal(first, second)

    @pytest.mark.parametrize(("q_lengths", "window"), list(itertools.product([(1,), (5, 12, 1)], [None, (9, 0)])))
    def test_against_jax_on_dense_caches(self, q_lengths: tuple[int, ...], window: Any):
        """Each sequence by ``jax.nn.dot_product_attention``, on a dense copy of its pages."""
        case = RaggedPageCase("", **PAGED, q_lengths=q_lengths, sliding_window=window)
        inputs = inputs_of("ragged_page_attention", case, seed=3)
        out, _ = self.run(inputs)
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
