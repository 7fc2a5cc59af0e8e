"""Attention over a cache on a GPU: all backends against the oracle, graphs, tuning, and hostile tables."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl

import tilewright
from tests.kernels.paged_attention.conformance import PagedConformance, check, inputs_of
from tests.kernels.paged_attention.latent_conformance import LatentConformance, latent_inputs
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.paged_attention.cuda.packed import CudaPackedAttention
from tilewright.kernels.paged_attention.hopper.latent_backend import HopperLatentParams, PallasGpuPagedAttention
from tilewright.kernels.paged_attention.hopper.packed_backend import PallasGpuPackedAttention
from tilewright.kernels.paged_attention.inputs import PagedInputs
from tilewright.kernels.paged_attention.ops.mla_decode import MlaCase
from tilewright.kernels.paged_attention.ops.mla_ragged_page_attention import MlaRaggedPageCase
from tilewright.kernels.paged_attention.ops.page_attention import PageCase
from tilewright.kernels.paged_attention.ops.ragged_page_attention import RaggedPageCase
from tilewright.kernels.paged_attention.triton import elements
from tilewright.kernels.paged_attention.triton.backend import TritonPagedAttention
from tilewright.kernels.paged_attention.xla.backend import XlaPagedAttention
from tilewright.kernels.triton import launch
from tilewright.modules import PageAttention, page_attention, update_pages
from tilewright.ops import ConfigSelectorChain, Executor, Tuner
from tilewright.ops.utils.datacarrier import FwdParams
from tilewright.ops.utils.device import current_device

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")

BATCH: dict[str, Any] = {"sequences": 8, "kv_length": 2048}
REAL: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}


class TestTritonOnGpu(PagedConformance):
    backend: ClassVar[Backend] = TritonPagedAttention()

    def params(self, inputs: PagedInputs) -> Any:
        rows = 4 if inputs.longest_q > 1 else 1
        splits = (1, 2, 5)[(inputs.head_dim + inputs.capacity + inputs.page_size) % 3]
        return FwdParams(q_blocksize=rows, kv_blocksize=32, num_key_splits=splits, num_warps=4, num_stages=3)


needs_hopper = pytest.mark.skipif(current_device().capability != (9, 0), reason="needs compute capability 9.0")


@needs_hopper
class TestLatentsOnHopper(LatentConformance):
    backend: ClassVar[Backend] = PallasGpuPagedAttention()

    def params(self, ranges: int) -> Any:
        return HopperLatentParams(ranges, ranges - 1)  # with and without loads into the L2 cache


@needs_hopper
@pytest.mark.parametrize(("heads", "q_length"), [(128, 1), (64, 2), (16, 1)])
def test_latents_of_real_sizes_repeat_bit_for_bit(heads: int, q_length: int) -> None:
    """Often: a slot that is overwritten while a product reads it shows now and then."""
    inputs = latent_inputs(sequences=64, kv_length=4096, heads=heads, q_lengths=(q_length,))
    check_and_repeat(PallasGpuPagedAttention(), inputs, 50)


def drawn_lengths(sequences: int, mean: int) -> list[int]:
    draw = np.random.default_rng(0).normal(mean, mean / 2, sequences)
    return np.maximum(draw.astype(int), 1).tolist()


UNEQUAL: dict[str, tuple[list[int], dict[str, Any]]] = {
    "mean 1022": (drawn_lengths(128, 1022), {}),
    "mean 2142": (drawn_lengths(128, 2142), {}),
    "17 rows": (np.linspace(1000, 30000, 17).astype(int).tolist(), {}),
    "one long among short ones": ([1, 64, 63, 65, 0, 128, 127] * 9 + [60000] + [700] * 40, {}),
    "one": ([100000], {}),
    "more sequences than CTAs": (drawn_lengths(400, 500), {}),
    "few heads": (drawn_lengths(64, 3000), {"heads": 16}),
    "sinks": (drawn_lengths(90, 2000), {"sinks": 500}),
    "several tokens": (drawn_lengths(40, 2000), {"q_lengths": (3,), "heads": 64}),
    "keys ahead": (drawn_lengths(40, 2000), {"q_lengths": (5,), "causal": False, "sliding_window": (None, 2)}),
    "float16, large pages": (drawn_lengths(40, 3000), {"dtype": "float16", "page_size": 256}),
}


@needs_hopper
@pytest.mark.parametrize("name", UNEQUAL)
def test_latents_of_unequal_lengths(name: str) -> None:
    """Sequences that are cut where the range of a CTA ends, in as many places as on a whole card."""
    lengths, fields = UNEQUAL[name]
    sizes = {"sequences": len(lengths), "kv_length": max(lengths), "heads": 128}
    check_and_repeat(PallasGpuPagedAttention(), latent_inputs(lengths, **sizes | fields), 20)


def check_and_repeat(backend: Any, inputs: PagedInputs, runs: int) -> None:
    """Every candidate, against the oracle and then against itself."""
    for params in backend.candidates(inputs, current_device(), "forward"):
        run = jax.jit(lambda inputs, params=params: backend.forward(inputs, params))
        first = run(inputs)
        check(first, inputs)
        for _ in range(runs):
            for got, want in zip(run(inputs), first, strict=True):
                assert bool(jnp.array_equal(got, want, equal_nan=True)), params


class TestXlaOnGpu(PagedConformance):
    backend: ClassVar[Backend] = XlaPagedAttention()

    def params(self, inputs: PagedInputs) -> Any:
        return FwdParams(q_blocksize=4, kv_blocksize=24, blocksize_heads=2 * inputs.heads)

    @pytest.fixture(autouse=True)
    def exact_products(self) -> Any:
        with jax.default_matmul_precision("highest"):
            yield


LATENTS: dict[str, Any] = {
    **BATCH, "heads": 128, "head_dim": 576, "value_dim": 512, "page_size": 64, "dtype": "bfloat16"
}  # fmt: skip
LARGE = {
    "page 16": ("page_attention", PageCase("", sequences=16, kv_length=4096, **REAL)),
    "page 64": ("page_attention", PageCase("", sequences=16, kv_length=4096, page_size=64, **REAL)),
    "page 1": ("page_attention", PageCase("", sequences=4, kv_length=3001, page_size=1, **REAL)),
    "one long": ("page_attention", PageCase("", sequences=1, kv_length=40000, page_size=256, **REAL)),
    "int8": ("page_attention", PageCase("", **BATCH, kv_dtype="int8", scale="token", **REAL)),
    "fp8": (
        "page_attention",
        PageCase("", **BATCH, kv_dtype="float8_e4m3fn", scale="page", **REAL),
    ),
    "e5m2": ("page_attention", PageCase("", **BATCH, kv_dtype="float8_e5m2", **REAL)),
    "everything": (
        "page_attention",
        PageCase("", **BATCH, sliding_window=700, logits_soft_cap=20.0, sinks=1, alibi=True, **REAL),
    ),
    "mixed": ("ragged_page_attention", RaggedPageCase("", sequences=9, kv_length=2048, q_lengths=(1, 1, 300), **REAL)),
    "drafts": (
        "ragged_page_attention",
        RaggedPageCase("", **BATCH, q_lengths=(16, 5, 64), tree=True, **REAL),
    ),
    "drafts int8": (
        "ragged_page_attention",
        RaggedPageCase("", **BATCH, q_lengths=(16, 1), tree=True, kv_dtype="int8", scale="token", **REAL),
    ),
    "latent": (
        "mla_decode",
        MlaCase("", **BATCH, heads=128, head_dim=576, value_dim=512, page_size=64, dtype="bfloat16"),
    ),
    "latents, mixed": ("mla_ragged_page_attention", MlaRaggedPageCase("", **LATENTS, q_lengths=(1, 1, 1, 100))),
    "latents, mixed, 16 heads": (
        "mla_ragged_page_attention",
        MlaRaggedPageCase("", **LATENTS | {"heads": 16, "page_size": 16}, q_lengths=(1, 300), sinks=1),
    ),
    "latents, drafts": (
        "mla_ragged_page_attention",
        MlaRaggedPageCase("", **LATENTS | {"heads": 32}, q_lengths=(16, 5, 64), tree=True),
    ),
    "rows": ("mla_decode", MlaCase("", **LATENTS, rows=True)),
    "rows, 16 heads, two tokens": ("mla_decode", MlaCase("", **LATENTS | {"heads": 16}, q_lengths=(2,), rows=True)),
    "rows, mixed": (
        "mla_ragged_page_attention",
        MlaRaggedPageCase("", **LATENTS, q_lengths=(1, 1, 1, 100), rows=True),
    ),
    "rows, drafts, pages of 16": (
        "mla_ragged_page_attention",
        MlaRaggedPageCase("", **LATENTS | {"heads": 32, "page_size": 16}, q_lengths=(16, 5), tree=True, rows=True),
    ),
    "latents, fp8": (
        "mla_ragged_page_attention",
        MlaRaggedPageCase("", **LATENTS, q_lengths=(1, 20), kv_dtype="float8_e4m3fn", scale="tensor"),
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_heuristic_on_real_sizes(name: str) -> None:
    op, case = LARGE[name]
    inputs = inputs_of(op, case)
    backend = TritonPagedAttention()
    assert not backend.not_supported_reasons(inputs, current_device(), "forward")
    params = backend.heuristic(inputs, current_device(), "forward")
    got = jax.jit(lambda inputs: backend.forward(inputs, params))(inputs)
    check(got, inputs, case.tolerance_factor)
    for first, second in zip(got, jax.jit(lambda inputs: backend.forward(inputs, params))(inputs), strict=True):
        np.testing.assert_array_equal(np.asarray(first, np.float32), np.asarray(second, np.float32))


def test_it_is_what_runs_and_tuning_believes_it() -> None:
    positional, keywords = PageCase("", **BATCH, **REAL).arguments()
    chain = ConfigSelectorChain()
    executor = Executor(chain)
    assert executor.choose_config(PageAttention(), *positional, **keywords).backend == "triton"
    run = lambda *x: executor(PageAttention(), *x, **keywords)
    result = tilewright.tune(run, *positional, tuner=Tuner(1, 2), chooser=chain, budget_s=60.0)
    (call,) = result
    assert call.winner.check == "passed", [(str(c.config), c.error) for c in call.candidates]


@triton.jit
def widened(pairs, first, second, kind: tl.constexpr):
    n = tl.arange(0, 1024) + 1024 * tl.program_id(0)
    one, other = elements.neighbours(tl.load(pairs + n), kind)
    tl.store(first + n, one)
    tl.store(second + n, other)


@pytest.mark.parametrize("assembly", ["INT8", "E4M3", "E5M2"])
def test_every_pair_of_bytes_is_widened(assembly: str) -> None:
    kind = {"INT8": tl.int8, "E4M3": tl.float8e4nv, "E5M2": tl.float8e5}[assembly]
    pairs = np.arange(1 << 16, dtype=np.uint16).view(np.int16)
    halves = [jax.ShapeDtypeStruct(pairs.shape, jnp.float16)] * 2
    got = jax.jit(lambda pairs: launch(widened, [pairs], halves, grid=[64], constants={"kind": kind}))(pairs)
    for each, which in zip(got, ("FIRST", "SECOND"), strict=True):
        meaning = elements.MEANINGS[getattr(elements, f"{assembly}_{which}").value]
        np.testing.assert_array_equal(np.asarray(each), meaning(pairs))


def test_lengths_and_tables_change_without_a_new_program() -> None:
    positional, _ = PageCase("", sequences=4, kv_length=512, **REAL).arguments()
    query, key, value, table, _ = positional
    step = jax.jit(lambda table, lengths: page_attention(query, key, value, table, lengths))
    for seed in range(3):
        draw = np.random.default_rng(seed)
        lengths = jnp.asarray(draw.integers(0, 513, 4), jnp.int32)
        rows = jnp.asarray(draw.permutation(np.asarray(table)), jnp.int32)
        want = page_attention(query, key, value, rows, lengths, platform="xla")
        np.testing.assert_allclose(
            np.asarray(step(rows, lengths), np.float32), np.asarray(want, np.float32), atol=0.02, rtol=0.02
        )
    assert step._cache_size() == 1


def test_a_donated_cache_in_a_scan() -> None:
    case = PageCase("", sequences=4, kv_length=256, **REAL)
    query, key, value, table, _ = case.arguments()[0]
    new = jax.random.normal(jax.random.key(0), (20, 4, 8, 128), jnp.bfloat16)

    def run(cache: Any, platform: str) -> Any:
        def step(cache: Any, inputs: Any) -> Any:
            index, each = inputs
            lengths = jnp.full(4, index + 200)
            cache = update_pages(*cache, each, each, table, lengths)
            return cache, page_attention(query, *cache, table, lengths, platform=platform)

        return jax.lax.scan(step, cache, (jnp.arange(20), new))[1]

    jitted = jax.jit(run, donate_argnums=0, static_argnums=1)
    got, want = (jitted((key + 0, value + 0), platform) for platform in ("triton", "xla"))
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_hostile_tables_in_bounds(page_size: int, kv_dtype: str | None) -> None:
    """Run under compute-sanitizer, which sees what a result does not; a nested case for each kind of read."""
    scale = None if kv_dtype is None else "token"
    case = PageCase("", sequences=5, kv_length=700, page_size=page_size, kv_dtype=kv_dtype, scale=scale, **REAL)
    run_on_hostile_tables(TritonPagedAttention(), inputs_of("page_attention", case))


@needs_hopper
@pytest.mark.parametrize("page_size", [64, 128])
def test_hostile_tables_of_latents_in_bounds(page_size: int) -> None:
    inputs = latent_inputs(sequences=5, kv_length=700, page_size=page_size, heads=20, q_lengths=(2,))
    run_on_hostile_tables(PallasGpuPagedAttention(), inputs)


PACKED: dict[str, Any] = {"sequences": 9, "kv_length": 2048, **REAL}
PACKED_BACKENDS = pytest.mark.parametrize(
    "backend", [PallasGpuPackedAttention(), CudaPackedAttention()], ids=lambda backend: backend.platform
)


def packed_inputs(**fields: Any) -> PagedInputs:
    return inputs_of("ragged_page_attention", RaggedPageCase("", **PACKED | {"q_lengths": (1, 1, 300)} | fields))


@needs_hopper
@pytest.mark.parametrize(
    "fields", [{}, {"sliding_window": 700}, {"causal": False}, {"head_dim": 64}, {"heads": 40}, {"heads": 8}], ids=str
)
@pytest.mark.parametrize("page_size", [16, 64, 256])
@PACKED_BACKENDS
def test_packed_on_hopper(backend: Backend, page_size: int, fields: dict[str, Any]) -> None:
    """Often: a slot that is overwritten while a product reads it shows now and then."""
    check_and_repeat(backend, packed_inputs(page_size=page_size, **fields), 20)


@needs_hopper
@pytest.mark.parametrize(
    "fields",
    [
        {"sequences": 80, "kv_length": 700},
        {"sequences": 80, "q_lengths": (1, 1, 3, 0, 2, 1, 30)},
        {"heads": 24, "q_lengths": (2, 3, 200), "causal": False},
        {"dtype": "float16", "softmax_scale": 0.7},
        {"sliding_window": (100, None), "q_lengths": (1, 2, 70)},
        {"sequences": 3000, "kv_length": 40, "q_lengths": (0, 1, 3)},
        {"sequences": 3, "kv_length": 60000, "q_lengths": (1, 2, 300)},
        {"sequences": 5, "kv_length": 60000, "q_lengths": (1, 1, 200), "sliding_window": 9000},
        {"sequences": 64, "kv_length": 4000, "heads": 8, "kv_heads": 1, "q_lengths": (1,)},
    ],
    ids=str,
)
@PACKED_BACKENDS
def test_many_packed_sequences_on_hopper(backend: Backend, fields: dict[str, Any]) -> None:
    """More of either kind than there are multiprocessors, so that blocks take what comes next; or so few that keys are
    cut to parts."""
    check_and_repeat(backend, packed_inputs(**fields), 20)


@needs_hopper
@pytest.mark.parametrize(
    "fields",
    [
        {"q_lengths": (16,)}, {"q_lengths": (64, 3, 40)}, {"head_dim": 64}, {"sliding_window": 700}, {"heads": 40},
        {"sequences": 64, "q_lengths": (8, 1, 100)},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("page_size", [16, 64, 256])
def test_trees_on_hopper(page_size: int, fields: dict[str, Any]) -> None:
    check_and_repeat(PallasGpuPackedAttention(), packed_inputs(page_size=page_size, tree=True, **fields), 20)


@needs_hopper
@pytest.mark.parametrize("offset", [-40.0, 40.0])
@PACKED_BACKENDS
def test_logits_that_are_all_far_from_zero(backend: Backend, offset: float) -> None:
    """The greatest logit is looked for by its bits where it is not negative."""
    inputs = packed_inputs(sequences=4, kv_length=600, q_lengths=(1, 70))
    one = offset / (8 * inputs.query.shape[-1] ** -0.5)
    query, key = inputs.query.at[..., 0].set(8), inputs.key.at[..., 0].set(one)
    check_and_repeat(backend, dataclasses.replace(inputs, query=query, key=key), 3)


@needs_hopper
@pytest.mark.parametrize("page_size", [16, 128])
@PACKED_BACKENDS
def test_hostile_tables_of_packed_queries_in_bounds(backend: Backend, page_size: int) -> None:
    inputs = packed_inputs(page_size=page_size, sequences=5, kv_length=700, q_lengths=(1, 40))
    run_on_hostile_tables(backend, inputs)


@needs_hopper
@PACKED_BACKENDS
def test_tokens_of_no_sequence_and_values_that_no_token_sees(backend: Backend) -> None:
    inputs = packed_inputs(sequences=4, kv_length=300, q_lengths=(1, 70))
    cum = np.asarray(inputs.cum_q_lens)
    inputs = dataclasses.replace(inputs, cum_q_lens=jnp.asarray([3, cum[1], cum[3], cum[2], cum[4] - 9], jnp.int32))
    assert inputs.value is not None
    lengths, table = np.asarray(inputs.kv_lengths), np.asarray(inputs.page_table)
    behind = np.zeros(inputs.value.shape[:2], bool)
    for sequence, length in enumerate(lengths):
        position = np.arange(inputs.capacity)
        page = table[sequence, position // inputs.page_size]
        behind[page, position % inputs.page_size] |= position >= length
    poisoned = jnp.where(jnp.asarray(behind)[..., None, None], jnp.nan, inputs.value)
    params = backend.heuristic(inputs, current_device(), "forward")
    run = jax.jit(lambda inputs: backend.forward(inputs, params))
    out, _ = got = run(dataclasses.replace(inputs, value=poisoned))
    check(got, inputs)
    assert not np.asarray(out[:3]).any()
    assert not np.asarray(out[-9:]).any()


def run_on_hostile_tables(backend: Any, inputs: PagedInputs) -> None:
    params = backend.heuristic(inputs, current_device(), "forward")
    run = jax.jit(lambda inputs: backend.forward(inputs, params))
    wild = np.array([-1, -(2**31), inputs.key.shape[0], 2**31 - 1, 0])
    draw = np.random.default_rng(0)
    table = np.asarray(inputs.page_table).copy()
    table[draw.random(table.shape) < 0.5] = wild[draw.integers(0, 5)]
    for lengths in ([0, 1, 700, 10**9, -5], [2**31 - 1] * 5):
        hostile = dataclasses.replace(
            inputs, page_table=jnp.asarray(table, jnp.int32), kv_lengths=jnp.asarray(lengths, jnp.int32)
        )
        check(run(hostile), hostile)
