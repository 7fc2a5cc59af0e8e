"""Rotating and writing at once: against both ops one after the other, and against float64 by plain indexing."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.kernels.conftest import A100, H100
from tilewright.kernels import kernel
from tilewright.kernels.paged_attention.ops.rope_update_pages import RopeUpdateCase
from tilewright.kernels.paged_attention.triton.rotating import TritonRopeUpdatePages
from tilewright.kernels.paged_attention.xla.rotating import XlaRopeUpdatePages
from tilewright.kernels.triton.interpreter import interpret_triton
from tilewright.modules import YarnScaling, rope, rope_update_pages, update_pages
from tilewright.ops.utils.datacarrier import FwdParams

OP = kernel("rope_update_pages")
PAGES, SIZE, HEADS, KV_HEADS, DIM, VALUE_DIM = 7, 4, 6, 2, 16, 12
TABLE, LENGTHS, CUM = np.asarray([[4, 1, 0], [2, 5, 3]]), np.asarray([9, 5]), np.asarray([0, 6, 8])
ROPE_OPTIONS: dict[str, dict[str, Any]] = {
    "halves": {},
    "interleaved": {"interleaved": True, "base": 500.0},
    "a fraction": {"fraction": 0.375, "scaling": YarnScaling(4.0, 64)},
    "an interleaved fraction": {"fraction": 0.5, "interleaved": True},
}


def draw(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


KEY_PAGES, VALUE_PAGES = draw(PAGES, SIZE, KV_HEADS, DIM, seed=1), draw(PAGES, SIZE, KV_HEADS, VALUE_DIM, seed=2)
QUERY, KEY, VALUE = draw(8, HEADS, DIM), draw(8, KV_HEADS, DIM, seed=3), draw(8, KV_HEADS, VALUE_DIM, seed=4)
CALL = tuple(map(jnp.asarray, (QUERY, KEY_PAGES, VALUE_PAGES, KEY, VALUE, TABLE, LENGTHS, CUM)))


def by_xla(*args: Any, **options: Any) -> Any:
    inputs = OP.prepare(*args, **options)
    return OP.outputs(inputs, jax.jit(lambda inputs: XlaRopeUpdatePages().forward(inputs, FwdParams()))(inputs))


def by_triton(*args: Any, **options: Any) -> Any:
    """By the interpreter; query heads are two parts, the last of which has fewer."""
    inputs = OP.prepare(*args, **options)
    assert not TritonRopeUpdatePages().not_supported_reasons(inputs, H100, "forward")
    with interpret_triton():
        run = jax.jit(lambda inputs: TritonRopeUpdatePages().forward(inputs, FwdParams(blocksize_heads=4, num_warps=2)))
        return OP.outputs(inputs, jax.block_until_ready(run(inputs)))


every_backend = pytest.mark.parametrize("run", [by_xla, by_triton])


def places(lengths: np.ndarray = LENGTHS, cum: np.ndarray = CUM) -> np.ndarray:
    return np.concatenate([np.arange(n - (b - a), n) for n, a, b in zip(lengths, cum[:-1], cum[1:], strict=True)])


def one_after_the_other(*args: Any, **options: Any) -> Any:
    query, key_pages, value_pages, key, value, *where = args
    scales = {name: options.pop(name) for name in ("key_scale", "value_scale") if name in options}
    positions = options.pop("positions", None)
    if positions is None:
        positions = places()
    turn = lambda x: rope(x, jnp.asarray(positions), **options)
    cache = update_pages(key_pages, value_pages, turn(key), value, *where, **scales)
    return turn(query), *cache


def turned(x: jax.Array, positions: np.ndarray, base: float, rotated: int, interleaved: bool) -> np.ndarray:
    """By complex numbers in float64."""
    out = np.asarray(x, np.float64).copy()
    angles = positions[:, None] * base ** (-np.arange(0, rotated, 2) / rotated)
    first, second = (slice(0, rotated, 2), slice(1, rotated, 2)) if interleaved else (
        slice(0, rotated // 2), slice(rotated // 2, rotated)
    )  # fmt: skip
    products = (out[..., first] + 1j * out[..., second]) * np.exp(1j * angles)[:, None]
    out[..., first], out[..., second] = products.real, products.imag
    return out


@every_backend
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("given", [None, (7, 7, 300, -2, 0, 1, 12, 5)])
def test_by_plain_indexing(run: Callable[..., Any], interleaved: bool, given: tuple[int, ...] | None):
    options = {} if given is None else {"positions": jnp.asarray(given)}
    query, key_pages, value_pages = run(*CALL, fraction=0.75, base=300.0, interleaved=interleaved, **options)
    at = places()
    positions = at if given is None else np.asarray(given)
    want_key, want_value = np.array(KEY_PAGES), np.array(VALUE_PAGES)
    keys = turned(KEY, positions, 300.0, 12, interleaved)
    for token, place in enumerate(at):
        page = TABLE[0 if token < 6 else 1, place // SIZE]
        want_key[page, place % SIZE], want_value[page, place % SIZE] = keys[token], VALUE[token]
    np.testing.assert_allclose(query, turned(QUERY, positions, 300.0, 12, interleaved), atol=1e-4)
    np.testing.assert_allclose(key_pages, want_key, atol=1e-4)
    np.testing.assert_array_equal(value_pages, want_value)


@every_backend
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ROPE_OPTIONS)
def test_against_both_ops(run: Callable[..., Any], name: str, dtype: str):
    call = [x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in CALL]
    want = one_after_the_other(*call, **ROPE_OPTIONS[name])
    for ours, theirs in zip(run(*call, **ROPE_OPTIONS[name]), want, strict=True):
        assert ours.dtype == theirs.dtype
        # A multiplication and an addition may be one instruction in one of them: an ulp of float32, or then of dtype.
        np.testing.assert_allclose(
            np.asarray(ours, np.float32), np.asarray(theirs, np.float32), rtol=float(jnp.finfo(dtype).eps), atol=1e-6
        )


@every_backend
@pytest.mark.parametrize(
    ("kv_dtype", "scale"),
    list(
        itertools.product(
            ["int8", "float8_e4m3fn", "float8_e5m2", "bfloat16"],
            [(PAGES, SIZE, KV_HEADS), (1, 1, 1), (PAGES, 1, KV_HEADS), (1, SIZE, 1), (PAGES, SIZE, 1), None],
        )
    ),
)
def test_stored_in_fewer_bits(run: Callable[..., Any], kv_dtype: str, scale: tuple[int, ...] | None):
    if kv_dtype == "int8" and scale is None:
        pytest.skip("int8 has scales")
    if kv_dtype == "bfloat16" and scale is not None and scale[:2] == (PAGES, SIZE):
        pytest.skip("such a scale is about a subnormal number, which XLA flushes")
    query, key_pages, value_pages, key, value, *where = CALL
    call = (query, key_pages.astype(kv_dtype), value_pages.astype(kv_dtype), 100 * key.at[3].set(0.0), value, *where)
    drawn = {} if scale is None else {
        name: jnp.abs(draw(*scale, seed=seed)) + 0.1 for seed, name in enumerate(("key_scale", "value_scale"))
    }  # fmt: skip
    options = drawn | {"fraction": 0.5}
    got, want = run(*call, **options), one_after_the_other(*call, **options)
    assert len(got) == len(want) == (3 if scale is None else 5)
    step, differ = {
        "int8": (0.0, 0.01), "float8_e4m3fn": (0.13, 0.01), "float8_e5m2": (0.26, 0.01), "bfloat16": (0.01, 1.0)
    }[kv_dtype]  # fmt: skip
    for index, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        assert ours.dtype == theirs.dtype
        ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
        if index in (1, 2):
            # An ulp of float32 before the rounding moves an element by a step at most, and few of them.
            assert np.mean(ours != theirs) <= differ
            np.testing.assert_allclose(ours, theirs, rtol=step, atol=1.0 if kv_dtype == "int8" else 1e-3)
        else:
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


@every_backend
def test_scales_that_only_the_keys_compute(run: Callable[..., Any]):
    call = (QUERY, KEY_PAGES.astype("int8"), VALUE_PAGES.astype("int8"), KEY, VALUE, *CALL[5:])
    scales = {"key_scale": jnp.ones((PAGES, SIZE, KV_HEADS)), "value_scale": 0.05}
    for ours, theirs in zip(run(*call, **scales), one_after_the_other(*call, **scales), strict=True):
        np.testing.assert_allclose(np.asarray(ours, np.float32), np.asarray(theirs, np.float32), rtol=1e-6, atol=1.0)


@every_backend
@pytest.mark.parametrize(
    ("table", "lengths", "cum"),
    [
        ([[4, -1, 77], [2, 2, 2]], [9, 6], [0, 6, 7]),
        ([[4, 1, 0], [2, 5, 3]], [0, 1], [0, 6, 8]),
        ([[4, 1, 0], [4, 1, 0]], [4, 4], [0, 4, 8]),
        ([[4, 1, 0], [2, 5, 3]], [-3, 2**31 - 1], [0, 4, 8]),
        ([[4, 1, 0], [2, 5, 3]], [13, 1000], [0, 8, 8]),
        ([[4, 1, 0], [2, 5, 3]], [-(2**31), 12], [-9, 2**31 - 1, 0]),
        ([[4, 1, 0], [2, 5, 3]], [2, 3], [5, 3, 99]),
        ([[-(2**31), 2**31 - 1, 0], [2, 5, 3]], [9, 5], [0, 6, 8]),
    ],
)
def test_places_are_those_of_update_pages(run: Callable[..., Any], table: Any, lengths: Any, cum: Any):
    """What has no place is dropped, the last of two stays, and any contents are in bounds."""
    where = tuple(map(jnp.asarray, (table, lengths, cum)))
    _, key_pages, value_pages = run(QUERY, KEY_PAGES, VALUE_PAGES, KEY, VALUE, *where, positions=jnp.zeros(8, int))
    want = update_pages(KEY_PAGES, VALUE_PAGES, KEY, VALUE, *where)  # at position 0 nothing is turned
    np.testing.assert_array_equal(key_pages, want[0])
    np.testing.assert_array_equal(value_pages, want[1])


@every_backend
def test_one_token_of_each_sequence(run: Callable[..., Any]):
    where = tuple(map(jnp.asarray, (TABLE, LENGTHS)))
    got = run(QUERY[:2], KEY_PAGES, VALUE_PAGES, KEY[:2], VALUE[:2], *where)
    want = run(QUERY[:2], KEY_PAGES, VALUE_PAGES, KEY[:2], VALUE[:2], *where, jnp.arange(3))
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_allclose(got[0], rope(QUERY[:2], LENGTHS - 1), atol=1e-5)


@every_backend
def test_maps(run: Callable[..., Any]):
    queries, keys = jnp.stack([QUERY, 2 * QUERY]), jnp.stack([KEY, -KEY])
    mapped = jax.vmap(lambda query, key: run(query, *CALL[1:3], key, *CALL[4:]))(queries, keys)
    for index in range(2):
        single = run(queries[index], *CALL[1:3], keys[index], *CALL[4:])
        for ours, theirs in zip(mapped, single, strict=True):
            np.testing.assert_allclose(ours[index], theirs, atol=1e-6)


@pytest.mark.parametrize("empty", ["tokens", "sequences"])
def test_nothing_to_write(empty: str):
    if empty == "tokens":
        call = (QUERY[:0], KEY_PAGES, VALUE_PAGES, KEY[:0], VALUE[:0], *map(jnp.asarray, (TABLE, LENGTHS, [0, 0, 0])))
    else:
        call = (QUERY, KEY_PAGES, VALUE_PAGES, KEY, VALUE, jnp.zeros((0, 3), int), jnp.zeros(0, int), jnp.asarray([0]))
    for run in (by_xla, by_triton, rope_update_pages):
        query, key_pages, value_pages = run(*call)
        np.testing.assert_array_equal(query, call[0])
        np.testing.assert_array_equal(key_pages, KEY_PAGES)
        np.testing.assert_array_equal(value_pages, VALUE_PAGES)


def test_donated_pages_are_written_in_place():
    step = jax.jit(lambda pages, query: rope_update_pages(query, *pages, *CALL[3:]), donate_argnums=0)
    text = step.lower((KEY_PAGES, VALUE_PAGES), QUERY).compile().as_text()
    assert "input_output_alias={ {1}: (0, {}" in text
    pages = KEY_PAGES + 0, VALUE_PAGES + 0
    addresses = [each.unsafe_buffer_pointer() for each in pages]
    _, *new = step(pages, QUERY)
    assert [each.unsafe_buffer_pointer() for each in new] == addresses


def test_one_triton_kernel_that_updates_its_operands():
    """What is read and written once, by design: one launch, whose outputs in place are the pages and scales."""
    from tilewright.kernels.triton import recorded_launches

    inputs = OP.prepare(
        QUERY, KEY_PAGES.astype("int8"), VALUE_PAGES.astype("int8"), KEY, VALUE, *CALL[5:],
        key_scale=jnp.ones((PAGES, SIZE, 1)), value_scale=0.1,
    )  # fmt: skip
    with recorded_launches() as launches:
        jax.eval_shape(lambda inputs: TritonRopeUpdatePages().forward(inputs, FwdParams()), inputs)
    (launch,) = launches
    assert [x.shape for x in launch.fresh] == [QUERY.shape]
    updated = [launch.inputs[index].shape for index in launch.in_place]
    assert updated == [KEY_PAGES.shape, VALUE_PAGES.shape, (PAGES, SIZE, 1)]


def test_split_by_heads():
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:1])
    want = rope_update_pages(*CALL)

    def put(x: jax.Array, *axes: str | None) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, P(*axes)))

    rows, pages = (None, "heads"), (None, None, "heads")
    with jax.set_mesh(mesh):
        call = [
            put(QUERY, *rows), put(KEY_PAGES, *pages), put(VALUE_PAGES, *pages), put(KEY, *rows), put(VALUE, *rows),
            *(put(x) for x in CALL[5:]),
        ]  # fmt: skip
        got = jax.jit(rope_update_pages)(*call)
        assert jax.typeof(got[0]).sharding.spec[1] == "heads"
        assert jax.typeof(got[1]).sharding.spec[2] == "heads"
        for ours, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-6)
        with pytest.raises(ValueError, match="split by heads alone"):
            rope_update_pages(put(QUERY, "heads"), *call[1:])
        with pytest.raises(ValueError, match="alike"):
            rope_update_pages(*call[:3], put(KEY), *call[4:])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({0: QUERY[:, :, :8]}, ValueError, "same head dim"),
        ({0: QUERY[:7]}, ValueError, r"\[7, 2, 16\]"),
        ({0: QUERY.astype(int)}, TypeError, "query must be float16"),
        ({3: KEY[:, :1]}, ValueError, "the new key must be"),
        ({4: VALUE.astype(int)}, TypeError, "the new value must be floating-point"),
        ({5: jnp.asarray(TABLE[:1])}, ValueError, "page_table must be"),
        ({7: jnp.asarray(CUM[:2])}, ValueError, "cum_q_lens must be"),
        ({"positions": jnp.zeros(7, int)}, ValueError, "positions must broadcast"),
        ({"positions": jnp.zeros(8)}, TypeError, "positions must hold integers"),
        ({"fraction": 0.1}, ValueError, "even number of elements"),
        ({"base": 1.0}, ValueError, "base must be greater"),
        ({"scaling": 4.0}, TypeError, "scaling must be"),
        ({2: None}, TypeError, "value_pages must be an array"),
        ({1: KEY_PAGES.astype("int8"), 2: VALUE_PAGES.astype("int8")}, TypeError, "int8 keys and values need scales"),
    ],
)
def test_wrong_arguments(changes: dict[Any, Any], error: type[Exception], message: str):
    call: list[Any] = list(CALL)
    options = {}
    for where, what in changes.items():
        if isinstance(where, int):
            call[where] = what
        else:
            options[where] = what
    with pytest.raises(error, match=message):
        rope_update_pages(*call, **options)


def test_reasons():
    backend = TritonRopeUpdatePages()

    def reasons(device: Any = H100, **fields: Any) -> list[str]:
        args, keywords = RopeUpdateCase("", sequences=2, kv_length=32, heads=4, head_dim=16, **fields).arguments()
        return backend.not_supported_reasons(OP.prepare(*args, **keywords), device, "forward")

    assert not reasons()
    assert "8.9" in reasons(A100, kv_dtype="float8_e4m3fn")[0]
    assert "exceed a tile" in reasons(kv_heads=4, value_dim=4097)[0]
    assert backend.not_supported_reasons(OP.prepare(*CALL), H100, "backward")
    assert "query must be" in backend.forward_reasons(OP.prepare(*CALL).replace(query=np.zeros((8, 6, 16))), H100)[0]
    assert "power of two" in backend.config_reasons(
        OP.prepare(*CALL), H100, "forward", FwdParams(blocksize_heads=3)
    )[0]  # fmt: skip
    listed = list(backend.candidates(OP.prepare(*CALL), H100, "forward"))
    assert (
        listed[0] == backend.heuristic(OP.prepare(*CALL), H100, "forward") == FwdParams(blocksize_heads=8, num_warps=4)
    )
    assert len(set(listed)) == len(listed)
