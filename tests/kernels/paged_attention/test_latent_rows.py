"""Latents in FlashMLA's rows, against the format written out in NumPy from its description."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.kernels.paged_attention.conformance import check, inputs_of
from tilewright.errors import UnsupportedError
from tilewright.kernels import kernel
from tilewright.kernels.paged_attention.ops.mla_decode import MlaCase
from tilewright.kernels.paged_attention.ops.mla_ragged_page_attention import MlaRaggedPageCase
from tilewright.modules import (
    context_parallel_mla_decode,
    mla_decode,
    mla_ragged_page_attention,
    page_attention,
    quantize_latents,
    update_pages,
)
from tilewright.ops.utils.datacarrier import FwdParams


def e4m3(code: int) -> float:
    """The number of eight bits: a sign, four of an exponent with bias 7, three of a fraction; no infinity."""
    sign, exponent, fraction = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if (exponent, fraction) == (15, 7):
        return float("nan")
    return sign * (2.0**-6 * fraction / 8 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + fraction / 8))


NUMBERS = np.asarray([e4m3(code) for code in range(256)])
MAGNITUDES = NUMBERS[:127]
"""Of the codes without a sign, ascending; the 127th is NaN."""


def encoded(quotients: np.ndarray) -> np.ndarray:
    """The codes of the nearest numbers; of two that are as near the one with the even fraction."""
    size = np.minimum(np.abs(quotients.astype(np.float64)), 448.0)
    above = np.minimum(np.searchsorted(MAGNITUDES, size), 126)
    below = np.maximum(above - 1, 0)
    up, down = MAGNITUDES[above] - size, size - MAGNITUDES[below]
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return (code | np.where(np.signbit(quotients), 128, 0)).astype(np.uint8)


def bfloat16_bits(x: np.ndarray) -> np.ndarray:
    """The upper halves of float32, rounded to nearest even."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")


def rows_by_hand(latents: np.ndarray, nudge: float = 1.0) -> np.ndarray:
    """Rows byte by byte: 512 codes, of quotients times ``nudge``, four scales in float32, 64 numbers in bfloat16."""
    rows = np.zeros((*latents.shape[:-1], 656), np.uint8)
    for place in np.ndindex(latents.shape[:-1]):
        latent = latents[place].astype(np.float32)
        for group in range(4):
            elements = latent[128 * group : 128 * (group + 1)]
            scale = np.float32(np.abs(elements).max() / np.float32(448.0)) or np.float32(1.0)
            rows[place][128 * group : 128 * (group + 1)] = encoded(elements.astype(np.float64) / scale * nudge)
            rows[place][512 + 4 * group : 516 + 4 * group] = np.frombuffer(np.float32(scale).tobytes(), np.uint8)
        rows[place][528:] = np.frombuffer(bfloat16_bits(latent[512:]).tobytes(), np.uint8)
    return rows


def check_rows(rows: Any, latents: np.ndarray) -> None:
    """Every byte; the last bit of a scale may differ, and so may a code whose quotient lies between two numbers."""
    rows = np.asarray(rows)
    low, high = (rows_by_hand(latents, nudge) for nudge in (1 - 2.0**-21, 1 + 2.0**-21))
    scales, want = (np.ascontiguousarray(each[..., 512:528]).view("<f4") for each in (rows, low))
    np.testing.assert_array_max_ulp(scales, want, 1)
    np.testing.assert_array_equal(rows[..., 528:], low[..., 528:])
    codes = rows[..., :512]
    assert ((codes == low[..., :512]) | (codes == high[..., :512])).all()
    assert (low != high).mean() < 0.01  # of which bfloat16 has many


def latents_by_hand(rows: np.ndarray) -> np.ndarray:
    """The numbers in rows, in float64."""
    latents = np.zeros((*rows.shape[:-1], 576))
    for place in np.ndindex(rows.shape[:-1]):
        row = rows[place]
        scales = np.frombuffer(row[512:528].tobytes(), "<f4").astype(np.float64)
        latents[place][:512] = NUMBERS[row[:512]] * np.repeat(scales, 128)
        upper = np.frombuffer(row[528:].tobytes(), "<u2").astype(np.uint32) << 16
        latents[place][512:] = upper.view(np.float32)
    return latents


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    """Latents whose groups have magnitudes of their own."""
    random = np.random.default_rng(seed)
    spread = np.repeat(2.0 ** random.integers(-9, 9, (*shape, 9)), 64, axis=-1)
    return np.asarray(random.standard_normal((*shape, 576)) * spread, np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_are_those_of_the_description(dtype: str):
    latents = drawn(40, 7)  # enough for quotients that a rounding to float16 would bring half way between two numbers
    latents[0, 1, :128] = 0.0  # a group of zeros
    latents[1, 2, 5] = 3e4 * np.abs(latents[1, 2, :128]).max() if dtype == "float32" else 100.0
    given = jnp.asarray(latents, dtype)
    rows = quantize_latents(given)
    assert (rows.shape, rows.dtype) == ((40, 7, 656), np.uint8)
    check_rows(rows, np.asarray(given, np.float32))
    np.testing.assert_array_equal(jax.jit(quantize_latents)(given), rows)


def test_rounding_is_to_nearest_even_and_saturates_nothing():
    """Every number of float8, every one half way between two, and the floats beside these."""
    middles = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
    points = np.concatenate([MAGNITUDES, middles]).astype(np.float32)
    points = np.concatenate([points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(500))])
    points = np.concatenate([points, -points])
    points = points[np.abs(points) <= 448.0]
    latents = np.zeros((-(-len(points) // 127), 576), np.float32)
    for row, chunk in zip(latents, np.split(points, range(127, len(points), 127)), strict=True):
        row[: len(chunk)], row[127] = chunk, 448.0  # a scale of 1
    rows = np.asarray(quantize_latents(latents))
    np.testing.assert_array_equal(rows, rows_by_hand(latents))
    back = NUMBERS[rows[:, :127]]
    nearest = np.abs(np.abs(latents[:, :127, None]) - MAGNITUDES).min(axis=2)
    np.testing.assert_array_equal(np.abs(back - latents[:, :127]), nearest)


def test_tiny_latents_become_zeros_and_not_nan():
    latents = np.full((2, 576), 1e-43, np.float32)
    latents[1] = np.float32(2.0**-117)
    back = latents_by_hand(np.asarray(quantize_latents(latents)))
    assert np.isfinite(back).all()
    np.testing.assert_allclose(back[1], latents[1], rtol=2.0**-4)


HEADS, PAGE, COLUMNS = 3, 16, 3
LENGTHS, COUNTS = [40, 0, 17, PAGE], [1, 0, 9, 2]


def batch(seed: int = 3) -> dict[str, Any]:
    """Queries and rows in shuffled pages; what nobody may see is NaN in every part of a row."""
    random = np.random.default_rng(seed)
    pages = np.full((len(LENGTHS) * COLUMNS + 1, PAGE, 656), 255, np.uint8)
    table = random.permutation(len(pages))[: len(LENGTHS) * COLUMNS].reshape(-1, COLUMNS)
    rows = [rows_by_hand(drawn(length, seed=seed + i) / 8) for i, length in enumerate(LENGTHS)]
    for entries, stored in zip(table, rows, strict=True):
        for position, row in enumerate(stored):
            pages[entries[position // PAGE], position % PAGE] = row
    return {
        "query": random.standard_normal((sum(COUNTS), HEADS, 576)) / 24,
        "pages": pages, "table": table, "latents": [latents_by_hand(row) for row in rows],
    }  # fmt: skip


def dense(query: np.ndarray, latents: list[np.ndarray], counts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Attention over the numbers in the rows in float64, and its log-sum-exp."""
    out, lse, token = [], [], 0
    for count, keys in zip(counts, latents, strict=True):
        for position in range(len(keys) - count, len(keys)):
            logits = 0.3 * query[token] @ keys[: position + 1].T
            out.append(np.exp(logits) @ keys[: position + 1, :512] / np.exp(logits).sum(1, keepdims=True))
            lse.append(np.log(np.exp(logits).sum(1)))
            token += 1
    return np.asarray(out), np.asarray(lse)


def packed(of: dict[str, Any], dtype: Any) -> tuple[jax.Array, ...]:
    query = jnp.asarray(of["query"], dtype)
    integers = (of["table"], LENGTHS, np.append(0, np.cumsum(COUNTS)))
    pages = jnp.asarray(of["pages"])
    return query[..., :512], query[..., 512:], pages, *(jnp.asarray(each, jnp.int32) for each in integers)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_packed_queries_over_rows(dtype: str):
    of = batch()
    want, want_lse = dense(of["query"], of["latents"], COUNTS)
    with jax.enable_x64(dtype == "float64"):
        out, lse = mla_ragged_page_attention(*packed(of, dtype), softmax_scale=0.3, return_lse=True)
    scale, tolerance = np.abs(want).max(), 1e-5 if dtype == "float32" else 1e-6
    np.testing.assert_allclose(out, want, atol=tolerance * scale)
    np.testing.assert_allclose(lse, want_lse, atol=10 * tolerance)


@pytest.mark.parametrize("pages_have_heads", [False, True])
def test_decoding_over_rows(pages_have_heads: bool):
    of = batch()
    keep = [0, 2, 3]
    query, lengths = of["query"][: 2 * len(keep)].reshape(3, 2, HEADS, 576), [LENGTHS[row] for row in keep]
    pages = of["pages"][:, :, None] if pages_have_heads else of["pages"]
    call = jnp.asarray(query, jnp.float32), jnp.asarray(pages), jnp.asarray(of["table"][keep]), jnp.asarray(lengths)
    out = mla_decode(*call, softmax_scale=0.3)
    want, _ = dense(query.reshape(6, HEADS, 576), [of["latents"][row] for row in keep], [2] * 3)
    np.testing.assert_allclose(out.reshape(want.shape), want, atol=1e-5 * np.abs(want).max())


ROWS: dict[str, Any] = {
    "sequences": 3, "kv_length": 50, "heads": 6, "head_dim": 576, "value_dim": 512, "page_size": 16, "rows": True,
    "dtype": "bfloat16",
}  # fmt: skip
IN_TRITON: dict[str, tuple[str, Any, dict[str, int]]] = {
    "decoding": ("mla_decode", MlaCase("", **ROWS), {"num_key_splits": 2}),
    "float16, pages of 3": ("mla_decode", MlaCase("", **ROWS | {"dtype": "float16", "page_size": 3}), {}),
    "drafts": ("mla_ragged_page_attention", MlaRaggedPageCase("", **ROWS, q_lengths=(3, 7), tree=True), {}),
    "mixed": (
        "mla_ragged_page_attention",
        MlaRaggedPageCase("", **ROWS, q_lengths=(1, 9, 2), sinks=1, sliding_window=20, logits_soft_cap=30.0),
        {"num_key_splits": 3, "q_blocksize": 4},
    ),
}  # fmt: skip


@pytest.mark.usefixtures("unoptimised")
@pytest.mark.parametrize("name", IN_TRITON)
def test_rows_in_triton(name: str):
    pytest.importorskip("triton")
    from tilewright.kernels.triton.interpreter import interpret_triton

    op, case, given = IN_TRITON[name]
    inputs = inputs_of(op, case)
    backend = next(each for each in kernel(op).backends.usable if each.name == "triton")
    params = FwdParams(**{"q_blocksize": 2, "kv_blocksize": 16, "num_key_splits": 1, "num_warps": 8} | given)
    with interpret_triton():
        got = jax.block_until_ready(jax.jit(lambda inputs: backend.forward(inputs, params))(inputs))
    check(got, inputs, case.tolerance_factor)


@pytest.mark.usefixtures("unoptimised")
def test_rows_in_triton_that_nobody_may_see():
    pytest.importorskip("triton")
    from tilewright.kernels.triton.interpreter import interpret_triton

    of = batch()
    op = kernel("mla_ragged_page_attention")
    inputs = op.prepare(*packed(of, jnp.bfloat16), softmax_scale=0.3)
    backend = next(each for each in op.backends.usable if each.name == "triton")
    params = FwdParams(q_blocksize=2, kv_blocksize=16, num_key_splits=2, num_warps=8)
    with interpret_triton():
        out, lse = jax.block_until_ready(jax.jit(lambda inputs: backend.forward(inputs, params))(inputs))
    want, want_lse = dense(np.asarray(inputs.query, np.float64), of["latents"], COUNTS)
    np.testing.assert_allclose(np.asarray(out, np.float64), want, atol=0.03 * np.abs(want).max())
    np.testing.assert_allclose(lse, want_lse, atol=0.05)


def test_rows_are_written_like_any_cache():
    of = batch()
    *queries, pages, table, lengths, cum = packed(of, jnp.float32)
    new = drawn(sum(COUNTS), seed=9) / 8

    @jax.jit
    def step(pages: jax.Array) -> Any:
        written = update_pages(pages, None, quantize_latents(new), None, table, lengths, cum)
        out = mla_ragged_page_attention(*queries, written, table, lengths, cum, softmax_scale=0.3)
        return written, out

    written, out = step(pages)
    changed, token, latents = np.array(pages), 0, [each.copy() for each in of["latents"]]
    for row, (count, length) in enumerate(zip(COUNTS, LENGTHS, strict=True)):
        for position in range(length - count, length):
            place = of["table"][row, position // PAGE], position % PAGE
            check_rows(written[place], new[token])
            changed[place] = written[place]
            latents[row][position] = latents_by_hand(np.asarray(written[place]))
            token += 1
    np.testing.assert_array_equal(written, changed)
    want, _ = dense(of["query"], latents, COUNTS)
    np.testing.assert_allclose(out, want, atol=1e-5 * np.abs(want).max())


def test_rows_on_several_devices():
    """Pages of rows that are dealt out: column p of the table is of device p mod n."""
    of, devices = batch(), 2
    query, table = jnp.asarray(of["query"][:4], jnp.float32), of["table"]
    own = np.full((devices, table.shape[0] * 2, PAGE, 656), 255, np.uint8)
    numbers = np.zeros_like(table)
    for row, column in np.ndindex(table.shape):
        numbers[row, column] = 2 * row + column // devices
        own[column % devices, numbers[row, column]] = of["pages"][table[row, column]]
    mesh = jax.make_mesh((devices,), ("pages",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])

    def decode(query: jax.Array, pages: jax.Array, table: jax.Array, lengths: jax.Array) -> jax.Array:
        return context_parallel_mla_decode(query, pages, table, lengths, axis_name="pages", softmax_scale=0.3)

    split = jax.shard_map(decode, mesh=mesh, in_specs=(P(), P("pages"), P(), P()), out_specs=P())
    out = jax.jit(split)(query, jnp.asarray(own.reshape(-1, PAGE, 656)), jnp.asarray(numbers), jnp.asarray(LENGTHS))
    whole = mla_decode(query, jnp.asarray(of["pages"]), jnp.asarray(table), jnp.asarray(LENGTHS), softmax_scale=0.3)
    np.testing.assert_allclose(out, whole, atol=1e-5 * float(jnp.abs(whole).max()))


CALL = packed(batch(), jnp.float32)
QUERY = jnp.concatenate(CALL[:2], axis=2)[:4]
WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "width": (lambda: mla_decode(QUERY, CALL[2][..., :640], *CALL[3:5]), ValueError, r"rows of 656 bytes.*640"),
    "width, packed": (
        lambda: mla_ragged_page_attention(*CALL[:2], CALL[2][..., :576], *CALL[3:]), ValueError, r"rows of 656 bytes",
    ),
    "head dim": (lambda: mla_decode(QUERY[..., :512], *CALL[2:5]), ValueError, "512 and 64"),
    "rank": (lambda: mla_decode(QUERY, *CALL[2:5], kv_lora_rank=448), ValueError, "512 and 64"),
    "rank, packed": (
        lambda: mla_ragged_page_attention(QUERY[..., :448], QUERY[..., 448:], *CALL[2:4], CALL[4], jnp.arange(5)),
        ValueError, "512 and 64",
    ),
    "a scale": (lambda: mla_decode(QUERY, *CALL[2:5], scale=1.0), TypeError, "scales of their own"),
    "keys of bytes": (
        lambda: page_attention(QUERY, CALL[2][:, :, None, :576], CALL[2][:, :, None, :576], *CALL[3:5]),
        TypeError, "uint8",
    ),
    "latents that are no rows": (
        lambda: update_pages(CALL[2], None, QUERY[:, 0], None, *CALL[3:5]), ValueError, "656",
    ),
    "floats for bytes": (
        lambda: update_pages(CALL[2], None, jnp.zeros((4, 656)), None, *CALL[3:5]), TypeError, "quantize_latents",
    ),
    "a scale of what is written": (
        lambda: update_pages(CALL[2], None, CALL[2][:4, 0], None, *CALL[3:5], key_scale=1.0),
        TypeError, "scales of their own",
    ),
    "width of latents": (lambda: quantize_latents(QUERY[..., :575]), ValueError, r"quantize_latents: .*576"),
    "dtype of latents": (lambda: quantize_latents(CALL[2][..., :576]), TypeError, "latents must be float16"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_one_clear_error(name: str):
    call, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        call()


def test_the_kernel_for_hopper_declines_rows_by_name():
    import tilewright

    query = jax.ShapeDtypeStruct((4, 16, 576), jnp.bfloat16)
    pages = jax.ShapeDtypeStruct((8, 64, 656), jnp.uint8)
    integers = jax.ShapeDtypeStruct((4, 2), jnp.int32), jax.ShapeDtypeStruct((4,), jnp.int32)
    with tilewright.target_device("NVIDIA H100 80GB HBM3"):
        (call,) = tilewright.explain(mla_decode, query, pages, *integers)
        assert call.config.backend == "triton"
        assert any("row_format" in reason for reason in call.choice.rejected["hopper"])
    with tilewright.target_device("NVIDIA A100-SXM4-80GB"):
        (call,) = tilewright.explain(mla_decode, query, pages, *integers)
        assert call.config.backend == "xla"
        with pytest.raises(UnsupportedError, match=r"8\.9"):
            tilewright.explain(lambda *x: mla_decode(*x, platform="triton"), query, pages, *integers)
