"""JAX's serving functions by our kernels, beside JAX's own kernels (interpreted) and JAX's own references."""

import dataclasses
import inspect
import logging
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention as jax_paged_attention
from jax.experimental.pallas.ops.tpu.paged_attention import quantization_utils
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as jax_kernel
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support.jax_ragged import interpret_ragged_kernel
from tilewright.errors import UnsupportedError
from tilewright.integrations import jax_serving
from tilewright.integrations.jax_serving import paged_attention, ragged_paged_attention
from tilewright.kernels.paged_attention.triton.backend import TritonPagedAttention
from tilewright.kernels.triton.interpreter import interpret_triton
from tilewright.modules import ragged_page_attention
from tilewright.ops.utils.datacarrier import FwdParams

STEP = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-20}
"""The rounding error of a dtype, relative to one; for float32 also that of sums."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch: the new tokens and all tokens of each sequence, and what the cache is like.

    Attributes:
      absent: sequences beyond ``num_seqs``, whose lengths, pages and boundaries are nonsense.
    """

    name: str
    new: tuple[int, ...] = (1, 5, 3, 1)
    total: tuple[int, ...] = (14, 5, 11, 1)
    absent: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 4
    dtype: str = "float32"
    kv_dtype: str | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def arrays(self) -> tuple[jax.Array, ...]:
        """q and everything up to num_seqs. Whatever no token of a sequence is NaN where the cache can be."""
        rng = np.random.default_rng(len(self.name))
        n, size = len(self.new), self.page_size
        tokens = sum(self.new)
        columns = -(-max(self.total) // size) + 1
        num_pages = n * columns + 3
        table = rng.permutation(num_pages)[: (n + self.absent) * columns]
        table = np.resize(table, (n + self.absent, columns))
        kv = rng.standard_normal((num_pages, size, 2 * self.kv_heads, self.head_dim), np.float32)
        written = np.zeros((num_pages, size), bool)
        for pages, length in zip(table, self.total, strict=False):
            positions = np.arange(length)
            written[pages[positions // size], positions % size] = True
        kv_dtype = self.kv_dtype or self.dtype
        if kv_dtype == "int8":
            kv = np.clip(np.round(40 * kv), -127, 127)
        else:
            kv[~written] = np.nan
        boundaries = np.append(0, np.cumsum(self.new))
        return (
            jnp.asarray(rng.standard_normal((tokens + 3, self.heads, self.head_dim), np.float32), self.dtype),
            jnp.asarray(kv, kv_dtype),
            jnp.asarray([*self.total, *(1 << 30, -7)][: n + self.absent], jnp.int32),
            jnp.asarray(np.where(np.arange(n + self.absent)[:, None] < n, table, 1 << 30), jnp.int32),
            jnp.asarray([*boundaries, *(-3, 1 << 30)][: n + self.absent + 1], jnp.int32),
            jnp.asarray([n], jnp.int32),
        )


CASES = [
    Case("plain"),
    Case("one head for all", kv_heads=1, head_dim=20, page_size=1),
    Case("a head each", heads=3, kv_heads=3, head_dim=8, page_size=16),
    Case("the sequences' own number", absent=0),
    Case("only decoding", new=(1, 1, 1), total=(7, 16, 2)),
    Case("only prefill", new=(7, 9), total=(7, 9)),
    Case("a chunk of a prompt", new=(6,), total=(30,), options={"sm_scale": 0.25}),
    Case("a sequence without tokens", new=(2, 0, 1), total=(9, 6, 3)),
    Case("window of one", options={"sliding_window": 1}),
    Case("window", options={"sliding_window": 4, "sm_scale": 0.5}),
    Case("window beyond everything", options={"sliding_window": 1 << 20}),
    Case("cap", options={"soft_cap": 0.7}),
    Case("negative scale", options={"sm_scale": -0.3}),
    Case("all options", page_size=8, options={"sm_scale": 0.3, "sliding_window": 3, "soft_cap": 2.0}),
    Case("scaled", options={"k_scale": 0.3, "v_scale": -2.5, "soft_cap": 1.0}),
    Case("scaled keys", options={"k_scale": 0.3}),
    Case("scaled values", options={"v_scale": 3.0}),
    Case("bfloat16", dtype="bfloat16", options={"sm_scale": 0.25}),
    Case("float16", dtype="float16", options={"sm_scale": 0.25}),
    Case("int8", dtype="bfloat16", kv_dtype="int8", options={"sm_scale": 0.25, "k_scale": 0.025, "v_scale": 0.03}),
    Case("e4m3", dtype="bfloat16", kv_dtype="float8_e4m3fn", options={"sm_scale": 0.2, "k_scale": 1.5, "v_scale": 0.5}),
    Case("e5m2", kv_dtype="float8_e5m2", options={"sm_scale": 0.2, "k_scale": 1.5, "v_scale": 0.5}),
    Case("e4m3 without scales", kv_dtype="float8_e4m3fn", options={"sm_scale": 0.2}),
]
CASE = {case.name: case for case in CASES}


def expected(case: Case) -> np.ndarray:
    """JAX's reference on the same numbers, in float32, and zeros behind the last token."""
    q, kv_pages, lengths, table, *others = case.arrays()
    known = [np.asarray(array) for array in (lengths, table, *others)]  # it slices by them while it is traced

    @jax.jit
    def reference(q: Any, kv_pages: Any) -> Any:
        return ref_ragged_paged_attention(q, kv_pages, *known, **case.options)

    out = reference(q.astype(jnp.float32), kv_pages.astype(jnp.float32))
    return np.concatenate([np.asarray(out), np.zeros((q.shape[0] - out.shape[0], *out.shape[1:]), np.float32)])


def check(got: Any, case: Case, want: np.ndarray | None = None) -> None:
    assert got.dtype == case.dtype
    want = expected(case) if want is None else want
    largest = np.abs(want).max()
    np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=0, atol=4 * STEP[case.dtype] * largest)


def test_the_signatures_are_those_of_jax():
    for ours, theirs in (
        (ragged_paged_attention, jax_kernel.ragged_paged_attention),
        (paged_attention, jax_paged_attention),
    ):
        wanted = inspect.signature(theirs).parameters
        found = inspect.signature(ours).parameters
        assert list(found) == [*wanted, "platform", "cfg"]
        for name, parameter in wanted.items():
            assert found[name].kind == parameter.kind, name
            if parameter.default is not inspect.Parameter.empty:
                assert found[name].default == parameter.default, name
        documented = inspect.getdoc(ours) or ""
        for name in found:
            assert f"  {name}: " in documented or f"  {name}, " in documented or f", {name}" in documented, name


@pytest.mark.parametrize(
    "case",
    CASES,
    ids=lambda case: case.name,
)  # fmt: skip
def test_as_jax_reference(case: Case):
    check(ragged_paged_attention(*case.arrays(), **case.options), case)


KERNEL_CASES = [
    dataclasses.replace(CASE[name], head_dim=128, heads=2 * kv_heads, kv_heads=kv_heads)
    for name, kv_heads in (
        ("plain", 1), ("window", 1), ("cap", 1), ("all options", 2), ("scaled", 1), ("bfloat16", 2), ("int8", 2),
        ("e4m3", 2), ("e5m2", 2), ("e4m3 without scales", 2), ("only prefill", 1), ("the sequences' own number", 1),
    )
]  # fmt: skip


@pytest.mark.parametrize(
    "case",
    KERNEL_CASES,
    ids=lambda case: case.name,
)
def test_as_jax_kernel(case: Case):
    """Interpreted, JAX's kernel does not write tokens after the last sequence's."""
    arrays = case.arrays()
    options = {"sm_scale": 0.088} | case.options
    with interpret_ragged_kernel():
        want = jax_kernel.ragged_paged_attention(
            *_harmless(arrays), **options, num_kv_pages_per_block=2, num_queries_per_block=4
        )
    want = np.array(want, np.float32)
    want[sum(case.new) :] = 0
    # The kernel rounds scaled keys and values to q's dtype, and ours rounds nothing but the output.
    got = np.asarray(ragged_paged_attention(*arrays, **options), np.float32)
    np.testing.assert_allclose(got, want, rtol=0, atol=8 * STEP[case.dtype] * np.abs(want).max())


def _harmless(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """JAX's kernel reads whole blocks of tables, so that every page in them must exist."""
    table = arrays[3]
    return *arrays[:3], jnp.where(table < arrays[1].shape[0], table, 0), *arrays[4:]


def test_by_triton():
    """The same arrangement of the cache by the GPU's backend, interpreted."""
    case = dataclasses.replace(CASE["all options"], dtype="bfloat16")
    cfg = FwdParams(q_blocksize=4, kv_blocksize=16, num_key_splits=1, num_warps=4, num_stages=2)
    options = {"k_scale": None, "v_scale": 2.0, "platform": None, **case.options}
    op = jax_serving._RAGGED_PAGED_ATTENTION
    inputs = op.prepare(*case.arrays(), **options)
    with interpret_triton():
        out, _ = jax.jit(lambda inputs: TritonPagedAttention().forward(inputs, cfg))(inputs)
    check(out[..., case.head_dim :], case, 2 * expected(case))


@pytest.mark.parametrize(("num_seqs", "counted"), [(0, 0), (2, 2), (9, 4), (-1, 0)])
def test_num_seqs_is_read_on_the_device(num_seqs: int, counted: int):
    """Beyond the table's it is cut to them."""
    case = dataclasses.replace(CASE["plain"], absent=0)
    *arrays, _ = case.arrays()
    got = ragged_paged_attention(*arrays, jnp.asarray([num_seqs], jnp.int32))
    want = expected(case)
    want[sum(case.new[:counted]) :] = 0
    check(got, case, want)


def test_debugging_says_nothing_of_what_is_behind_num_seqs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    caplog.set_level(logging.ERROR, "tilewright.serving")
    # Read while a program is traced: this one is of no other test's shapes.
    q, kv_pages, lengths, *others = Case("debugging", new=(2, 1), total=(3, 2), page_size=2).arrays()
    ragged_paged_attention(q, kv_pages, lengths, *others).block_until_ready()
    jax.effects_barrier()
    assert not caplog.records
    ragged_paged_attention(q, kv_pages, lengths.at[1].set(-1), *others).block_until_ready()
    jax.effects_barrier()
    assert "kv_lengths[1] = -1" in caplog.text


def test_the_cache_is_not_copied():
    """Compiled, what is computed with takes less than a quarter of the cache; the usual split takes all of it."""
    pages = jax.ShapeDtypeStruct((512, 16, 4, 32), jnp.float32)
    q = jax.ShapeDtypeStruct((4, 4, 32), jnp.float32)
    integers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((4,), (4, 8), (5,), (1,))]
    size = 512 * 16 * 4 * 32 * 4

    def split(q: Any, kv: Any, lens: Any, table: Any, cum: Any, num_seqs: Any) -> Any:
        return ragged_page_attention(q, kv[:, :, 0::2], kv[:, :, 1::2], table, lens, cum)

    def temporary(function: Any) -> int:
        return jax.jit(function).lower(q, pages, *integers).compile().memory_analysis().temp_size_in_bytes

    assert temporary(ragged_paged_attention) < size / 4
    assert temporary(split) >= size


def test_pages_are_written_in_place_before_they_are_read():
    """Donated to a step that writes and attends, as engines have it: the result is in the same memory."""
    case = CASE["plain"]
    q, kv_pages, *others = case.arrays()
    kv_pages = jnp.nan_to_num(kv_pages)
    want = ragged_paged_attention(q, kv_pages.at[3, 1].set(0.5), *others)

    def step(kv_pages: Any) -> Any:
        kv_pages = kv_pages.at[3, 1].set(0.5)
        return kv_pages, ragged_paged_attention(q, kv_pages, *others)

    compiled = jax.jit(step, donate_argnums=0).lower(kv_pages).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= kv_pages.nbytes
    np.testing.assert_allclose(compiled(kv_pages)[1], want, atol=1e-6)


def test_transformations():
    case = CASE["plain"]
    q, *others = case.arrays()
    want = ragged_paged_attention(q, *others)
    batch = jnp.stack([q, 2 * q])
    by_vmap = jax.vmap(ragged_paged_attention, in_axes=(0, *(None,) * 5))(batch, *others)
    np.testing.assert_allclose(by_vmap[0], want, atol=1e-5)
    np.testing.assert_allclose(by_vmap[1], ragged_paged_attention(2 * q, *others), atol=1e-5)
    _, by_scan = jax.lax.scan(lambda carry, q: (carry, ragged_paged_attention(q, *others)), 0, batch)
    np.testing.assert_allclose(by_scan, by_vmap, atol=1e-5)
    with pytest.raises(TypeError, match="ragged_paged_attention is for inference"):
        jax.grad(lambda q: ragged_paged_attention(q, *others).sum())(q)


def test_heads_over_an_explicit_mesh():
    case = CASE["all options"]
    q, kv_pages, *others = case.arrays()
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        placed = (
            jax.device_put(q, NamedSharding(mesh, P(None, "tensor"))),
            jax.device_put(kv_pages, NamedSharding(mesh, P(None, None, "tensor"))),
        )
        got = jax.jit(lambda *x: ragged_paged_attention(*x, *others, **case.options))(*placed)
        assert jax.typeof(got).sharding.spec[1] == "tensor"
    check(got, case)


SMALL = [
    jnp.zeros((5, 4, 8)), jnp.zeros((6, 4, 4, 8)), jnp.zeros(2, jnp.int32), jnp.zeros((2, 3), jnp.int32),
    jnp.zeros(3, jnp.int32), jnp.ones(1, jnp.int32),
]  # fmt: skip
WRONG: dict[str, tuple[int | None, Any, type[Exception], str]] = {
    "q of rank 4": (0, jnp.zeros((1, 5, 4, 8)), ValueError, r"q must be .*\(1, 5, 4, 8\)"),
    "no array": (0, "q", TypeError, "q must be an array"),
    "integers for q": (0, jnp.zeros((5, 4, 8), jnp.int8), TypeError, "q must be float16.*int8"),
    "no heads": (0, jnp.zeros((5, 0, 8)), ValueError, "q needs at least one head"),
    "pages of rank 5": (1, jnp.zeros((6, 4, 2, 2, 8)), ValueError, r"kv_pages must be .*\(6, 4, 2, 2, 8\)"),
    "an odd number of heads": (1, jnp.zeros((6, 4, 3, 8)), ValueError, "kv_pages must have an even number of heads"),
    "another head dim": (1, jnp.zeros((6, 4, 4, 16)), ValueError, "q and kv_pages must have the same head dim"),
    "heads that do not divide": (1, jnp.zeros((6, 4, 6, 8)), ValueError, "3 key heads of the pages must divide the 4"),
    "another dtype": (1, jnp.zeros((6, 4, 4, 8), jnp.bfloat16), TypeError, "kv_pages must have q's dtype.*bfloat16"),
    "int8 without scales": (1, jnp.zeros((6, 4, 4, 8), jnp.int8), TypeError, "int8 kv_pages need k_scale and v_scale"),
    "lengths of others": (2, jnp.zeros(3, jnp.int32), ValueError, r"kv_lens must be .*max_num_seqs=2.*\(3,\)"),
    "lengths as floats": (2, jnp.zeros(2), TypeError, "kv_lens must hold integers.*float32"),
    "a flat table": (3, jnp.zeros(6, jnp.int32), ValueError, r"page_indices must be .*\(6,\)"),
    "boundaries of others": (
        4,
        jnp.zeros(2, jnp.int32),
        ValueError,
        r"cu_q_lens must be \[max_num_seqs \+ 1\].*\(2,\)",
    ),
    "a number of sequences": (5, 1, ValueError, r"num_seqs must be \[1\].*\(\)"),
    "sm_scale": (None, None, TypeError, "sm_scale must be a number, got None"),
    "sm_scale that is not finite": (None, float("nan"), ValueError, "sm_scale must be finite"),
    "sliding_window": (None, 0, ValueError, "sliding_window must be positive, got sliding_window=0"),
    "sliding_window of two": (None, (3, 0), TypeError, r"sliding_window must be an int, got \(3, 0\)"),
    "soft_cap": (None, 0.0, ValueError, "soft_cap must be positive.*0.0"),
    "mask_value": (None, -1.0, ValueError, "mask_value must hide keys.*-1.0"),
    "k_scale": (None, jnp.ones(2), TypeError, "k_scale must be a number"),
    "v_scale": (None, 0.0, ValueError, "v_scale must not be 0"),
    "platform": (None, "cpu", ValueError, "platform"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_one_error_that_names_it_and_the_function(name: str):
    place, value, error, message = WRONG[name]
    arrays, options = list(SMALL), {}
    if place is None:
        options[name.split()[0]] = value
    else:
        arrays[place] = value
    with pytest.raises(error, match=f"^ragged_paged_attention: .*{message}"):
        ragged_paged_attention(*arrays, **options)


def test_what_jax_takes_is_taken():
    """Tuning parameters within their ranges, and mask values that hide."""
    tuning = {"num_kv_pages_per_block": 3, "num_queries_per_block": 1, "vmem_limit_bytes": 1}
    for mask_value in (None, -jnp.inf, float("-inf"), -1e4, float(jnp.finfo(jnp.float16).min)):
        assert not ragged_paged_attention(*SMALL, mask_value=mask_value, **tuning).any()


def test_a_platform_that_cannot_is_an_error():
    with pytest.raises(UnsupportedError, match="ragged_paged_attention"):
        ragged_paged_attention(*SMALL, platform="triton")


# Decoding: pages of one head each.


def decoding(dtype: str = "float32") -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape, np.float32) for shape in ((3, 4, 128), (2, 8, 16, 128), (2, 8, 16, 128)))
    table = jnp.asarray(rng.permutation(8).reshape(2, 4)[[0, 1, 0]], jnp.int32)
    return jnp.asarray(q / 11, dtype), jnp.asarray(k, dtype), jnp.asarray(v, dtype), jnp.asarray([5, 0, 57]), table


def by_dot_product_attention(q: Any, k: Any, v: Any, lengths: Any, table: Any) -> np.ndarray:
    """JAX's dot_product_attention on a dense copy; a sequence without tokens gives zeros."""
    dense = [jnp.moveaxis(pages[:, table], 0, 3).reshape(3, -1, 2, 128) for pages in (k, v)]
    at_least = jnp.maximum(lengths, 1)
    out = jax.nn.dot_product_attention(q[:, None], *dense, scale=1.0, key_value_seq_lengths=at_least)[:, 0]
    return np.where(np.asarray(lengths)[:, None, None] > 0, out, 0)


def test_decoding_as_dot_product_attention():
    arrays = decoding()
    np.testing.assert_allclose(paged_attention(*arrays), by_dot_product_attention(*arrays), atol=1e-5)


def test_pages_that_do_not_exist_hold_nothing_in_any_head():
    """A number beyond the pages must not become the next head's page."""
    q, k, v, lengths, table = decoding()
    beyond = table.at[2, 2].set(8).at[0, 0].set(-1)
    want = by_dot_product_attention(q, k, v, lengths.at[2].set(32), table)
    got = paged_attention(q, k, v, jnp.asarray([5, 0, 48]), beyond)
    np.testing.assert_allclose(got[2], want[2], atol=1e-5)
    assert not got[:2].any()


@pytest.mark.parametrize("quantised", [False, True])
def test_decoding_as_jax_kernel(quantised: bool):
    q, k, v, lengths, table = decoding()
    if quantised:
        k, v = quantization_utils.quantize_to_int8(k), quantization_utils.quantize_to_int8(v)
    options = {"pages_per_compute_block": 2, "attn_logits_soft_cap": 0.5}
    with pltpu.force_tpu_interpret_mode():
        want = jax_paged_attention(q, k, v, lengths, table, **options)
    # Its kernel multiplies in bfloat16 what is not quantised.
    np.testing.assert_allclose(
        paged_attention(q, k, v, lengths, table, **options), want, atol=1e-5 if quantised else 2e-2
    )


def test_decoding_as_jax_kernel_for_gpus():
    """Whose tables come before lengths, and which JAX deprecates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import paged_attention as of_gpus
    q, k, v, lengths, table = decoding()
    want = of_gpus.paged_attention(q, k, v, table, lengths, k_splits=2, attn_logits_soft_cap=0.5, interpret=True)
    got = paged_attention(q, k, v, lengths, table, attn_logits_soft_cap=0.5)
    np.testing.assert_allclose(got, want, atol=1e-5)


WRONG_DECODING: dict[str, tuple[Any, type[Exception], str]] = {
    "q": (jnp.zeros((3, 128)), ValueError, "q must be"),
    "k_pages": (jnp.zeros((2, 8, 16)), ValueError, "k_pages and v_pages must be"),
    "v_pages": (jnp.zeros((2, 8, 16, 128), jnp.bfloat16), TypeError, "v_pages must have q's dtype"),
    "lengths": (jnp.zeros(2, jnp.int32), ValueError, r"lengths must be \[batch_size\]"),
    "page_indices": (jnp.zeros((2, 4), jnp.int32), ValueError, "page_indices must be"),
    "mask_value": (0.0, ValueError, "mask_value must hide"),
    "attn_logits_soft_cap": (-1.0, ValueError, "attn_logits_soft_cap must be positive"),
}


@pytest.mark.parametrize("name", WRONG_DECODING)
def test_a_wrong_argument_of_decoding(name: str):
    value, error, message = WRONG_DECODING[name]
    given = dict(zip(("q", "k_pages", "v_pages", "lengths", "page_indices"), decoding(), strict=True))
    with pytest.raises(error, match=f"^paged_attention: .*{message}"):
        paged_attention(**(given | {name: value}))
